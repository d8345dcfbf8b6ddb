"""The examples are those of the README of envoyproxy/ratelimit, by their number there, reworded."""

from collections import UserDict

import pytest
import yaml

from ratelimitd.errors import RuleInvalidError
from ratelimitd.model import IdentifierType
from ratelimitd.rules.envoy_import import MAX_FILE_BYTES, import_config
from ratelimitd.rules.rules_file import dump_rules, parse_rules
from ratelimitd.services.convert_envoy import checks_of, parse_request
from tests.envoy_messages import request_of

IP, USER, API_KEY = IdentifierType.IP, IdentifierType.USER, IdentifierType.API_KEY
IDENTIFIERS = {"remote_address": IP, "user": USER}


def limit(number=10, unit="second", **fields):
    return {"rate_limit": {"unit": unit, "requests_per_unit": number, **fields}}


def entry(key, value=None, *below, **fields):
    found = {"key": key, **fields}
    if value is not None:
        found["value"] = value
    if below:
        found["descriptors"] = list(below)
    return found


def imported(*descriptors, domain="d", identifiers=IDENTIFIERS):
    data = yaml.safe_dump({"domain": domain, "descriptors": list(descriptors)}).encode()
    return import_config(data, identifiers)


def rules_of(found):
    return [
        (rule.endpoint, rule.identifier_type, rule.limit, rule.window_seconds)
        for rule in found.rules
    ]


def texts(found):
    return [note.text for note in found.notes]


def charged_without(key):
    return (
        f"a descriptor without {key} is limited, too, by its last value; if Envoy sends it,"
        f" give {key} a type of its own"
    )


EXAMPLES = {
    "1": (
        [entry("database", "users", **limit(500)), entry("database", "default", **limit(500))],
        [("d/database=users", "api_key", 500, 1), ("d/database=default", "api_key", 500, 1)],
        [([("database", "users")], b"users"), ([("database", "default")], b"default")],
    ),
    "2": (
        [
            entry("message_type", "marketing", entry("to_number", **limit(5, "day"))),
            entry("to_number", **limit(100, "day")),
        ],
        [("d/message_type=marketing", "api_key", 5, 86_400), ("d", "api_key", 100, 86_400)],
        [([("message_type", "marketing"), ("to_number", "2")], b"2"), ([("to_number", "2")], b"2")],
    ),
    "3, without the address": (
        [entry("remote_address", **limit())],
        [("d", "ip", 10, 1)],
        [([("remote_address", "50.0.0.1")], b"50.0.0.1")],
    ),
    "4": (
        [entry("key", "value", entry("subkey", **limit(300)))],
        [("d/key=value", "api_key", 300, 1)],
        [([("key", "value"), ("subkey", "subvalue")], b"subvalue")],
    ),
    "5, one of the two keys": (
        [entry("ldap", rate_limit={"unlimited": True})],
        [("d", "api_key", 2**31 - 1, 1)],
        [([("ldap", "x")], b"x")],
    ),
    "5, with a value": (
        [entry("ldap", "x", rate_limit={"unlimited": True})],
        [("d/ldap=x", "api_key", 2**31 - 1, 1)],
        [([("ldap", "x")], b"x")],
    ),
}

WARNED = {"2": ["to_number"], "4": ["subkey"]}
"""Keys of the examples without which a descriptor is limited, too."""


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_limits_the_same_descriptors(example):
    descriptors, rules, asked = EXAMPLES[example]
    found = imported(*descriptors)
    assert rules_of(found) == rules
    assert texts(found) == [*map(charged_without, WARNED.get(example, ()))]
    table = {key.encode(): kind for key, kind in (IDENTIFIERS | found.new_identifiers).items()}
    request = request_of("d", *[entries for entries, _ in asked])
    checks = checks_of(parse_request(request.SerializeToString()), table)
    assert [(check.endpoint, check.identifier_type) for check in checks] == [
        rule[:2] for rule in rules
    ]
    assert [check.identifier for check in checks] == [identifier for _, identifier in asked]


@pytest.mark.parametrize(
    ("descriptor", "text"),
    [
        # 3, the address
        (entry("remote_address", "50.0.0.5", **limit(0)), "left out: a limit is at least 1; "),
        (entry("remote_address", "50.0.0.5", **limit(1)), "left out: it is for one ip only"),
        # 6
        (
            entry("service", None, entry("user", "user-b", **limit(20))),
            "left out: it is for one user only, and a rule is for all of them; without user in ",
        ),
        # 7
        (
            entry("key_2", "value_2", **limit(replaces=[{"name": "specific"}])),
            "left out: replaces has no equivalent",
        ),
        # 9
        (entry("key1", "value*", **limit()), "left out: it is for all values of key1 with a "),
        (entry("a", None, entry("b", **limit())), "left out: it is for each value of a, "),
        (entry("a", None, entry("user", **limit())), "left out: it is for each value of a, "),
        (
            entry("a", "b", rate_limit={"unlimited": True, "replaces": [{"name": "specific"}]}),
            "left out: replaces has no equivalent",
        ),
        (entry("a", "b", **limit(2**31)), "left out: the limit must be at most 2147483647"),
        (entry("a", "b", **limit(sliding=True)), "left out: sliding has no equivalent"),
        (entry("a", "x" * 260, **limit()), "left out: the endpoint must be at most 255 "),
        (entry("a", "b"), "has no limit, so it needs no rule"),
        (entry("a", "b", rate_limit=None), "has no limit, so it needs no rule"),
    ],
)
def test_descriptor_without_equivalent_is_left_out_with_a_note(descriptor, text):
    found = imported(descriptor)
    assert found.rules == []
    [told] = texts(found)
    assert told.startswith(text)


@pytest.mark.parametrize(
    ("descriptor", "text"),
    [
        (
            "{key: a, rate_limit: {unit: moon, requests_per_unit: 1}}",
            "d/a: unit must be one of second, ",
        ),
        ("{key: a, rate_limit: {requests_per_unit: 1}}", "d/a: unit must be one of second, "),
        ("{key: a, rate_limit: 5}", "d/a: unit must be one of second, "),
        (
            "{key: a, rate_limit: {unit: day, requests_per_unit: lots}}",
            "d/a: requests_per_unit must be ",
        ),
        (
            "{key: a, rate_limit: {unit: day, requests_per_unit: true}}",
            "d/a: requests_per_unit must be ",
        ),
        (
            "{key: a, rate_limit: {unit: day, requests_per_unit: -1}}",
            "d/a: requests_per_unit must be ",
        ),
        (
            "{key: a, rate_limit: {unit: second, requests_per_unit: 3, unlimited: true}}",
            "d/a: unit and unlimited exclude each other",
        ),
        ("{key: a, descriptors: c}", "d/a: descriptors must be a list"),
        ("{value: b}", "d: a descriptor must have a key"),
        ("a", "d: a descriptor must have a key"),
    ],
)
def test_value_that_envoyproxy_refuses_is_refused_with_its_line(descriptor, text):
    with pytest.raises(RuleInvalidError) as refused:
        import_config(f"domain: d\ndescriptors:\n- {descriptor}\n".encode(), {})
    assert refused.value.violations[0].description.startswith(f"line 3: {text}")


def test_misplaced_key_of_a_limit_is_noted():
    assert "unlimited is ignored: it belongs under rate_limit" in texts(
        imported(entry("a", "b", unlimited=True))
    )


@pytest.mark.parametrize(
    ("mode", "notes"),
    [
        ("shadow_mode", []),
        (
            "quota_mode",
            ["quota_mode has no equivalent: the limit only observes, and reports no quota"],
        ),
    ],
)
def test_limit_that_never_denies_observes(mode, notes):
    found = imported(entry("a", "b", **{mode: True}, **limit(5, "hour")))
    assert rules_of(found) == [("d/a=b", "api_key", 5, 3600)]
    [rule] = found.rules
    assert rule.enabled
    assert [one.enforcement for one in rule.limits] == ["observe"]
    assert texts(found) == notes
    assert imported(entry("a", "b", **{mode: False}, **limit())).rules[0].limits == ()


def test_what_a_rule_lacks_is_not_noted_of_a_limit_without_a_rule():
    named = {"rate_limit": {"unit": "hour", "requests_per_unit": 5, "name": "five"}}
    found = imported(
        entry("a", "b", **limit()),
        entry("a", "b", quota_mode=True, **named),
        entry("c", "d", quota_mode=True),
    )
    assert texts(found) == [
        "left out: an earlier limit has the same endpoint and type",
        "has no limit, so it needs no rule",
    ]


@pytest.mark.parametrize("word", ["yes", "Yes", "on", "ON", "True"])
def test_flags_may_be_written_in_the_words_of_yaml_1_1(word):
    data = f"""\
domain: d
descriptors:
- {{key: a, value: b, shadow_mode: {word}, rate_limit: {{unit: hour, requests_per_unit: 5}}}}
- {{key: c, value: d, shadow_mode: off, rate_limit: {{unlimited: {word}}}}}
"""
    found = import_config(data.encode(), {})
    assert rules_of(found) == [("d/a=b", "api_key", 5, 3600), ("d/c=d", "api_key", 2**31 - 1, 1)]
    assert [[one.enforcement for one in rule.limits] for rule in found.rules] == [["observe"], []]


@pytest.mark.parametrize("value", ["True", "+5", "007", "1.50", "No", "0x10", "-0"])
def test_values_are_compared_as_written(value):
    data = f"""\
domain: d
descriptors:
- {{key: a, value: {value}, rate_limit: {{unit: hour, requests_per_unit: 5}}}}
"""
    found = import_config(data.encode(), {})
    assert rules_of(found) == [(f"d/a={value}", "api_key", 5, 3600)]


def test_known_keys_are_collected_once_for_all_limits():
    class Counted(UserDict):
        collected = 0

        def keys(self):
            Counted.collected += 1
            return super().keys()

    data = yaml.safe_dump({"domain": "d", "descriptors": [entry(c, **limit()) for c in "abc"]})
    assert len(import_config(data.encode(), Counted(IDENTIFIERS)).new_identifiers) == 3
    assert Counted.collected == 1


@pytest.mark.parametrize(
    ("unit", "seconds"),
    [
        ("second", 1),
        ("MINUTE", 60),
        ("hour", 3_600),
        ("day", 86_400),
        ("week", 604_800),
        ("month", 2_592_000),
        ("YEAR", 31_536_000),
    ],
)
def test_unit_has_the_same_number_of_seconds(unit, seconds):
    found = imported(entry("a", "b", **limit(5, unit)))
    assert rules_of(found) == [("d/a=b", "api_key", 5, seconds)]
    assert [rule.algorithm for rule in found.rules] == ["fixed_window"]
    assert found.notes == []


def test_unknown_fields_are_noted():
    found = import_config(b"domain: d\nname: x\ndescriptors:\n- {key: a, sampled: 1}\n", {})
    assert [*map(str, found.notes)] == [
        "line 2: d: name has no equivalent",
        "line 4: d/a: has no limit, so it needs no rule",
        "line 4: d/a: sampled has no equivalent",
    ]


def test_notes_alone_do_not_leave_a_limit_out():
    found = imported(entry("user", detailed_metric=True, **limit(name="each")))  # 8
    assert rules_of(found) == [("d", "user", 10, 1)]
    assert sorted(texts(found)) == [
        "detailed_metric has no equivalent",
        "the name of the limit has no equivalent",
    ]


def test_limits_for_each_value_and_for_one_value_conflict():
    found = imported(entry("key1", **limit(10)), entry("key1", "value1", **limit(20)))  # 8
    assert rules_of(found) == [("d", "api_key", 10, 1)]
    assert found.new_identifiers == {"key1": API_KEY}
    assert texts(found)[0].startswith("left out: it is for one api_key only")


def test_first_of_two_limits_for_the_same_rule_wins():
    found = imported(entry("a", **limit(1)), entry("b", **limit(2)))
    assert rules_of(found) == [("d", "api_key", 1, 1)]
    assert texts(found) == ["left out: an earlier limit has the same endpoint and type"]


def test_limit_with_nested_limits_applies_beside_them():
    found = imported(entry("a", "b", entry("user", **limit(2)), **limit(1, "hour")))
    assert rules_of(found) == [("d/a=b", "api_key", 1, 3600), ("d/a=b", "user", 2, 1)]


@pytest.mark.parametrize(
    ("above", "below", "warned"),
    [
        (
            "{key: user, rate_limit: {unit: hour, requests_per_unit: 10}",
            "key: remote_address",
            True,
        ),
        ("{key: user, rate_limit: {unlimited: true}", "key: remote_address", False),
        ("{key: user", "key: remote_address", False),
        (
            "{key: user, rate_limit: {unit: hour, requests_per_unit: 10}",
            "key: path, value: /a",
            False,
        ),
        ("{key: a, value: b, rate_limit: {unit: hour, requests_per_unit: 10}", "key: user", False),
    ],
    ids=["both", "unlimited above", "no limit above", "other endpoint", "no identity above"],
)
def test_limit_that_a_deeper_descriptor_also_charges_is_noted(above, below, warned):
    data = f"""\
domain: d
descriptors:
- {above}, descriptors: [
    {{{below}, rate_limit: {{unit: hour, requests_per_unit: 8}}}}]}}
"""
    notes = [str(note) for note in import_config(data.encode(), IDENTIFIERS).notes]
    text = (
        "line 4: d/user/remote_address: a descriptor with these keys also charges the limit of line 3; if Envoy sends"
        " the descriptor of that limit, too, a request charges it twice"
    )
    assert [note for note in notes if "also charges" in note] == ([text] if warned else [])


@pytest.mark.parametrize(
    ("descriptor", "identifiers", "warned"),
    [
        (entry("a", "b", entry("tenant", **limit())), IDENTIFIERS, True),
        (
            entry("a", "b", entry("tenant", **limit())),
            {**IDENTIFIERS, "tenant": "tenant"},
            False,
        ),
        (entry("a", "b", entry("user", **limit())), IDENTIFIERS, False),
        (entry("a", "b", entry("tenant", rate_limit={"unlimited": True})), IDENTIFIERS, False),
        (entry("tenant", **limit()), IDENTIFIERS, False),
        (entry("a", "b", **limit()), IDENTIFIERS, False),
    ],
    ids=["API key", "type of its own", "user", "unlimited", "key alone", "no key"],
)
def test_limit_that_a_descriptor_without_its_key_also_charges_is_noted(
    descriptor, identifiers, warned
):
    found = imported(descriptor, identifiers=identifiers)
    assert texts(found) == ([charged_without("tenant")] if warned else [])


@pytest.mark.parametrize("domain", ["*", "**"])
def test_domain_that_a_node_refuses_has_no_rule_for_all_endpoints(domain):
    found = imported(entry("user", **limit()), entry("a", "b", **limit()), domain=domain)
    assert rules_of(found) == [(f"{domain}/a=b", "api_key", 10, 1)]
    [told] = texts(found)
    assert told.startswith(f"left out: a node refuses the domain {domain}, ")


def test_notes_have_lines_in_file_order():
    data = b"domain: d\ndescriptors:\n- key: a\n  value: 404\n- key: b\n  value: true\n"
    notes = import_config(data, {}).notes
    assert [*map(str, notes)] == [
        "line 3: d/a=404: has no limit, so it needs no rule",
        "line 5: d/b=true: has no limit, so it needs no rule",
    ]


def test_imported_rules_are_an_applicable_file():
    descriptors = [each for descriptors, *_ in EXAMPLES.values() for each in descriptors]
    found = imported(*descriptors, entry("path", "/new", shadow_mode=True, **limit()))
    assert list(parse_rules(dump_rules(found.rules).encode())) == found.rules


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "the file must be a mapping with a domain and descriptors"),
        (b"descriptors: []", "the file must be a mapping with a domain and descriptors"),
        (b"- a", "the file must be a mapping with a domain and descriptors"),
        (b"\xff", "not a UTF-8 text"),
        (b"a: [", "line 2: not a YAML text"),
        (b"a" * (MAX_FILE_BYTES + 1), "larger than"),
    ],
    ids=["empty", "no domain", "a list", "no text", "no YAML", "too large"],
)
def test_invalid_configuration_is_refused(data, text):
    with pytest.raises(RuleInvalidError) as refused:
        import_config(data, {})
    assert refused.value.violations[0].description.startswith(text)


def test_domain_without_descriptors_has_no_rules():
    assert rules_of(import_config(b"domain: d", {})) == []


def test_limit_for_each_pair_of_identities_becomes_one_for_their_combination():
    found = imported(
        entry("user", None, entry("remote_address", None, entry("path", "/a", **limit())))
    )
    (rule,) = found.rules
    assert (rule.identifier_type, rule.endpoint) == ("ip+user", "d/path=/a")
