"""The first checks of one life of a simulated node: the store decides each, or nobody does. See ADR 0032."""

from dataclasses import dataclass
from typing import Any

from ratelimitd.ledger.shared_state import Ask, Met, StoreCheck
from tests.simulation.world import SECOND, Meeting

BURIED_US = 5 * SECOND
"""After the end of a life nothing of it is on its way any more."""


@dataclass(eq=False, slots=True)
class Waiting:
    """A check that waits for the store, or did."""

    key: bytes
    cost: int
    at_us: int
    """For when it is to be decided."""
    ask: Ask | None = None
    answered: bool = False
    charged: bool = False


class FirstChecks:
    """Those on their way. What becomes of them is told to the node that they are of."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.world = node.world
        self._waiting: dict[bytes, tuple[Meeting, list[Waiting]]] = {}

    def wait(self, waiting: Waiting) -> None:
        """Let a check wait for the first one of its bucket, or be that."""
        key = waiting.key
        if key in self._waiting:
            self._waiting[key][1].append(waiting)
            return
        node = self.node
        meeting = Meeting(StoreCheck(key, node.rule, waiting.at_us, waiting.cost, peek=False))
        self._waiting[key] = meeting, [waiting]
        self.bring(meeting)
        self.world.after(self.world.answer_us, node.run, self._is_answered, meeting)

    def bring(self, meeting: Meeting) -> None:
        """Send a first check; once, for it has no number."""

        def back(met: Met) -> None:
            if self.is_on_its_way(meeting):
                _, waiting = self._waiting.pop(meeting.check.name)
                self.node.met(waiting, met)

        self.world.meet(self.node, meeting, back)

    def is_on_its_way(self, meeting: Meeting) -> bool:
        """Whether somebody waits for it."""
        latest, _ = self._waiting.get(meeting.check.name, (None, ()))
        return latest is meeting

    def _is_answered(self, meeting: Meeting) -> None:
        if not self.is_on_its_way(meeting):
            return
        # No answer has come, and none will. Whether the store has charged the first one is known to nobody but us.
        _, waiting = self._waiting.pop(meeting.check.name)
        books = self.world.books
        books.unchecked += sum(one.cost for one in waiting)
        if meeting.is_charged:
            books.unchecked -= meeting.check.cost
        self.node.not_met(waiting)

    def end(self) -> None:
        """The node crashes: nobody is there for an answer."""
        for meeting, _ in self._waiting.values():
            self.world.after(BURIED_US, self._bury, meeting)
        self._waiting = {}

    def _bury(self, meeting: Meeting) -> None:
        if meeting.is_charged:
            self.world.books.wasted += meeting.check.cost
