"""The conformance vectors, straight into the algorithms (over the wire: tests/rpc)."""

import pytest

from ratelimitd.algorithms.calendar_window import in_force, window_at
from ratelimitd.cli.conformance.cases import Answer, cases
from tests.outcomes import NAMED_DECIDE


@pytest.mark.parametrize("case", [case for case in cases() if not case.rules], ids=str)
def test_every_step_of_a_vector_holds_to_the_last_unit(case):
    rule, states, window = case.rule("/e"), {}, None
    for number, step in enumerate(case.steps):
        judging = rule
        if case.calendar is not None:
            window = window_at(case.calendar, step.at_us)
            judging = in_force(rule, window)
        outcome = NAMED_DECIDE[rule.algorithm](states.get(window), judging, step.at_us, step.cost)
        told = (*outcome[:4], outcome.reason.name, rule.limit, rule.window_seconds)
        assert Answer(*told) == step.expected, f"step {number}"
        states[window] = outcome.state
