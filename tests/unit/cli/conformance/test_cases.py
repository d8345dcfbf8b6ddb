"""The vectors: what is in the files is valid by their schema, and read as it is there."""

import json
from copy import deepcopy
from importlib.resources import files

import pytest
from jsonschema import Draft202012Validator, ValidationError

from ratelimitd.cli.conformance.cases import Answer, Case, Step, cases
from ratelimitd.model import Algorithm

DIRECTORY = files("ratelimitd.cli.conformance").joinpath("vectors")
SCHEMA = json.loads(DIRECTORY.joinpath("vectors.schema.json").read_text(encoding="utf-8"))
FILES = [f"{algorithm}.json" for algorithm in Algorithm]


def vectors(name):
    return json.loads(DIRECTORY.joinpath(name).read_text(encoding="utf-8"))


def test_the_schema_is_one():
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", FILES)
def test_every_file_is_valid_by_the_schema(name):
    Draft202012Validator(SCHEMA).validate(vectors(name))


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
def test_the_schema_refuses_what_no_runner_reads(what, change):
    changed = deepcopy(vectors(FILES[0]))
    case = changed["cases"][0]
    [name] = change
    holder = next((part for part in (case["steps"][0], case) if name in part), changed)
    holder.update(change)
    with pytest.raises(ValidationError):
        Draft202012Validator(SCHEMA).validate(changed)


def test_every_case_of_every_file_is_read_as_it_is_there():
    read = cases()
    there = [
        (name.removesuffix(".json"), case)
        for name in sorted(FILES)
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


def test_a_case_knows_its_rule_and_whether_its_time_goes_back():
    [onward, back] = [
        next(case for case in cases() if case.name.startswith(name))
        for name in ("no burst", "a late timestamp")
    ]
    assert (onward.goes_back, back.goes_back) == (False, True)
    rule = onward.rule("/e")
    assert (rule.endpoint, rule.limit, rule.window_seconds) == ("/e", 10, 60)
    assert rule.algorithm is Algorithm.SLIDING_WINDOW
