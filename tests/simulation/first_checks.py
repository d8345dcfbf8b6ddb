"""The first checks of one incarnation of a simulated node, which only the store may decide. See ADR 0032."""

from dataclasses import dataclass
from typing import Any

from ratelimitd.ledger.shared_state import Ask, FirstResult, StoreCheck
from tests.simulation.world import SECOND, FirstCheck

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
        self._waiting: dict[bytes, tuple[FirstCheck, list[Waiting]]] = {}

    def wait(self, waiting: Waiting) -> None:
        """Let a check wait for the first check of its bucket, or make it the first."""
        key = waiting.key
        if key in self._waiting:
            self._waiting[key][1].append(waiting)
            return
        node = self.node
        first_check = FirstCheck(
            StoreCheck(key, node.rule, waiting.at_us, waiting.cost, peek=False)
        )
        self._waiting[key] = first_check, [waiting]
        self.send(first_check)
        self.world.after(self.world.answer_us, node.run, self._is_answered, first_check)

    def send(self, first_check: FirstCheck) -> None:
        """Send a first check, once, because it has no number."""

        def back(result: FirstResult) -> None:
            if self.is_on_its_way(first_check):
                _, waiting = self._waiting.pop(first_check.check.name)
                self.node.first_checked(waiting, result)

        self.world.send_first_check(self.node, first_check, back)

    def is_on_its_way(self, first_check: FirstCheck) -> bool:
        """Whether a check waits for it."""
        latest, _ = self._waiting.get(first_check.check.name, (None, ()))
        return latest is first_check

    def _is_answered(self, first_check: FirstCheck) -> None:
        if not self.is_on_its_way(first_check):
            return
        # There will be no answer. Only the simulation knows whether the store has charged the first check.
        _, waiting = self._waiting.pop(first_check.check.name)
        books = self.world.books
        books.unchecked += sum(one.cost for one in waiting)
        if first_check.is_charged:
            books.unchecked -= first_check.check.cost
        self.node.first_check_failed(waiting)

    def end(self) -> None:
        """Drop all, because the node has crashed."""
        for first_check, _ in self._waiting.values():
            self.world.after(BURIED_US, self._bury, first_check)
        self._waiting = {}

    def _bury(self, first_check: FirstCheck) -> None:
        if first_check.is_charged:
            self.world.books.wasted += first_check.check.cost
