"""The vectors: valid against their schema, and read as written."""

import json
from copy import deepcopy
from importlib.resources import files

import pytest
from jsonschema import Draft202012Validator, ValidationError

from ratelimitd.cli.conformance.cases import ANY, Answer, Case, Step, cases
from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.model import Algorithm
from ratelimiter.v1 import ratelimiter_pb2 as pb

DIRECTORY = files("ratelimitd.cli.conformance").joinpath("vectors")
FILES = [f"{algorithm}.json" for algorithm in ACCOUNTS]
POLICIES, HOLDS = "policies.json", "holds.json"


def vectors(name):
    return json.loads(DIRECTORY.joinpath(name).read_text(encoding="utf-8"))


SCHEMA, POLICIES_SCHEMA = vectors("vectors.schema.json"), vectors("policies.schema.json")


def test_schemas_exist():
    Draft202012Validator.check_schema(SCHEMA)
    Draft202012Validator.check_schema(POLICIES_SCHEMA)


@pytest.mark.parametrize("name", [*FILES, POLICIES, HOLDS])
def test_every_file_is_valid_against_its_schema(name):
    schema = SCHEMA if name in FILES else POLICIES_SCHEMA
    Draft202012Validator(schema).validate(vectors(name))


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("algorithm", {"algorithm": "leaky_bucket"}),
        ("no cases", {"cases": []}),
        ("a word more", {"window": 60}),
        ("limit", {"limit": 0}),
        ("name", {"name": ""}),
        ("cost", {"cost": 2**31}),
        ("seconds", {"at_us": 1_700_006_400}),
        ("allowed", {"allowed": "true"}),
        ("reason", {"reason": "NO_RULE"}),
        ("remaining", {"remaining": -1}),
    ],
)
def test_schema_refuses_cases_that_no_runner_reads(what, change):
    changed = deepcopy(vectors(FILES[0]))
    case = changed["cases"][0]
    [name] = change
    holder = next((part for part in (case["steps"][0], case) if name in part), changed)
    holder.update(change)
    with pytest.raises(ValidationError):
        Draft202012Validator(SCHEMA).validate(changed)


@pytest.mark.parametrize(
    ("what", "change"),
    [
        ("settle", {"settles": {"a": -1}}),
        ("no settle", {"settles": {}}),
        ("name", {"hold": "first"}),
        ("one time without the other", {"reset_time": 1_700_006_400}),
    ],
)
def test_schema_refuses_holds_that_no_runner_reads(what, change):
    changed = deepcopy(vectors(HOLDS))
    step = next(
        step for case in changed["cases"] for step in case["steps"] if "reset_time" not in step
    )
    step.update(change)
    with pytest.raises(ValidationError):
        Draft202012Validator(POLICIES_SCHEMA).validate(changed)


def test_every_case_of_every_file_is_read_as_written():
    read = cases()
    there = [
        (name.removesuffix(".json"), case)
        for name in sorted([*FILES, POLICIES, HOLDS])
        for case in vectors(name)["cases"]
    ]
    assert [(case.algorithm, case.name) for case in read] == [
        (algorithm, case["name"]) for algorithm, case in there
    ]
    assert len({str(case) for case in read}) == len(read)
    algorithm, case = there[0]
    first = case["steps"][0]
    fields = (first["allowed"], first["remaining"], first["reset_time"], first["retry_after"])
    expected = Answer(*fields, first["reason"], case["limit"], case["window_seconds"])
    assert read[0] == Case.of(algorithm, case)
    assert read[0].steps[0] == Step(first["at_us"], first["cost"], expected)


def test_policy_case_is_read_as_written():
    there = vectors(POLICIES)["cases"]
    read = [case for case in cases() if case.algorithm == "policies"]
    assert [case.name for case in read] == [case["name"] for case in there]
    case, [first, *_] = read[0], there[0]["steps"]
    assert (case.limit, case.window_seconds) == (10, 86_400)
    [rule] = case.rules
    assert [limit.name for limit in rule.limits][-1] == "two"
    step = case.steps[0]
    assert (step.at_us, step.cost, step.endpoint) == (first["at_us"], 1, "/a")
    assert step.identities == (("user", "ada"),)
    assert (step.expected.limit, step.expected.window_seconds) == (2, 600)
    assert [one.name for one in step.expected.limits] == [
        "two", *sorted({limit.name for limit in rule.limits} - {"two"})
    ]  # fmt: skip
    assert case.rule_ids("/x/1") != case.rule_ids("/x/2")


def test_case_with_holds_is_read_as_written():
    read = {case.name: case for case in cases() if case.algorithm == "holds"}
    assert list(read) == [case["name"] for case in vectors(HOLDS)["cases"]]
    assert all(case.has_holds == (case.algorithm == "holds") for case in cases())
    hold, check, settled = read["a settle with 0 gives everything back"].steps
    assert (hold.hold, hold.settles, check.hold, settled.settles) == ("a", (), "", (("a", 0),))
    [told] = hold.expected.limits
    assert told == (0, "default", *hold.expected[:5])
    slot = read["one hold is for a budget and a slot"].steps[0].expected
    assert (slot.reset_time, slot.retry_after_seconds) == (ANY, ANY)
    assert (slot.limit, slot.limits[0].reset_time, slot.limits[1].reset_time) == (
        1, ANY, 1_700_006_424,
    )  # fmt: skip


def test_holds_are_allowed_before_they_are_settled_and_only_slots_have_no_times():
    for case in cases():
        allowed = set()
        for step in case.steps:
            assert {name for name, _ in step.settles} <= allowed, case.name
            if step.hold and step.expected.allowed:
                allowed.add(step.hold)
            slots = {
                limit.name
                for rule in case.rules
                for limit in rule.limits
                if limit.algorithm == "concurrency"
            }
            for told in step.expected.limits:
                assert (told.reset_time == ANY) == (told.name in slots), case.name


def test_rules_of_policies_include_every_checked_endpoint_and_type():
    for case in cases():
        rules = {(rule.endpoint, rule.identifier_type) for rule in case.rules}
        for step in case.steps if rules else ():
            assert {(step.endpoint, kind) for kind, _ in step.identities} <= rules, case.name


def test_policies_cover_the_required_features():
    rules = [rule for case in cases() for rule in case.rules]
    assert {rule.identifier_type for rule in rules} >= {"user", "ip", "ip+user", "all"}
    assert "**" in {rule.endpoint for rule in rules}
    assert 8 in {len(rule.limits) for rule in rules}
    assert {limit.enforcement for rule in rules for limit in rule.limits} == {
        pb.ENFORCE, pb.OBSERVE,
    }  # fmt: skip
    steps = [step for case in cases() if case.rules for step in case.steps]
    assert {step.expected.reason for step in steps} == {
        "WITHIN_LIMIT", "LIMIT_EXCEEDED", "COST_EXCEEDS_LIMIT",
    }  # fmt: skip


def test_case_has_a_rule_and_detects_a_time_that_goes_back():
    [onward, back] = [
        next(case for case in cases() if case.name.startswith(name))
        for name in ("no burst", "a late timestamp")
    ]
    assert (onward.goes_back, back.goes_back) == (False, True)
    rule = onward.rule("/e")
    assert (rule.endpoint, rule.limit, rule.window_seconds) == ("/e", 10, 60)
    assert rule.algorithm is Algorithm.SLIDING_WINDOW
