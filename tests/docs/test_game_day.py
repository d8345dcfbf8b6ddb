"""The page about faults names tests, and each of them is there."""

import re
from pathlib import Path

from ratelimitd.observe.metrics import DEFINITIONS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/game-day.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and "| fault |" not in line]


def defined():
    """The names of all tests."""
    files = (ROOT / "tests").rglob("test_*.py")
    return {
        name for file in files for name in re.findall(r"def (test_\w+)", file.read_text("utf-8"))
    }


def test_every_row_names_tests_that_are_there():
    named = [re.findall(r"`(test_\w+)`", row) for row in ROWS]
    assert all(named), "a fault that no test injects"
    assert {name for names in named for name in names} <= defined()


def test_every_metric_of_a_row_is_exported():
    exported = {definition.name.removeprefix("rate_limiter_") for definition in DEFINITIONS}
    ends = ("_total", "_seconds", "_ratio", "_up", "_nodes", "_buckets")
    named = {
        name for row in ROWS for name in re.findall(r"`(?!test_)(\w+)`", row) if name.endswith(ends)
    }
    assert len(named) > 10
    assert named <= exported
