"""The conformance vectors, straight into the algorithms (over the wire: tests/rpc)."""

import pytest

from ratelimitd.cli.conformance.cases import Answer, cases
from tests.outcomes import NAMED_DECIDE


@pytest.mark.parametrize("case", [case for case in cases() if not case.rules], ids=str)
def test_every_step_of_a_vector_holds_to_the_last_unit(case):
    rule, state = case.rule("/e"), None
    for number, step in enumerate(case.steps):
        outcome = NAMED_DECIDE[rule.algorithm](state, rule, step.at_us, step.cost)
        told = (*outcome[:4], outcome.reason.name, rule.limit, rule.window_seconds)
        assert Answer(*told) == step.expected, f"step {number}"
        state = outcome.state
