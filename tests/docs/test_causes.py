"""The page on limits names every cause that can be counted, and no other."""

import re
from pathlib import Path

from ratelimitd.http2.limits import ALLOWANCES
from ratelimitd.node.serving import CAUSES

PAGE = (Path(__file__).resolve().parents[2] / "docs/operations.md").read_text(encoding="utf-8")
SECTION = PAGE.split("\n## Limits and abuse\n", 1)[1].split("\n## ", 1)[0]
ROWS = [line.split("|")[1:4] for line in SECTION.splitlines() if line.startswith("| `")]


def test_every_cause_has_its_row_and_every_row_a_cause():
    named = {name for causes, *_ in ROWS for name in re.findall(r"`(\w+)`", causes)}
    assert named == CAUSES


def test_the_free_frames_are_those_of_the_code():
    for cause, allowance in ALLOWANCES.items():
        [limit] = [limit for causes, limit, _ in ROWS if f"`{cause}`" in causes]
        free = re.search(r"[Ff]ree: ([\d,]+), (\d)(?: \((\w+): (\d)\))?, (\d+)", limit)
        assert free, cause
        burst, per_work, other, other_per_work, per_second = free.groups()
        if other and cause.value.startswith((other, f"empty_{other}")):
            per_work = other_per_work
        found = (int(burst.replace(",", "")), int(per_work), int(per_second))
        assert found == tuple(allowance), cause
