"""The log line about the rules in force: when they change, yet not at each of many edits in a row.

Never reads a book; it is told.
"""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)


class RulesLog:
    """Remembers what came into force; :meth:`write`, called about once a second, logs the last state."""

    def __init__(self) -> None:
        self._state: tuple[int, int] | None = None
        self._written: tuple[int, int] | None = None

    def take(self, revision: int, rules: int) -> None:
        """A book of so many rules came into force."""
        self._state = revision, rules

    def write(self) -> None:
        """Log the state, if it is another than was logged last."""
        if self._state is None or self._state == self._written:
            return
        self._written = self._state
        if rules := self._state[1]:
            _log.info("rules in force: %d", rules)
        else:
            _log.warning("no rules: every check is allowed")
