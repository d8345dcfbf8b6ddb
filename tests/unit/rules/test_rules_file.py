import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd.errors import RuleInvalidError
from ratelimitd.model import INT32_MAX, Algorithm, IdentifierType
from ratelimitd.rules import rules_file
from ratelimitd.rules.rules_file import dump_rules, dump_rules_json, parse_rules
from ratelimitd.rules.store import LimitDraft, PlanDraft, RuleDraft
from ratelimitd.rules.yaml_reader import MAX_DEPTH, Node, YamlError, read_yaml, read_yaml_file

ID = "6f2c1d9e-0b4a-4f58-9d3e-2a7b8c9d0e1f"

RULE = """\
  - endpoint: /login
    identifier_type: ip
    limit: 5
    window_seconds: 60
    algorithm: fixed_window
"""


def violations(text):
    with pytest.raises(RuleInvalidError) as refused:
        parse_rules(text.encode() if isinstance(text, str) else text)
    return [tuple(violation) for violation in refused.value.violations]


def problems(text):
    """Return the errors of the only rule of a file, by place in the rule."""
    return [f"{path.removeprefix('rules[0].')}: {what}" for path, what in violations(text)]


def test_rule_is_read_with_its_defaults():
    assert parse_rules(b"rules:\n" + RULE.encode()) == (
        RuleDraft("/login", "ip", 5, 60, "fixed_window", enabled=True, id=""),
    )


def test_every_field_may_be_given_and_the_id_is_lowercased():
    text = f"rules:\n{RULE}    enabled: false\n    id: {ID.upper()}\n"
    assert parse_rules(text.encode()) == (
        RuleDraft("/login", "ip", 5, 60, "fixed_window", enabled=False, id=ID),
    )


def test_empty_book_must_be_explicit():
    assert parse_rules(b"rules: []") == ()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "the file must be a mapping with the key rules"),
        ("[]", "the file must be a mapping with the key rules"),
        ("rule: []", "the file must be a mapping with the key rules"),
        ("rules:", "line 1: rules must be a list"),
        ("rules: []\nversion: 1", "line 2: unknown key 'version' beside rules"),
        ("rules: [", "not a YAML text"),
        (b"rules: [\xff]", "not a UTF-8 text"),
    ],
)
def test_file_that_is_not_a_rules_file_is_refused_whole(text, problem):
    [(field, description)] = violations(text)
    assert field == "rules"
    assert problem in description


def test_all_errors_are_reported_by_index_field_and_line():
    text = f"""\
rules:
{RULE}\
  - endpoint: 123
    identifier_type: USER
    limit: 0
    window_seconds: "60"
    algoritm: token_bucket
    etag: abc
    id: 5-5
  - /search
  - {{endpoint: "*", identifier_type: user, limit: 1.5, window_seconds: [], algorithm: , nonsense: 1}}
"""
    assert violations(text) == [
        ("rules[1].endpoint", "must be text: put it in quotes (line 7)"),
        ("rules[1].window_seconds", "must be a whole number (line 10)"),
        ("rules[1].algoritm", "unknown field (did you mean algorithm?) (line 11)"),
        (
            "rules[1].etag",
            "the node sets the etag, which changes with every edit: leave it out (line 12)",
        ),
        ("rules[1].id", "the id must be a UUID (line 13)"),
        (
            "rules[1].identifier_type",
            (
                "must be one of user, ip, api_key, several joined by +, or all"
                " (the node's setting IDENTIFIER_TYPES declares others) (line 8)"
            ),
        ),
        ("rules[1].limit", "the limit must be positive (line 9)"),
        ("rules[2]", "must be a mapping of a rule's fields (line 14)"),
        ("rules[3].limit", "must be a whole number (line 15)"),
        ("rules[3].window_seconds", "must be a whole number (line 15)"),
        ("rules[3].algorithm", "must be text (line 15)"),
        ("rules[3].nonsense", "unknown field (line 15)"),
    ]


def test_boolean_is_not_a_number():
    assert violations("rules:\n" + RULE.replace("5", "true")) == [
        ("rules[0].limit", "must be a whole number (line 4)")
    ]


def test_duplicates_name_the_rule_they_repeat():
    other = RULE.replace("/login", "/search")
    text = f"rules:\n{RULE}    id: {ID}\n{RULE}{other}    id: {ID.upper()}\n"
    assert violations(text) == [
        ("rules[1].endpoint", "same endpoint and identifier_type as rules[0]"),
        ("rules[2].id", "same id as rules[0]"),
    ]


def test_invalid_rule_does_not_hide_other_duplicates():
    bad = RULE.replace("5", "0")
    assert [field for field, _ in violations(f"rules:\n{bad}{RULE}{RULE}")] == [
        "rules[0].limit",
        "rules[2].endpoint",
    ]


def test_size_and_number_of_rules_are_bounded(monkeypatch):
    text = f"rules:\n{RULE}{RULE.replace('/login', '/search')}"
    monkeypatch.setattr(rules_file, "MAX_RULES", 2)
    monkeypatch.setattr(rules_file, "MAX_FILE_BYTES", len(text))
    assert len(parse_rules(text.encode())) == 2
    assert violations(text + "\n") == [("rules", f"larger than {len(text)} bytes")]
    monkeypatch.setattr(rules_file, "MAX_RULES", 1)
    assert violations(text) == [("rules", "more than 1 rules")]


drafts = st.builds(
    RuleDraft,
    endpoint=st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=255),
    identifier_type=st.sampled_from([str(member) for member in IdentifierType]),
    limit=st.integers(1, INT32_MAX),
    window_seconds=st.integers(1, INT32_MAX),
    algorithm=st.sampled_from([str(member) for member in Algorithm]),
    enabled=st.booleans(),
    id=st.uuids().map(str),
)


@st.composite
def with_lists(draw):
    """A rule as a node returns it, every other one with a list of limits."""
    draft = draw(drafts)
    names = draw(st.lists(st.sampled_from(["default", "day", "9", "b_c", "d-1"]), unique=True))
    if not names or names == ["default"]:
        return draft
    burst = draw(st.integers(0, draft.limit)) if draft.algorithm == "token_bucket" else 0
    first = LimitDraft(names[0], draft.limit, draft.window_seconds, draft.algorithm, burst)
    how = st.sampled_from(["enforce", "observe"])
    more = [
        LimitDraft(name, draw(st.integers(1, 9)), 60, "fixed_window", enforcement=draw(how))
        for name in names[1:]
    ]
    return replace(draft, limits=(first, *more))


@given(
    st.lists(
        with_lists(),
        max_size=5,
        unique_by=(lambda d: d.id, lambda d: (d.endpoint, d.identifier_type)),
    )
)
def test_written_file_is_read_back(book):
    assert parse_rules(dump_rules(book).encode()) == tuple(book)
    assert parse_rules(dump_rules_json(book).encode()) == tuple(book)


@pytest.mark.parametrize(
    "endpoint",
    [
        "*",
        "true",
        "null",
        "123",
        "no",
        "- a",
        "a: b",
        "é",
        " x ",
        'a"\\/',
        "\u2028a\u2029",
        "\ufeffa",
    ],
)
def test_endpoint_that_resembles_another_type_is_read_back(endpoint):
    book = (RuleDraft(endpoint, "user", 1, 1, "token_bucket", id=ID),)
    assert parse_rules(dump_rules(book).encode()) == book
    assert parse_rules(dump_rules_json(book).encode()) == book


@pytest.mark.parametrize("endpoint", ["\ufffe", "\uffff", "\N{GRINNING FACE}"])
def test_character_that_yaml_needs_escaped_is_read_back(endpoint):
    book = (RuleDraft(endpoint, "user", 1, 1, "token_bucket", id=ID),)
    assert parse_rules(dump_rules_json(book).encode()) == book
    assert json.loads(dump_rules_json(book))["rules"][0]["endpoint"] == endpoint


def values(node):
    """Drop the lines."""
    if isinstance(node.value, dict):
        return {key: values(child) for key, child in node.value.items()}
    if isinstance(node.value, list):
        return [values(child) for child in node.value]
    return node.value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", None),
        ("# only a comment", None),
        ("---\n", None),
        ("a: ~\nb:\nc: null", {"a": None, "b": None, "c": None}),
        ("[true, False, TRUE]", [True, False, True]),
        ("[0, -7, +7, 1000000]", [0, -7, 7, 1_000_000]),
        # YAML 1.2 allows no underscores in numbers.
        ("[1_, 1__2, 1_000, _1]", ["1_", "1__2", "1_000", "_1"]),
        ("[a, '1', \"true\", 'null']", ["a", "1", "true", "null"]),
        ("- {a: 1}\n- b: [2]", [{"a": 1}, {"b": [2]}]),
        ("a: |\n  1\n", {"a": "1\n"}),
    ],
)
def test_supported_part_of_yaml_is_read(text, value):
    assert values(read_yaml(text)) == value


@pytest.mark.parametrize("text", ["no", "yes", "on", "off", "1:30", "010", "0x10", "1.5", "9" * 19])
def test_values_that_older_yaml_converts_stay_text(text):
    assert read_yaml(text).value == text


def test_every_node_has_its_first_line():
    assert read_yaml("# head\na: 1\nb:\n  - 2\n") == Node(
        {"a": Node(1, 2, "1"), "b": Node([Node(2, 4, "2")], 4)}, 2
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", "line 2: a key appears twice in one mapping"),
        ("a:\n  ? [b]\n  : 1", "line 2: a key must be text"),
        ("1: a", "line 1: a key must be text"),
        ("--- 1\n--- 2", "line 2: a second document is not supported"),
        ("a: !!int 3", "line 1: tags (!…) are not supported"),
        ("a: &x [1]\nb: *x", "line 1: anchors and aliases are not supported"),
        ("a: *x", "line 1: anchors and aliases are not supported"),
        ("a: *", 'needs quotes: "*"'),
        ("a: [1", "line 2: not a YAML text: "),
        ("a: b: c", "line 1: not a YAML text: mapping values are not allowed in this context"),
        ("a: \x07", "not a YAML text: it holds a character that YAML does not allow"),
        ("a: \ud800", "not a YAML text: it holds a character that YAML does not allow"),
    ],
)
def test_unsupported_yaml_is_refused_with_its_line(text, message):
    with pytest.raises(YamlError) as refused:
        read_yaml(text)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_nesting_is_read_up_to_its_bound():
    assert read_yaml("[" * MAX_DEPTH + "]" * MAX_DEPTH)
    too_deep = "[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2)
    for text in (too_deep, "[" * 1_000_000, "{a: " * 100_000, "{" * 100_000):
        with pytest.raises(YamlError, match=f"nested deeper than {MAX_DEPTH} levels"):
            read_yaml(text)


@given(st.text(alphabet=st.sampled_from("ab:-[]{}&*!|>'\"#%,?~0 \n\t\x00é"), max_size=60))
def test_any_text_is_read_or_refused_in_one_line(text):
    refusal = ""
    try:
        read_yaml(text)
    except YamlError as error:
        refusal = str(error)
    assert "\n" not in refusal


def test_file_is_read_with_or_without_a_byte_order_mark():
    assert read_yaml_file(b"\xef\xbb\xbfa", 4).value == read_yaml_file(b"a", 4).value == "a"


@pytest.mark.parametrize(
    ("data", "why"), [(b"aaaaa", "larger than 4 bytes"), (b"\xff", "not a UTF-8 text")]
)
def test_file_that_is_too_long_or_not_text_is_refused(data, why):
    with pytest.raises(YamlError, match=why):
        read_yaml_file(data, 4)


LIMITS = """\
rules:
  - endpoint: /api
    identifier_type: user
    limits:
      - {limit: 10, window_seconds: 1, algorithm: token_bucket}
      - {name: day, limit: 10000, window_seconds: 86400, algorithm: fixed_window}
"""


PLANS = """\
rules:
  - endpoint: /api
    identifier_type: user
    limit: 10
    window_seconds: 1
    algorithm: token_bucket
    plans:
      pro:
        - {limit: 100, window_seconds: 1, algorithm: token_bucket}
        - {name: day, limit: 10000, window_seconds: 86400, algorithm: fixed_window}
      free: [{name: day, limit: 10, window_seconds: 86400, algorithm: fixed_window}]
"""


class TestPlans:
    def test_plan_is_a_list_of_limits(self):
        (rule,) = parse_rules(PLANS.encode())
        first = LimitDraft("default", 100, 1, "token_bucket")
        day = LimitDraft("day", 10_000, 86_400, "fixed_window")
        free = PlanDraft("free", (replace(day, limit=10),))
        assert rule.plans == (free, PlanDraft("pro", (first, day)))
        assert rule.limits == ()
        for dump in (dump_rules, dump_rules_json):
            assert parse_rules(dump([rule]).encode()) == (rule,)

    @pytest.mark.parametrize(
        ("old", "new", "problem"),
        [
            ("plans:", "plans: [1]\n    x:", "plans: must be a mapping (line 7)"),
            ("free: [{", "free: 7 # ", "plans[free]: must be a list of limits (line 11)"),
            ("free: [{", "free: [7] # ", "plans[free][0]: must be a mapping of a limit's fields (line 11)"),
            ("free: [{", "free: [] # ", "plans[free]: a plan has 1 to 8 limits (line 11)"),
            ("free:", "unlimited:", "plans[unlimited]: unlimited is reserved: a rule has no limits for it (line 11)"),
            ("free:", "Free:", "plans: the name 'Free' must be 1 to 32 characters of a-z, 0-9, _ and - (line 8)"),
            ("limit: 10000", "limit: 0", "plans[pro][1].limit: the limit must be positive (line 10)"),
            ("limit: 10000, ", "", "plans[pro][1].limit: is missing (line 10)"),
            ("    limit: 10\n", "", "limit: is missing: identities without a plan need it (line 2)"),
        ],
    )  # fmt: skip
    def test_errors_are_reported_by_place(self, old, new, problem):
        assert old in PLANS
        assert problems(PLANS.replace(old, new))[0] == problem


class TestSeveralLimits:
    def test_list_sets_the_fields_of_the_first_limit(self):
        (rule,) = parse_rules(LIMITS.encode())
        first = LimitDraft("default", 10, 1, "token_bucket")
        day = LimitDraft("day", 10_000, 86_400, "fixed_window")
        assert rule == RuleDraft("/api", "user", 10, 1, "token_bucket", limits=(first, day))

    def test_list_of_one_unnamed_limit_is_dropped(self):
        one = LIMITS.replace("      - {name: day", "      # {name: day")
        assert parse_rules(one.encode()) == (RuleDraft("/api", "user", 10, 1, "token_bucket"),)
        (named,) = parse_rules(one.replace("{limit", "{name: burst, limit").encode())
        assert [limit.name for limit in named.limits] == ["burst"]

    def test_window_that_is_too_long_has_the_name_and_line_of_the_file(self):
        text = LIMITS.replace("window_seconds: 86400", "window: 99999999d")
        problem = "the window must be at most 2147483647 (line 6)"
        assert violations(text) == [("rules[0].limits[1].window", problem)]

    def test_calendar_replaces_a_window(self):
        text = LIMITS.replace("window_seconds: 86400", "period: month, time_zone: Europe/Berlin")
        (rule,) = parse_rules(text.encode())
        month = LimitDraft(
            "day",
            10_000,
            2_592_000,
            "fixed_window",
            period="month",
            time_zone="Europe/Berlin",
            anchor_day=1,
        )
        assert rule.limits[1] == month
        written = dump_rules([rule])
        assert "period: month" in written
        assert "86400" not in written
        assert parse_rules(written.encode()) == (rule,)
        assert parse_rules(dump_rules_json([rule]).encode()) == (rule,)
        (days,) = parse_rules(LIMITS.replace("window_seconds: 86400", "period: day").encode())
        assert (days.limits[1].time_zone, days.limits[1].anchor_day) == ("UTC", None)

    def test_calendar_of_the_only_limit_makes_a_list(self):
        text = LIMITS.partition("      - {name")[0].replace(
            "window_seconds: 1, algorithm: token_bucket", "period: week, algorithm: fixed_window"
        )
        (rule,) = parse_rules(text.encode())
        assert (rule.window_seconds, rule.limits[0].period) == (604_800, "week")
        assert parse_rules(dump_rules([rule]).encode()) == (rule,)

    @pytest.mark.parametrize(
        ("new", "problem"),
        [
            ("period: year", "limits[1].period: use one of day, week, month (line 6)"),
            ("period: 7", "limits[1].period: must be text: put it in quotes (line 6)"),
            (
                "period: day, window_seconds: 60",
                "limits[1].window_seconds: the window of a day must be unset or 86400 (line 6)",
            ),
            (
                "period: day, window_seconds: 0",
                "limits[1].window_seconds: the window must be positive (line 6)",
            ),
            (
                "period: month, anchor_day: 0",
                "limits[1].anchor_day: the anchor day must be 1 to 31 (line 6)",
            ),
            (
                "period: month, time_zone: ''",
                "limits[1].time_zone: unknown time zone: use an IANA name such as Europe/Berlin (line 6)",
            ),
            (
                "window_seconds: 60, time_zone: UTC",
                "limits[1].time_zone: only a limit with a period has a time zone (line 6)",
            ),
            (
                "window_seconds: 60, anchor_day: 3",
                "limits[1].anchor_day: only the period month has an anchor day (line 6)",
            ),
        ],
    )
    def test_errors_in_a_calendar_are_reported(self, new, problem):
        assert problems(LIMITS.replace("window_seconds: 86400", new))[0] == problem

    @pytest.mark.parametrize(
        ("old", "new", "named"),
        [
            ("{name: day, limit: 10000,", "7 #", ["limits[1]: must be a mapping of a limit's fields (line 6)"]),
            ("name: day", "names: day", [
                "limits[1].names: unknown field (did you mean name?) (line 6)",
                "limits[1].name: is missing: only the first limit may have no name (line 6)",
            ]),
            ("name: day", "name: 7", ["limits[1].name: must be text: put it in quotes (line 6)"]),
            ("limit: 10000, ", "", ["limits[1].limit: is missing (line 6)"]),
            ("limit: 10,", "limit: -10,", ["limits[0].limit: the limit must be positive (line 5)"]),
            ("    limits:\n", "    limit: 9\n    limits:\n", [
                "limit: the limit must be unset or equal that of limits[0] (line 4)",
            ]),
            ("    limits:\n", "    limits: []\n    x:\n", ["x: unknown field (line 6)", "limit: is missing (line 2)"]),
            ("    limits:\n", "    burst: 20\n    limits:\n", [
                "burst: is a field of a limit: write the rule's limits as a list under limits (line 4)",
            ]),
        ],
    )  # fmt: skip
    def test_errors_are_reported_by_place(self, old, new, named):
        assert old in LIMITS
        assert problems(LIMITS.replace(old, new))[: len(named)] == named


def without(text, *fields):
    """Return the rule without some of its lines."""
    return "".join(
        line for line in text.splitlines(keepends=True) if line.split(":")[0].strip() not in fields
    )


@pytest.mark.parametrize(
    ("window", "seconds"),
    [("30s", 30), ("1m", 60), ("12h", 43_200), ("1d", 86_400), ("7d", 604_800), ("90s", 90)],
)
def test_window_is_a_duration_or_a_number_of_seconds(window, seconds):
    text = f"rules:\n{without(RULE, 'window_seconds')}    window: {window}\n"
    [draft] = parse_rules(text.encode())
    assert draft == RuleDraft("/login", "ip", 5, seconds, "fixed_window")
    assert f"  window: {window}\n" in dump_rules([draft])
    assert json.loads(dump_rules_json([draft]))["rules"][0]["window_seconds"] == seconds


def test_file_is_written_without_defaults():
    text = """\
rules:
- endpoint: /a
  identifier_type: user
  limits:
  - name: default
    limit: 1
    window: 1s
    algorithm: token_bucket
  - name: day
    limit: 9
    window: 1d
    algorithm: fixed_window
  plans:
    pro:
    - name: default
      limit: 5
      window: 1m
      algorithm: token_bucket
- endpoint: /b
  identifier_type: ip
  limit: 5
  window: 1h
  algorithm: token_bucket
  enabled: false
"""
    assert dump_rules(parse_rules(text.encode())) == text


def test_nested_limits_use_the_same_windows_and_default():
    text = """\
rules:
  - endpoint: /a
    identifier_type: user
    limits: [{limit: 1, window: 1s}, {name: day, limit: 9, window: 1d, algorithm: fixed_window}]
    plans: {pro: [{limit: 5, window: 1m}]}
"""
    [draft] = parse_rules(text.encode())
    assert (draft.window_seconds, draft.algorithm) == (1, "token_bucket")
    assert [(one.window_seconds, one.algorithm) for one in draft.limits] == [
        (1, "token_bucket"),
        (86_400, "fixed_window"),
    ]
    [limit] = draft.plans[0].limits
    assert (limit.window_seconds, limit.algorithm) == (60, "token_bucket")


def test_rule_without_an_algorithm_is_a_token_bucket():
    [draft] = parse_rules(f"rules:\n{without(RULE, 'algorithm')}".encode())
    assert draft.algorithm == "token_bucket"
    assert parse_rules(dump_rules([draft]).encode()) == (draft,)


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ("window: 1 minute", ("rules[0].window", "must be a duration such as 30s, 1m, 12h or 1d (line 5)")),
        ("window: 0s", ("rules[0].window", "must be a duration such as 30s, 1m, 12h or 1d (line 5)")),
        ("window: 60", ("rules[0].window", "must be a duration such as 30s, 1m, 12h or 1d (line 5)")),
        ("window: 99999999d", ("rules[0].window", "the window must be at most 2147483647 (line 5)")),
        ("{}", ("rules[0].window_seconds", "is missing (line 2)")),
    ],
)  # fmt: skip
def test_invalid_window_is_reported_once(given, wrong):
    rule = without(RULE, "window_seconds", "algorithm")
    more = "" if given == "{}" else f"    {given}\n"
    assert violations(f"rules:\n{rule}{more}") == [wrong]


def test_window_and_window_seconds_exclude_each_other():
    assert violations(f"rules:\n{RULE}    window: 1m\n") == [
        ("rules[0].window", "give it without window_seconds (line 7)")
    ]
