"""The schema of rules files agrees with their reader, as far as a schema can."""

import json
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd.errors import RuleInvalidError
from ratelimitd.rules.rules_file import LIMIT_TYPES, RULE_TYPES, parse_rules
from ratelimitd.rules.schema import rules_schema

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = jsonschema.Draft7Validator(rules_schema())

LIMIT = {"limit": 5, "window": "1m", "algorithm": "token_bucket"}
RULE = {"endpoint": "/a", "identifier_type": "user", **LIMIT}
DAY = {"name": "day", "limit": 9, "period": "day", "algorithm": "fixed_window"}


def is_read(book):
    try:
        parse_rules(json.dumps(book).encode())
    except RuleInvalidError:
        return False
    return True


def fits(book):
    return SCHEMA.is_valid(book)


def book_of(without=(), **fields):
    rule = {**RULE, **fields}
    return {"rules": [{name: value for name, value in rule.items() if name not in without}]}


def test_schema_is_valid():
    jsonschema.Draft7Validator.check_schema(rules_schema())


@pytest.mark.parametrize("file", sorted(ROOT.glob("examples/**/*rules*.yaml")), ids=str)
def test_example_books_match_the_schema(file):
    assert [*SCHEMA.iter_errors(yaml.safe_load(file.read_text()))] == []


@pytest.mark.parametrize(
    "book",
    [
        {"rules": []},
        book_of(),
        book_of(id="6F2C1D9E-0b4a-4f58-9d3e-2a7b8c9d0e1f", enabled=False),
        book_of(["window"], window_seconds=60),
        book_of(["algorithm"]),
        book_of(["limit", "window", "algorithm"], limits=[LIMIT, DAY]),
        book_of(limits=[]),
        book_of(plans={"pro": [{**LIMIT, "burst": 9, "enforcement": "observe"}, DAY]}),
        book_of(plans={"pro": [{**DAY, "period": "month", "anchor_day": 31, "time_zone": "Europe/Berlin"}]}),
        book_of(identifier_type="user+ip"),
        book_of(identifier_type="all", endpoint="**"),
    ],
)  # fmt: skip
def test_readable_books_match_the_schema(book):
    assert is_read(book)
    assert [*SCHEMA.iter_errors(book)] == []


@pytest.mark.parametrize(
    "book",
    [
        [],
        {},
        {"rules": {}},
        {"rules": [], "version": 1},
        {"rules": ["/a"]},
        *(book_of([name]) for name in ("endpoint", "identifier_type", "limit", "window")),
        *(book_of(**{name: None}) for name in RULE_TYPES),
        *(book_of(**{name: [1]}) for name in RULE_TYPES),
        *(book_of(limits=[{**LIMIT, name: None}]) for name in LIMIT_TYPES),
        *(book_of(plans={"pro": [{**LIMIT, name: [1]}]}) for name in LIMIT_TYPES),
        book_of(nonsense=1),
        book_of(etag="x"),
        book_of(id="5-5"),
        book_of(endpoint=""),
        book_of(endpoint="e" * 256),
        book_of(identifier_type="USER"),
        book_of(identifier_type="+"),
        book_of(limit=0),
        book_of(limit=2**31),
        book_of(window="0s"),
        book_of(window="1 m"),
        book_of(window_seconds=60),
        book_of(algorithm="leaky_bucket"),
        book_of(enabled="yes"),
        book_of(limits=[LIMIT, LIMIT]),
        book_of(limits=[{"limit": 5}]),
        book_of(limits=[{**LIMIT, "window_seconds": 60}]),
        book_of(["limit", "window"], limits=[]),
        book_of(["limit", "window"], limits=[LIMIT, *({**DAY, "name": f"n{n}"} for n in range(8))]),
        book_of(plans={"pro": []}),
        book_of(plans={"pro": LIMIT}),
        book_of(plans={"Pro": [LIMIT]}),
        book_of(plans={"blocked": [LIMIT]}),
        book_of(plans={f"p{n}": [LIMIT] for n in range(33)}),
        book_of(plans={"pro": [{**LIMIT, "burst": -1}]}),
        book_of(plans={"pro": [{**DAY, "period": "year"}]}),
        book_of(plans={"pro": [{**DAY, "period": "month", "anchor_day": 32}]}),
        book_of(plans={"pro": [{**LIMIT, "enforcement": "never"}]}),
    ],
)
def test_books_that_do_not_match_are_not_readable(book):
    assert not is_read(book)
    assert not fits(book)


values: st.SearchStrategy = st.sampled_from(
    [
        *(0, 1, 60, 2**31, -1, True, None, "", "user", "all", "day", "month", "UTC", "1m", "0s", "/a"),
        *("fixed_window", "token_bucket", "concurrency", "observe", "enforce", [], {}, [LIMIT], [DAY]),
        *([LIMIT, DAY], {"pro": [DAY]}, {"pro": []}, {"x": LIMIT}, "6f2c1d9e-0b4a-4f58-9d3e-2a7b8c9d0e1f"),
    ]
)  # fmt: skip
some_fields = st.dictionaries(st.sampled_from([*RULE_TYPES, "nonsense"]), values, max_size=3)
some_of_limit = st.dictionaries(st.sampled_from([*LIMIT_TYPES, "nonsense"]), values, max_size=3)


@given(some_fields, some_of_limit, st.sets(st.sampled_from([*RULE])))
def test_schema_refuses_nothing_that_the_reader_accepts(fields, of_limit, without):
    for book in (
        book_of(without, **fields),
        book_of({*LIMIT}, limits=[{**LIMIT, **of_limit}, {**DAY, **of_limit}]),
        book_of(without, plans={"pro": [{**LIMIT, **of_limit}]}),
    ):
        assert fits(book) or not is_read(book)
