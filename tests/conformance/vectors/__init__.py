"""The conformance vectors: cases with a virtual clock, one file per algorithm."""

import json
from pathlib import Path
from typing import NamedTuple

from ratelimitd.model import Algorithm, IdentifierType, Rule


class Case(NamedTuple):
    algorithm: str
    name: str
    limit: int
    window_seconds: int
    steps: list[dict]

    def __str__(self):
        return f"{self.algorithm}: {self.name}"


def _load():
    for path in sorted(Path(__file__).parent.glob("*.json")):
        vectors = json.loads(path.read_text())
        for case in vectors["cases"]:
            yield Case(
                vectors["algorithm"],
                case["name"],
                case["limit"],
                case["window_seconds"],
                case["steps"],
            )


CASES = list(_load())


def rule_of(case):
    return Rule(
        "id", "/e", IdentifierType.USER, case.limit, case.window_seconds, Algorithm(case.algorithm)
    )


def expected(step):
    return (
        step["allowed"],
        step["remaining"],
        step["reset_time"],
        step["retry_after"],
        step["reason"],
    )
