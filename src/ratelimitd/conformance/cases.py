"""The vectors: cases with a virtual clock, one file per algorithm, in ``vectors/`` beside this module.

Never changes them: they are what was agreed on, and other implementations are held against the same files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from importlib.resources import files
from itertools import pairwise
from typing import Any, Final, NamedTuple, Self

from ratelimitd.conformance.answers import Answer
from ratelimitd.model import Algorithm, IdentifierType, Rule

IDENTIFIER_TYPE: Final = IdentifierType.USER
"""Of all cases: an algorithm does not know who asks."""

_VECTORS: Final = files("ratelimitd.conformance").joinpath("vectors")

_SCHEMA: Final = ".schema.json"


class Step(NamedTuple):
    """One check of a case, and what it has to be answered. ``at_us`` is wall time, in µs since the Unix epoch."""

    at_us: int
    cost: int
    expected: Answer


class Case(NamedTuple):
    """One rule, and checks under one identifier in this order."""

    algorithm: Algorithm
    name: str
    limit: int
    window_seconds: int
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        return f"{self.algorithm}: {self.name}"

    @classmethod
    def of(cls, algorithm: str, case: Mapping[str, Any]) -> Self:
        """The case of a file that is valid by the schema."""
        limit, window_seconds = case["limit"], case["window_seconds"]
        steps = tuple(
            Step(
                step["at_us"],
                step["cost"],
                Answer(
                    step["allowed"],
                    step["remaining"],
                    step["reset_time"],
                    step["retry_after"],
                    step["reason"],
                    limit,
                    window_seconds,
                ),
            )
            for step in case["steps"]
        )
        return cls(Algorithm(algorithm), case["name"], limit, window_seconds, steps)

    @property
    def goes_back(self) -> bool:
        """Whether a check has an earlier time than the one before it, as no clock of a server has."""
        return any(later.at_us < earlier.at_us for earlier, later in pairwise(self.steps))

    def rule(self, endpoint: str) -> Rule:
        """The rule of the case, for ``endpoint``."""
        return Rule("", endpoint, IDENTIFIER_TYPE, self.limit, self.window_seconds, self.algorithm)


def cases() -> list[Case]:
    """All cases, by algorithm, in the order of the files."""
    return list(_cases())


def _cases() -> Iterator[Case]:
    for file in sorted(_VECTORS.iterdir(), key=lambda file: file.name):
        if file.name.endswith(".json") and not file.name.endswith(_SCHEMA):
            vectors = json.loads(file.read_text(encoding="utf-8"))
            for case in vectors["cases"]:
                yield Case.of(vectors["algorithm"], case)
