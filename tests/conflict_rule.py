"""Which of two states of one bucket holds, when both came from the shared store: the specification's conflict rule.

Never judges a node's own view against the store: a view's clock is always the later one, so that the rule would forget
what others spent (ADR 0011). Pure: no clock, no I/O.
"""

from __future__ import annotations

from typing import NamedTuple


class StoredState(NamedTuple):
    """A bucket's state as the shared store knows it; the order of the fields is the order of their weight.

    ``generation`` grows with every reset and ``rule_revision`` with every edit of the rule; ``latest_us`` is the last
    refill (µs since the Unix epoch) and ``spent`` what is missing from a full bucket.
    """

    generation: int
    rule_revision: int
    latest_us: int
    spent: int


def merge(one: StoredState, other: StoredState) -> StoredState:
    """The state that holds: the later last-refill wins, else the lower token count, that is, the more spent.

    A reset (generation), then an edit of the rule (revision), outweigh both. Being the maximum of tuples this is
    commutative, associative and idempotent (I5): the order in which nodes hear of states does not matter.
    """
    return max(one, other)
