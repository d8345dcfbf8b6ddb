"""The conformance vectors, straight into the algorithms (over the wire: tests/rpc)."""

import pytest

from tests.outcomes import NAMED_DECIDE

from .vectors import CASES, expected, rule_of


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_step_of_a_vector_holds_to_the_last_unit(case):
    rule, state = rule_of(case), None
    for number, step in enumerate(case.steps):
        outcome = NAMED_DECIDE[rule.algorithm](state, rule, step["at_us"], step["cost"])
        assert (*outcome[:4], outcome.reason.name) == expected(step), f"step {number}"
        state = outcome.state
