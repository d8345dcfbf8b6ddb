"""`rules apply`, `export`, `import-envoy`: idempotent, all of a file or nothing, no edit of others overwritten."""

import io
import json
import sys

import grpc
import pytest

from ratelimitd.rules.rules_file import MAX_FILE_BYTES, parse_rules
from ratelimitd.rules.schema import rules_schema
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.fake_node import status

BOOK = """\
rules:
  - {endpoint: "*", identifier_type: user, limit: 600, window_seconds: 60, algorithm: token_bucket}
  - {endpoint: /login, identifier_type: ip, limit: 5, window_seconds: 60, algorithm: fixed_window,
     enabled: false}
"""


@pytest.fixture
def book(tmp_path):
    """Write a rules file and return its path."""

    def write(text=BOOK):
        file = tmp_path / "rules.yaml"
        file.write_text(text)
        return file

    return write


def asked(node):
    """Return the options of each call, and its number of rules."""
    return [
        (len(call.request.rate_limits), call.request.prune, call.request.dry_run)
        for call in node.seen
        if call.method == "ApplyRateLimits"
    ]


def test_second_apply_of_a_book_has_no_changes(ask, node, book):
    first = ask("rules", "apply", "-f", book())
    assert first == (
        0,
        (
            "+ create * user: 600 per 1 min, token_bucket\n"
            "+ create /login ip: 5 per 1 min, fixed_window, disabled\n"
            "2 created, 0 updated, 0 deleted\n"
            "the rules are at revision 1\n"
        ),
        "",
    )
    assert ask("rules", "apply", "-f", book()) == (0, "no changes\n", "")
    assert asked(node) == [(2, False, False)] * 2


def test_endpoint_that_resembles_a_pattern_is_warned_of(ask, book):
    file = book(BOOK.replace("/login", "/login/*"))
    for command in ("apply", "diff"):
        assert ask("rules", command, "-f", file).err.startswith("Warning: /login/* is the name of")


def test_changed_window_is_shown_in_the_usual_format(ask, node, book):
    node.add_rule("*", limit=600, window_seconds=86_400)
    assert "~ update * user\n    window: 1 d → 1 min\n" in ask("rules", "diff", "-f", book()).out


def test_endpoint_that_differs_only_in_case_is_warned_of(ask, node, book):
    node.add_rule("/Login", "ip")
    warning = (
        "Warning: /login differs in case alone from /Login, which has rules, too:"
        " a check for one does not match the other\n"
    )
    assert ask("rules", "diff", "-f", book()).err.startswith(warning)
    assert ask("rules", "diff", "--prune", "-f", book()).err == ""
    ended = ask("rules", "apply", "-f", book())
    assert (ended.status, ended.err.count("\n"), ended.err.startswith(warning)) == (0, 1, True)
    assert ask("rules", "apply", "-f", book()).err == ""
    assert ask("rules", "diff", "-f", book(BOOK.replace("/login", "/LOGIN"))).err.startswith(
        "Warning: /LOGIN"
    )
    two = book(BOOK.replace('"*"', "/LOGIN"))
    assert (
        "Warning: /LOGIN differs in case alone from /login," in ask("rules", "diff", "-f", two).err
    )


def test_only_differences_are_applied_and_shown(ask, node, book):
    rule = node.add_rule("*", limit=10, enabled=False)
    node.add_rule("/login", "ip", limit=5, algorithm="fixed_window", enabled=False)
    ended = ask("rules", "apply", "-f", book())
    assert ended.out == (
        "~ update * user\n    limit: 10 → 600\n    enabled: false → true\n"
        "0 created, 1 updated, 0 deleted\n"
        "the rules are at revision 1\n"
    )
    assert (rule.limit, rule.enabled) == (600, True)


PLANS = """\
rules:
  - endpoint: "*"
    identifier_type: user
    limit: 600
    window_seconds: 60
    algorithm: token_bucket
    plans:
      pro: [{name: day, limit: 9, window_seconds: 60, algorithm: token_bucket}]
"""


def test_plans_are_applied_exported_and_shown(ask, node, book):
    created = ask("rules", "apply", "-f", book(PLANS))
    assert created.out.splitlines()[0] == (
        "+ create * user: 600 per 1 min, token_bucket; plan pro: day: 9 per 1 min, token_bucket"
    )
    assert ask("rules", "apply", "-f", book(PLANS)).out == "no changes\n"
    exported = ask("rules", "export").out
    assert "plans:" in exported
    assert ask("rules", "apply", "-f", book(exported)).out == "no changes\n"
    changed = ask("rules", "apply", "-f", book(PLANS.replace("limit: 9", "limit: 8")))
    day = "pro: day: {} per 1 min, token_bucket"
    assert changed.out.splitlines()[1] == f"    plans: {day.format(9)} → {day.format(8)}"
    [rule] = node.rules.values()
    assert rule.plans["pro"].limits[0].limit == 8


def test_other_rules_are_deleted_only_with_prune(ask, node, book):
    other = node.add_rule("/other")
    ask("rules", "apply", "-f", book())
    assert other.id in node.rules
    ended = ask("rules", "apply", "-f", book(), "--prune")
    assert ended.out == (
        "- delete /other user: 10 per 1 min, token_bucket\n0 created, 0 updated, 1 deleted\n"
        "the rules are at revision 3; to go back: ratelimitd rules revert 2\n"
    )
    assert other.id not in node.rules


def test_dry_run_shows_the_same_and_changes_nothing(ask, node, book):
    node.add_rule("/other")
    ended = ask("rules", "apply", "-f", book(), "--prune", "--dry-run")
    assert ended.status == 0
    assert ended.out.startswith("+ create * user")
    assert ended.out.endswith("2 to create, 0 to update, 1 to delete; this was a dry run\n")
    assert asked(node) == [(2, True, True)]
    assert len(node.rules) == 1


def test_invalid_file_changes_nothing_and_every_error_is_reported(ask, node, book):
    file = book(BOOK.replace("limit: 5", "limit: -5").replace("600", "many"))
    ended = ask("rules", "apply", "-f", file)
    assert ended == (
        1,
        "",
        (
            f"Error: {file} is refused, nothing was changed:\n"
            "  rules[0].limit: must be a whole number (line 2)\n"
            "  rules[1].limit: the limit must be positive (line 3)\n"
        ),
    )
    assert node.seen == []


def test_error_of_the_node_is_reported_by_place_in_the_file(ask, node, book):
    text = "the rule for this endpoint and identifier_type has the id x"
    violations = (("rate_limits[0].id", text), ("rate_limits", "3 more fields are wrong"))
    node.error = status(grpc.StatusCode.INVALID_ARGUMENT, "no", *violations)
    file = book()
    assert ask("rules", "apply", "-f", file) == (
        1,
        "",
        (
            f"Error: {file} is refused, nothing was changed:\n"
            f"  rules[0].id: {text} (* user)\n"
            "  rules: 3 more fields are wrong\n"
        ),
    )


def test_node_without_the_call_is_reported_with_the_name_of_the_call(ask, node, book):
    node.error = status(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    for command in ("apply", "diff"):
        ended = ask("rules", command, "-f", book())
        assert ended.status == 1
        assert ended.err == (
            f"Error: the node at {node.address} runs an earlier release, which has no ApplyRateLimits\n"
        )


def test_rules_changed_after_a_revision_are_not_overwritten(ask, node, book):
    node.error = status(grpc.StatusCode.ABORTED, "revision: rules were changed after 7")
    ended = ask("rules", "apply", "-f", book(), "--revision", 7)
    assert ended.status == 1
    assert "aborted: revision: rules were changed after 7" in ended.err
    assert node.seen[-1].request.revision == 7
    assert ask("rules", "apply", "-f", book(), "--revision", -1).status == 2


@pytest.mark.parametrize("command", [("apply", "-f"), ("revert",)])
def test_revision_0_is_checked_although_the_contract_has_no_number_for_it(ask, node, book, command):
    node.revision = 3
    given = (*command, book() if "-f" in command else 1, "--revision", 0)
    ended = ask("rules", *given)
    assert (ended.status, ended.err) == (
        1,
        "Error: rules may have been changed after revision 0: the revision is 3 now\n",
    )
    assert asked(node) == [(0, False, True)]
    node.revision = 0
    assert ask("rules", *given).status == 0
    assert [dry_run for _, _, dry_run in asked(node)[1:]] == [True, False]


def test_json_is_the_answer_of_the_node(ask, node, book):
    rule = node.add_rule("*", limit=10)
    node.add_rule("/other")
    answer = json.loads(ask("rules", "apply", "-f", book(), "--prune", "--json").out)
    assert (answer["created"], answer["updated"], answer["deleted"]) == (1, 1, 1)
    updated, created, deleted = answer["changes"]
    assert (updated["before"]["id"], updated["before"]["limit"]) == (rule.id, 10)
    assert updated["after"]["limit"] == 600
    assert ("before" in created, created["after"]["endpoint"]) == (False, "/login")
    assert (deleted["before"]["endpoint"], "after" in deleted) == ("/other", False)
    again = json.loads(ask("rules", "apply", "-f", book(), "--prune", "--json").out)
    assert again["changes"] == []


def test_unlisted_changes_are_counted(ask, node, book):
    node.max_changes = 1
    ended = ask("rules", "diff", "-f", book())
    assert ended.out.splitlines()[1:] == [
        "… and 1 more",
        "2 to create, 0 to update, 0 to delete; the rules are at revision 1",
    ]


def test_difference_is_shown_and_is_status_4(ask, node, book):
    node.add_rule("/other")
    ended = ask("rules", "diff", "-f", book(), "--prune")
    assert ended.status == 4
    assert ended.out == (
        "+ create * user: 600 per 1 min, token_bucket\n"
        "+ create /login ip: 5 per 1 min, fixed_window, disabled\n"
        "- delete /other user: 10 per 1 min, token_bucket\n"
        "2 to create, 0 to update, 1 to delete; the rules are at revision 1\n"
    )
    assert json.loads(ask("rules", "diff", "-f", book(), "--json").out)["created"] == 2
    assert len(node.rules) == 1
    ask("rules", "apply", "-f", book())
    assert ask("rules", "diff", "-f", book()) == (0, "no changes\n", "")
    assert ask("rules", "diff", "-f", book(), "--prune").status == 4


def test_invalid_file_or_refusal_is_not_status_4(ask, node, book):
    assert ask("rules", "diff", "-f", book(BOOK.replace("600", "many"))).status == 1
    node.error = status(grpc.StatusCode.UNAVAILABLE, "the rule database is locked")
    assert ask("rules", "diff", "-f", book()).status == 1


def test_book_may_come_from_standard_input(ask, node, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(BOOK.encode())))
    assert ask("rules", "apply", "-f", "-").status == 0
    assert len(node.rules) == 2


def test_unreadable_file_is_status_2(ask, tmp_path):
    ended = ask("rules", "apply", "-f", tmp_path / "none.yaml")
    assert ended.status == 2
    assert "--file: cannot read" in ended.err
    assert ask("rules", "apply", "-f", tmp_path).status == 2


def test_endless_file_is_read_up_to_a_bound(ask, monkeypatch):
    monkeypatch.setattr("ratelimitd.cli.apply.MAX_FILE_BYTES", 10)
    monkeypatch.setattr("ratelimitd.rules.rules_file.MAX_FILE_BYTES", 10)
    ended = ask("rules", "apply", "-f", "/dev/zero")
    assert ended.status == 1
    assert "rules: larger than 10 bytes" in ended.err
    assert MAX_FILE_BYTES > 1_000_000


def test_exported_file_can_be_applied(ask, node, book):
    ask("rules", "apply", "-f", book())
    exported = ask("rules", "export").out
    assert ask("rules", "apply", "-f", book(exported), "--prune").out == "no changes\n"
    ids = set(node.rules)
    node.rules.clear()
    ask("rules", "apply", "-f", book(exported))
    assert set(node.rules) == ids


def test_export_without_rules_is_an_empty_book(ask, node, book):
    exported = ask("rules", "export").out
    assert exported == "rules: []\n"
    node.add_rule("/x")
    assert ask("rules", "apply", "-f", book(exported), "--prune").status == 0
    assert node.rules == {}


def test_json_export_can_be_applied(ask, node, book):
    rule = node.add_rule("/x\N{LINE SEPARATOR}\N{GRINNING FACE}", enabled=False)
    exported = ask("rules", "export", "--json").out
    [item] = json.loads(exported)["rules"]
    assert (item["id"], item["endpoint"], item["enabled"]) == (rule.id, rule.endpoint, False)
    assert ask("rules", "apply", "-f", book(exported), "--prune").out == "no changes\n"


CALENDARS = """\
rules:
  - endpoint: /api
    identifier_type: user
    limits:
      - {limit: 10, period: day, algorithm: fixed_window}
      - {name: month, limit: 200, period: month, time_zone: Europe/Berlin, anchor_day: 15, algorithm: fixed_window}
"""


def test_calendars_are_applied_compared_and_exported(ask, node, book):
    ended = ask("rules", "apply", "-f", book(CALENDARS))
    assert "default: 10 per day (UTC), fixed_window; month: 200 per month from day 15" in ended.out
    [rule] = node.rules.values()
    assert [(one.period, one.time_zone, one.anchor_day) for one in rule.limits] == [
        (pb.DAY, "UTC", 0), (pb.MONTH, "Europe/Berlin", 15),
    ]  # fmt: skip
    assert ask("rules", "apply", "-f", book(CALENDARS)).out == "no changes\n"
    exported = ask("rules", "export").out
    assert ask("rules", "apply", "-f", book(exported)).out == "no changes\n"
    edited = ask("rules", "apply", "-f", book(CALENDARS.replace("Berlin", "Paris")))
    day, month = "default: 10 per day (UTC), fixed_window", "month: 200 per month from day 15"
    [line] = [line for line in edited.out.splitlines() if line.startswith("    ")]
    assert line == (
        f"    limits: {day}; {month} (Europe/Berlin), fixed_window"
        f" → {day}; {month} (Europe/Paris), fixed_window"
    )
    assert rule.limits[1].time_zone == "Europe/Paris"


def test_schema_is_printed_without_a_node(run):
    ended = run("rules", "schema")
    assert (ended.status, ended.err) == (0, "")
    assert json.loads(ended.out) == rules_schema()


CONFIG = """\
domain: messaging
descriptors:
- key: to_number
  rate_limit: {unit: day, requests_per_unit: 100}
- key: spam
  value: "yes"
"""


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    return file


def test_rules_are_printed_and_notes_go_to_stderr(run, config):
    ended = run("rules", "import-envoy", config, "--identifiers", "ip=ip")
    [rule] = parse_rules(ended.out.encode())
    assert (rule.endpoint, rule.identifier_type, rule.limit) == ("messaging", "api_key", 100)
    assert (ended.status, ended.err.splitlines()) == (
        0,
        [
            "line 5: messaging/spam=yes: has no limit, so it needs no rule",
            "nodes need ENVOY_IDENTIFIERS=ip=ip,to_number=api_key",
            "with types of their own, which IDENTIFIER_TYPES declares: --identifiers ip=ip,to_number=to_number",
            "1 rule, 0 limits left out",
        ],
    )


def test_identifiers_default_to_those_of_a_node(run, config):
    config.write_text(CONFIG.replace("to_number", "remote_address"))
    assert "identifier_type: ip" in run("rules", "import-envoy", config).out
    ended = run("rules", "import-envoy", config, "--identifiers", "")
    assert "identifier_type: api_key" in ended.out
    assert "nodes need ENVOY_IDENTIFIERS=remote_address=api_key\n" in ended.err


def test_key_has_the_given_type(run, config):
    ended = run("rules", "import-envoy", config, "--identifiers", "to_number=tenant")
    assert "identifier_type: tenant" in ended.out
    assert "ENVOY_IDENTIFIERS" not in ended.err


def test_file_uses_the_short_form_and_omissions_are_counted(run, config):
    config.write_text(f"{CONFIG}  rate_limit: {{unit: second, requests_per_unit: 0}}\n")
    ended = run("rules", "import-envoy", config)
    assert ended.out == (
        "rules:\n"
        "- endpoint: messaging\n"
        "  identifier_type: api_key\n"
        "  limit: 100\n"
        "  window: 1d\n"
        "  algorithm: fixed_window\n"
    )
    assert ended.err.endswith("\n1 rule, 1 limit left out\n")
    assert ended.status == 4


def test_wrong_value_is_refused_with_line_and_field(run, config):
    config.write_text(CONFIG.replace("unit: day", "unit: fortnight"))
    ended = run("rules", "import-envoy", config)
    assert (ended.status, ended.out) == (1, "")
    assert "line 4: messaging/to_number: unit must be one of second" in ended.err


def test_invalid_file_is_refused(run, config):
    config.write_text("rules: []")
    ended = run("rules", "import-envoy", config)
    assert (ended.status, ended.out) == (1, "")
    assert "must be a mapping with a domain" in ended.err


def test_missing_file_and_invalid_identifiers_are_usage_errors(run, config):
    missing = run("rules", "import-envoy", config.with_name("none.yaml"))
    assert (missing.status, "No such file" in missing.err) == (2, True)
    wrong = run("rules", "import-envoy", config, "--identifiers", "ip")
    assert (wrong.status, "--identifiers must be KEY=TYPE" in wrong.err) == (2, True)
