"""The first checks of one incarnation of a simulated node, which only the store may decide. See ADR 0032."""

from dataclasses import dataclass
from typing import Any

from ratelimitd.ledger.shared_state import Ask, Met, StoreCheck
from tests.simulation.world import SECOND, Meeting

BURIED_US = 5 * SECOND
"""Time after the end of an incarnation until nothing of it is in flight."""


@dataclass(eq=False, slots=True)
class Waiting:
    """A check that waits, or has waited, for the store."""

    key: bytes
    cost: int
    at_us: int
    """The time as of which it is decided."""
    ask: Ask | None = None
    answered: bool = False
    charged: bool = False


class FirstChecks:
    """First checks in flight. Their results go to their node."""

    def __init__(self, node: Any) -> None:
        self.node = node
        self.world = node.world
        self._waiting: dict[bytes, tuple[Meeting, list[Waiting]]] = {}

    def wait(self, waiting: Waiting) -> None:
        """Let a check wait for the first check of its bucket, or make it the first."""
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
        """Send a first check, once, because it has no number."""

        def back(met: Met) -> None:
            if self.is_on_its_way(meeting):
                _, waiting = self._waiting.pop(meeting.check.name)
                self.node.met(waiting, met)

        self.world.meet(self.node, meeting, back)

    def is_on_its_way(self, meeting: Meeting) -> bool:
        """Whether a check waits for it."""
        latest, _ = self._waiting.get(meeting.check.name, (None, ()))
        return latest is meeting

    def _is_answered(self, meeting: Meeting) -> None:
        if not self.is_on_its_way(meeting):
            return
        # There will be no answer. Only the simulation knows whether the store has charged the first check.
        _, waiting = self._waiting.pop(meeting.check.name)
        books = self.world.books
        books.unchecked += sum(one.cost for one in waiting)
        if meeting.is_charged:
            books.unchecked -= meeting.check.cost
        self.node.not_met(waiting)

    def end(self) -> None:
        """Drop all, because the node has crashed."""
        for meeting, _ in self._waiting.values():
            self.world.after(BURIED_US, self._bury, meeting)
        self._waiting = {}

    def _bury(self, meeting: Meeting) -> None:
        if meeting.is_charged:
            self.world.books.wasted += meeting.check.cost
