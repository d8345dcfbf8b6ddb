"""The conformance vectors, straight into the algorithms, and those with holds against their model.

Over the wire: tests/rpc.
"""

from fractions import Fraction

import pytest

from ratelimitd.algorithms.calendar_window import in_force, window_at
from ratelimitd.cli.conformance.cases import Answer, LimitAnswer, cases
from ratelimitd.model import US_PER_S, Algorithm, Limit
from tests.outcomes import NAMED_DECIDE
from tests.own_hold_model import HoldModel


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


@pytest.mark.parametrize("case", [case for case in cases() if case.has_holds], ids=str)
def test_every_step_of_a_case_with_holds_is_what_the_model_says(case):
    [rule] = case.rules
    names = [limit.name for limit in rule.limits]
    limits = [
        Limit(
            limit=limit.limit,
            window_seconds=limit.window_seconds,
            algorithm=Algorithm(limit.algorithm),
            burst=limit.burst,
        )
        for limit in rule.limits
    ]
    charges, model = list(zip(names, limits, strict=True)), HoldModel()
    for number, step in enumerate(case.steps):
        for name, actual in step.settles:
            assert model.settle(name, actual, clock=0)[0]
        now = Fraction(step.at_us, US_PER_S)
        if step.hold:
            told, _ = model.hold(step.hold, b"", charges, step.cost, 3_600, now, 0)
        else:
            told = model.check(charges, step.cost, now, 0)
        answers = {name: LimitAnswer(0, name, *one) for name, one in zip(names, told, strict=True)}
        first, *_ = step.expected.limits
        limits_told = (answers.pop(first.name), *sorted(answers.values()))
        decided = limits_told[0][2:]
        got = step.expected._replace(
            **dict(zip(Answer._fields, decided, strict=False)), limits=limits_told
        )
        assert step.expected.differences(got) == [], f"step {number}"
