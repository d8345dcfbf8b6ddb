"""What a look at one thing came to. Never holds a secret: findings are printed, and pasted into reports."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Level(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """A node works, and somebody may come to regret it."""
    PROBLEM = "problem"
    """A node would not start, or not do what it is set to."""


class Finding(NamedTuple):
    """``area`` is a setting or a thing, ``what`` was found, ``remedy`` says what to do; empty where nothing is."""

    area: str
    level: Level
    what: str
    remedy: str = ""


def ok(area: str, what: str) -> Finding:
    """All is well."""
    return Finding(area, Level.OK, what)


def warning(area: str, what: str, remedy: str) -> Finding:
    """It works, but."""
    return Finding(area, Level.WARNING, what, remedy)


def problem(area: str, what: str, remedy: str) -> Finding:
    """It does not work."""
    return Finding(area, Level.PROBLEM, what, remedy)
