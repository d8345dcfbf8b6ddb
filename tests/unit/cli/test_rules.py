"""`rules list`, `create`, `update`, `promote`, `delete`, `get` and `unmatched`: requests, output and errors."""

import json

import grpc
import pytest

from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.fake_node import status

ID = "6f2c1d9e-0b4a-4f58-9d3e-2a7b8c9d0e1f"
NUMBERS = ("--limit", "5", "--window-seconds", "60")
AT_1 = "the rules are at revision 1\n"


def sent(node, method):
    """Return the only request to a method."""
    [request] = [call.request for call in node.seen if call.method == method]
    return request


def test_list_is_a_table_of_every_page(ask, node):
    node.page_size = 1
    node.add_rule("/a", "ip", id=ID, limit=5)
    node.add_rule("/b", id=ID.upper(), enabled=False)
    assert ask("rules", "list").out == (
        "ENDPOINT  TYPE  LIMIT  WINDOW_S  ALGORITHM     ENABLED  ID\n"
        f"/a        ip        5        60  token_bucket  yes      {ID}\n"
        f"/b        user     10        60  token_bucket  no       {ID.upper()}\n"
    )


def test_list_is_filtered_by_the_node(ask, node):
    ask("rules", "list", "--endpoint", "*", "--identifier-type", "ip")
    request = node.seen[0].request
    assert (request.endpoint, request.identifier_type) == ("*", "ip")


def test_json_list_is_a_list_of_messages(ask, node):
    rule = node.add_rule("/a")
    [listed] = json.loads(ask("rules", "list", "--json").out)
    assert (listed["endpoint"], listed["limit"], listed["etag"]) == ("/a", 10, rule.etag)
    node.rules.clear()
    assert json.loads(ask("rules", "list", "--json").out) == []


def test_rule_is_created_with_the_typed_values(ask, node):
    options = ["--algorithm", "fixed_window", "--id", ID, "--disabled"]
    ended = ask("rules", "create", "/login", "ip", *NUMBERS, *options)
    assert ended == (0, f"created {ID}: /login ip, 5 per 1 min, fixed_window, disabled\n{AT_1}", "")
    assert sent(node, "CreateRateLimit").rate_limit == pb.RateLimit(
        id=ID,
        endpoint="/login",
        identifier_type="ip",
        limit=5,
        window_seconds=60,
        algorithm="fixed_window",
        enabled=False,
    )


@pytest.mark.parametrize(
    ("endpoint", "is_warned"),
    [("/x/*", True), ("*/x", True), ("*", False), ("**", False), ("/x/{id}", False)],
)
def test_endpoint_that_resembles_a_pattern_is_warned_of(ask, endpoint, is_warned):
    ended = ask("rules", "create", endpoint, "user", *NUMBERS)
    assert (ended.status, ended.out.startswith("created")) == (0, True)
    assert ended.err.startswith(f"Warning: {endpoint} is the name of one endpoint") == is_warned
    assert bool(ended.err) == is_warned


def test_rule_that_differs_from_another_only_in_case_is_warned_of(ask, node):
    rule = node.add_rule("/orders")
    warning = "Warning: /Orders differs in case alone from /orders, which has rules, too: "
    assert ask("rules", "create", "/Orders", "ip", *NUMBERS).err.startswith(warning)
    moved = ask("rules", "update", rule.id, "--endpoint", "/ORDERS")
    assert moved.err.startswith("Warning: /ORDERS differs in case alone from /Orders")
    assert ask("rules", "update", rule.id, "--limit", "7").err == ""


def test_rule_is_created_with_a_burst(ask, node):
    ended = ask("rules", "create", "/a", "user", *NUMBERS, "--burst", "50", "--id", ID)
    assert "5 per 1 min, token_bucket, burst 50" in ended.out
    [limit] = sent(node, "CreateRateLimit").rate_limit.limits
    assert (limit.limit, limit.window_seconds, limit.algorithm, limit.burst) == (
        5,
        60,
        "token_bucket",
        50,
    )


def test_new_rule_is_an_enabled_token_bucket_by_default(ask, node):
    created = json.loads(ask("rules", "create", "*", "user", *NUMBERS, "--json").out)
    assert (created["algorithm"], created["enabled"]) == ("token_bucket", True)


def test_invalid_rule_is_refused_by_the_node(ask, node):
    node.error = status(
        grpc.StatusCode.INVALID_ARGUMENT,
        "text",
        ("rate_limit.limit", "the limit must be positive"),
        ("rate_limit.endpoint", "the endpoint must not be empty"),
    )
    ended = ask("rules", "create", "", "user", "--limit", "-5", "--window-seconds", "60")
    assert ended == (
        1,
        "",
        (
            "Error: invalid argument: limit: the limit must be positive;"
            " endpoint: the endpoint must not be empty\n"
        ),
    )
    assert sent(node, "CreateRateLimit").rate_limit.limit == -5


@pytest.mark.parametrize(
    "arguments",
    [
        ("create", "/x", "user", "--limit", "5"),
        ("create", "/x", "user", "--limit", str(2**31), "--window-seconds", "1"),
        ("create", "/x", "user", *NUMBERS, "--algorithm", "leaky_bucket"),
        ("update", ID),
        ("update", ID, "--etag", "x"),
        ("update", "--limit", "5"),
        ("delete",),
    ],
    ids=" ".join,
)
def test_invalid_command_line_is_status_2_without_a_call(ask, node, arguments):
    assert ask("rules", *arguments).status == 2
    assert node.seen == []


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (["--limit", "7"], {"limit": 7}),
        (["--window-seconds", "8", "--algorithm", "sliding_window"],
         {"window_seconds": 8, "algorithm": "sliding_window"}),
        (["--enable"], {"enabled": True}),
        (["--disable"], {"enabled": False}),
        (["--endpoint", "/b", "--identifier-type", "ip"], {"endpoint": "/b", "identifier_type": "ip"}),
        (["--limit", "0"], {"limit": 0}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_update_sends_exactly_the_named_fields(ask, node, options, fields):
    node.add_rule("/a", id=ID)
    assert ask("rules", "update", ID, *options).status == 0
    request = sent(node, "UpdateRateLimit")
    assert list(request.update_mask.paths) == list(fields)
    assert request.rate_limit == pb.RateLimit(id=ID, **fields)


def test_update_shows_the_updated_rule(ask, node):
    node.add_rule("/a", id=ID)
    assert ask("rules", "update", ID, "--limit", "7").out == (
        f"updated {ID}: /a user, 7 per 1 min, token_bucket\n{AT_1}"
    )


def test_wrong_etag_is_refused(ask, node):
    node.add_rule("/a", id=ID)
    for command in (("update", ID, "--limit", "7"), ("delete", ID)):
        ended = ask("rules", *command, "--etag", "old")
        assert ended.status == 1
        assert "aborted: the rule has another etag by now" in ended.err
    assert node.rules[ID].limit == 10


@pytest.mark.parametrize(("options", "out"), [([], f"deleted {ID}\n{AT_1}"), (["--json"], "{}\n")])
def test_rule_is_deleted(ask, node, options, out):
    node.add_rule("/a", id=ID)
    assert ask("rules", "delete", ID, *options) == (0, out, "")
    assert node.rules == {}


def test_unknown_rule_is_status_1(ask):
    ended = ask("rules", "delete", ID)
    assert (ended.status, ended.err) == (1, f"Error: not found: no rule has the id {ID}\n")


def test_help_shows_no_int32_range(run):
    for command in (("rules", "create"), ("rules", "update"), ("check",)):
        assert "2147483648" not in run(*command, "--help").out


@pytest.mark.parametrize("number", [2**31, -(2**31) - 1])
def test_number_beyond_int32_is_a_usage_error(ask, node, number):
    ended = ask("rules", "create", "/x", "user", "--window-seconds", 60, "--limit", number)
    assert (ended.status, node.seen) == (2, [])
    assert "must be -2147483648 to 2147483647" in ended.err


LIMITS = [
    pb.Limit(name="default", limit=10, window_seconds=60, algorithm="token_bucket"),
    pb.Limit(name="day", limit=9, window_seconds=90, algorithm="fixed_window"),
    pb.Limit(
        name="candidate",
        limit=5,
        window_seconds=60,
        algorithm="fixed_window",
        enforcement=pb.OBSERVE,
    ),
]


@pytest.mark.parametrize(
    ("options", "names", "told"),
    [([], ["candidate", "day"], ["default: 10 per 1 min, token_bucket"]),
     (["--replaces", "day"], ["default", "candidate"], ["day: 9 per 1 min 30 s, fixed_window"]),
     (["--replaces", "candidate"], ["default", "day", "candidate"], [])],
)  # fmt: skip
def test_observed_limit_replaces_another(  # noqa: PLR0917 -- two fixtures
    ask, node, options, names, told
):
    node.add_rule("/a", id=ID, limits=LIMITS)
    ended = ask("rules", "promote", ID, "candidate", *options)
    assert ended.status == 0
    replaced = [f"candidate replaces {one}" for one in told]
    assert ended.out.splitlines()[1:] == [*replaced, AT_1.rstrip()]
    request = sent(node, "UpdateRateLimit")
    assert list(request.update_mask.paths) == ["limits"]
    assert request.rate_limit.etag
    kept = {limit.name: limit.enforcement for limit in request.rate_limit.limits}
    assert list(kept) == names
    assert set(kept.values()) == {pb.ENFORCE}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [(["day"], "no observed limit day"), (["none"], "no observed limit none"),
     (["candidate", "--replaces", "none"], "the rule has no limit none")],
)  # fmt: skip
def test_impossible_promotion_is_refused_with_the_reason(ask, node, arguments, why):
    node.add_rule("/a", id=ID, limits=LIMITS)
    ended = ask("rules", "promote", ID, *arguments)
    assert (ended.status, why in ended.err) == (1, True)
    ended = ask("rules", "promote", ID.replace("6", "7"), "candidate")
    assert (ended.status, "there is no rule" in ended.err) == (1, True)


def test_list_shows_several_limits_one_per_line(ask, node):
    node.add_rule("/a", id=ID, limits=LIMITS)
    assert ask("rules", "list").out == (
        "ENDPOINT  TYPE  LIMIT  WINDOW_S  ALGORITHM                           ENABLED  ID\n"
        f"/a        user     10        60  token_bucket (default)              yes      {ID}\n"
        "                    9        90  fixed_window (day)\n"
        "                    5        60  fixed_window (candidate, observed)\n"
    )


def test_list_shows_plans_and_calendars_below_the_limits(ask, node):
    month = pb.Limit(
        name="month", limit=9, algorithm="fixed_window", period=pb.MONTH,
        time_zone="Europe/Berlin", anchor_day=15,
    )  # fmt: skip
    plans = {"pro": pb.LimitList(limits=[month]), "free": pb.LimitList(limits=LIMITS[:1])}
    node.add_rule("/a", id=ID, plans=plans)
    _, _, *below = ask("rules", "list").out.splitlines()
    assert [" ".join(line.split()) for line in below] == [
        "plan free 10 60 token_bucket (default)",
        "plan pro 9 month fixed_window (month, from day 15, Europe/Berlin)",
    ]


def test_update_shows_several_limits_on_one_line(ask, node):
    node.add_rule("/a", id=ID, limits=LIMITS)
    out = ask("rules", "update", ID, "--limit", "7").out
    assert "default: 10 per 1 min, token_bucket; " in out
    assert (
        "day: 9 per 1 min 30 s, fixed_window; candidate: 5 per 1 min, fixed_window, observed" in out
    )


def test_calendar_rule_is_created_and_listed(ask, node):
    ended = ask(
        "rules", "create", "/api", "user", "--limit", "9", "--algorithm", "fixed_window",
        "--period", "month", "--time-zone", "Europe/Berlin", "--anchor-day", "15",
    )  # fmt: skip
    assert ended.status == 0, ended.err
    [rule] = node.rules.values()
    month = pb.Limit(
        limit=9, algorithm="fixed_window", period=pb.MONTH, time_zone="Europe/Berlin", anchor_day=15
    )
    assert list(rule.limits) == [month]
    assert rule.window_seconds == 0
    assert "9 per month from day 15 (Europe/Berlin), fixed_window" in ended.out
    assert ask("rules", "list").out.splitlines()[1].split()[3] == "month"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "name the window: --window, --window-seconds or --period"),
        (["--window", "1 m"], "--window must be a duration such as 30s, 1m, 12h or 1d"),
        (["--window", "0s"], "--window must be a duration"),
        (["--window", "60"], "--window must be a duration"),
        (["--window", "9999999999d"], "must be -2147483648 to 2147483647"),
        (["--window", "1m", "--window-seconds", "60"], "give one of --window and --window-seconds"),
        (["--period", "year"], "'year' is not one of 'day', 'week', 'month'"),
        (["--period", "month", "--anchor-day", "0"], "Invalid value for '--anchor-day'"),
        (["--period", "month", "--anchor-day", "32"], "Invalid value for '--anchor-day'"),
    ],
)
def test_invalid_window_is_refused(ask, node, arguments, why):
    ended = ask("rules", "create", "/api", "user", "--limit", "9", *arguments)
    assert (ended.status, why in ended.err) == (2, True), ended.err
    assert not node.rules


def test_window_is_given_as_a_duration(ask, node):
    create = ("rules", "create", "/api", "user", "--limit", 9, "--window")
    assert ask(*create, "1m").status == 0
    [rule] = node.rules.values()
    assert (rule.window_seconds, rule.algorithm) == (60, "token_bucket")
    assert ask("rules", "update", rule.id, "--window", "12h").status == 0
    assert rule.window_seconds == 43_200
    ended = ask("rules", "update", rule.id, "--window", "soon")
    assert (ended.status, "--window must be a duration" in ended.err) == (2, True)
    assert rule.window_seconds == 43_200


def test_rule_is_named_by_its_endpoint_and_type(ask, node):
    limits = [
        pb.Limit(
            name=name, limit=9, window_seconds=60, algorithm="token_bucket", enforcement=enforcement
        )
        for name, enforcement in (("default", pb.ENFORCE), ("candidate", pb.OBSERVE))
    ]
    rule = node.add_rule("/api", limits=limits)
    other = node.add_rule("/api", "ip")
    assert ask("rules", "update", "/api", "user", "--limit", 7).status == 0
    assert (rule.limit, other.limit) == (7, 10)
    assert ask("rules", "promote", "/api", "user", "candidate").status == 0
    assert [one.name for one in rule.limits] == ["candidate"]
    assert ask("rules", "delete", "/api", "user").out.startswith(f"deleted {rule.id}\n")
    assert list(node.rules) == [other.id]


@pytest.mark.parametrize(
    "command", [("get",), ("update", "--limit", 7), ("delete",), ("promote", "x")]
)
def test_endpoint_without_a_type_is_refused_and_the_type_asked_for(ask, node, command):
    rule = node.add_rule("/api")
    name, *options = command
    problem = "/api is not the id of a rule: after an endpoint name the TYPE"
    assert ask("rules", name, "/api", *options) == (2, "", f"Error: {problem}\n")
    assert node.rules == {rule.id: rule}


@pytest.mark.parametrize("command", [("update", "--limit", 7), ("delete",), ("promote", "x")])
@pytest.mark.parametrize("endpoint", ["/none", ""])
def test_unknown_rule_is_reported_by_its_endpoint_and_type(ask, node, command, endpoint):
    rule = node.add_rule("/api")
    name, *options = command
    ended = ask("rules", name, endpoint, "user", *options)
    assert ended == (1, "", f"Error: there is no rule for {endpoint} user\n")
    assert node.rules == {rule.id: rule}


def test_promotion_names_a_rule_and_a_limit(ask, node):
    for names in (["/api"], ["/api", "user", "candidate", "more"]):
        ended = ask("rules", "promote", *names)
        assert (ended.status, "name the rule, by its id" in ended.err) == (2, True)


def test_rule_is_shown_by_its_id_or_its_place(ask, node):
    node.add_rule("/a", "ip", id=ID, limit=5)
    head = "ENDPOINT  TYPE  LIMIT  WINDOW_S  ALGORITHM     ENABLED  ID\n"
    row = f"/a        ip        5        60  token_bucket  yes      {ID}\n"
    assert ask("rules", "get", ID) == (0, head + row, "")
    assert ask("rules", "get", "/a", "ip") == (0, head + row, "")
    assert node.seen[0].request == pb.GetRateLimitRequest(id=ID)
    assert node.seen[1].request == pb.GetRateLimitRequest(endpoint="/a", identifier_type="ip")
    assert json.loads(ask("rules", "get", ID, "--json").out)["limit"] == 5
    ended = ask("rules", "get", "/a", "user")
    assert (ended.status, ended.out, "not found" in ended.err) == (1, "", True)


def test_unused_rules_are_listed(ask, node):
    node.used.add(node.add_rule("/a").id)
    node.add_rule("/b")
    assert [line.split()[0] for line in ask("rules", "list", "--unused").out.splitlines()] == [
        "ENDPOINT",
        "/b",
    ]


def test_endpoints_without_a_rule_are_listed_without_control_characters(ask, node):
    assert ask("rules", "unmatched").out == "every check of the last minutes had a rule\n"
    assert json.loads(ask("rules", "unmatched", "--json").out) == []
    for endpoint, per_minute in (("/ordes", 12.0), ("/\x1b[2Jx\u202e", 0.7)):
        node.unmatched.append(pb.UnmatchedEndpoint(endpoint=endpoint, checks_per_minute=per_minute))
    head, first, second = ask("rules", "unmatched").out.splitlines()
    assert head == "ENDPOINT  CHECKS_PER_MIN"
    assert first == "/ordes              12.0"
    assert second.split() == ["/\ufffd[2Jx\ufffd", "0.7"]
    listed = json.loads(ask("rules", "unmatched", "--json").out)
    assert listed[0] == {"endpoint": "/ordes", "checks_per_minute": 12.0}
    node.unmatched.append(pb.UnmatchedEndpoint(endpoint="unmatched", checks_per_minute=0.5))
    assert "TRUSTED_PROXIES" in ask("rules", "unmatched").out.splitlines()[-1]


@pytest.mark.parametrize(
    "command",
    [
        ("create", "/x", "user", *NUMBERS),
        ("update", ID, "--limit", 7),
        ("promote", ID, "candidate"),
        ("delete", ID),
    ],
    ids=lambda command: command[0],
)
def test_change_prints_its_revision_and_how_to_revert(ask, node, command):
    node.add_rule("/a", id=ID, limits=LIMITS)
    node.health_answer.rules_revision = 16
    last = ask("rules", *command).out.splitlines()[-1]
    assert last == "the rules are at revision 17; to go back: ratelimitd rules revert 16"


def test_no_revision_is_printed_without_exactly_one_change(ask, node, monkeypatch):
    node.add_rule("/a", id=ID)
    node.error = status(grpc.StatusCode.PERMISSION_DENIED, "this call needs the read role")
    node.errors_after = 2
    told = ask("rules", "update", ID, "--limit", 7)  # the node refuses to report it
    assert (told.status, "revision" in told.out) == (0, False)
    node.error = None
    for others in (-1, 1):

        def stored(*_, others=others):
            node.health_answer.rules_revision += others
            return node.rules[ID]

        monkeypatch.setattr(node, "_stored", stored)
        told = ask("rules", "update", ID, "--limit", 7)
        assert (told.status, "revision" in told.out) == (0, False)


def test_empty_list_explains_the_reason(ask, node):
    assert ask("rules", "list") == (0, "no rules: every check is allowed\n", "")
    node.used.add(node.add_rule("/a").id)
    assert ask("rules", "list", "--unused").out == "every rule has judged a check\n"
    assert ask("rules", "list", "--endpoint", "/b").out == "no such rules\n"
    assert json.loads(ask("rules", "list", "--unused", "--json").out) == []
