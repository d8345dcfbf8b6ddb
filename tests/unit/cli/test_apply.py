"""`rules apply` and `rules export`: idempotent, all or nothing for a wrong file, and nobody's edit is overwritten."""

import io
import json
import sys

import grpc
import pytest

from ratelimitd.rules.rules_file import MAX_FILE_BYTES
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


def writes(node):
    return [method for method in node.methods() if method != "ListRateLimits"]


def test_a_book_is_applied_once_and_then_there_are_no_changes(ask, node, book):
    first = ask("rules", "apply", "-f", book())
    assert first == (
        0,
        (
            "+ create * user: 600 per 60 s, token_bucket\n"
            "+ create /login ip: 5 per 60 s, fixed_window, disabled\n"
            "2 created, 0 updated, 0 deleted\n"
        ),
        "",
    )
    assert ask("rules", "apply", "-f", book()) == (0, "no changes\n", "")
    assert len(writes(node)) == 2


def test_only_what_differs_is_changed_and_shown(ask, node, book):
    rule = node.add_rule("*", limit=10, enabled=False)
    node.add_rule("/login", "ip", limit=5, algorithm="fixed_window", enabled=False)
    etag = rule.etag
    ended = ask("rules", "apply", "-f", book())
    assert ended.out == (
        "~ update * user\n    limit: 10 → 600\n    enabled: false → true\n"
        "0 created, 1 updated, 0 deleted\n"
    )
    [update] = [call.request for call in node.seen if call.method == "UpdateRateLimit"]
    assert list(update.update_mask.paths) == ["limit", "enabled"]
    assert update.rate_limit.etag == etag
    assert update.rate_limit.window_seconds == 0


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
        "+ create * user: 600 per 60 s, token_bucket; plan pro: day: 9 per 60 s, token_bucket"
    )
    assert ask("rules", "apply", "-f", book(PLANS)).out == "no changes\n"
    exported = ask("rules", "export").out
    assert "plans:" in exported
    assert ask("rules", "apply", "-f", book(exported)).out == "no changes\n"
    changed = ask("rules", "apply", "-f", book(PLANS.replace("limit: 9", "limit: 8")))
    assert changed.out.splitlines()[1].startswith('    plans: {"pro": [{"name": "day", "limit": 9')
    [update] = [call.request for call in node.seen if call.method == "UpdateRateLimit"]
    assert list(update.update_mask.paths) == ["plans"]
    assert update.rate_limit.plans["pro"].limits[0].limit == 8


def test_other_rules_are_deleted_only_with_prune(ask, node, book):
    other = node.add_rule("/other")
    ask("rules", "apply", "-f", book())
    assert other.id in node.rules
    ended = ask("rules", "apply", "-f", book(), "--prune")
    assert ended.out == (
        "- delete /other user: 10 per 60 s, token_bucket\n0 created, 0 updated, 1 deleted\n"
    )
    assert other.id not in node.rules
    assert node.seen[-1].request.etag == other.etag


def test_a_dry_run_shows_the_same_and_changes_nothing(ask, node, book):
    node.add_rule("/other")
    ended = ask("rules", "apply", "-f", book(), "--prune", "--dry-run")
    assert ended.status == 0
    assert ended.out.startswith("+ create * user")
    assert ended.out.endswith("2 to create, 0 to update, 1 to delete; this was a dry run\n")
    assert writes(node) == []


def test_a_wrong_file_changes_nothing_and_every_error_is_named(ask, node, book):
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


def test_a_file_that_no_order_of_steps_leads_to_changes_nothing(ask, node, book):
    node.add_rule("*")
    file = book(
        BOOK.replace('{endpoint: "*"', '{id: "6f2c1d9e-0b4a-4f58-9d3e-2a7b8c9d0e1f", endpoint: "*"')
    )
    ended = ask("rules", "apply", "-f", file)
    assert ended.status == 1
    assert "rules[0].id: the rule for this endpoint and identifier_type has the id" in ended.err
    assert writes(node) == []


def test_a_node_that_refuses_half_way_is_told_with_the_rule_and_how_far_it_came(ask, node, book):
    node.error = status(grpc.StatusCode.ALREADY_EXISTS, "somebody was faster")
    node.errors_after = 2
    ended = ask("rules", "apply", "-f", book())
    assert ended.status == 1
    assert ended.err == (
        "Error: create /login ip: already exists: somebody was faster;"
        " 1 of 2 changes were made before it\n"
    )


def test_json_lists_the_steps_that_were_made(ask, node, book):
    rule = node.add_rule("*", limit=10)
    node.add_rule("/other")
    steps = json.loads(ask("rules", "apply", "-f", book(), "--prune", "--json").out)
    assert [step["action"] for step in steps] == ["update", "create", "delete"]
    assert steps[0]["fields"] == ["limit"]
    assert (steps[0]["rate_limit"]["id"], steps[0]["rate_limit"]["limit"]) == (rule.id, 600)
    assert [step["rate_limit"]["endpoint"] for step in steps] == ["*", "/login", "/other"]
    assert json.loads(ask("rules", "apply", "-f", book(), "--prune", "--json").out) == []


def test_json_of_a_plan_that_stopped_lists_what_was_made(ask, node, book):
    node.error = status(grpc.StatusCode.ALREADY_EXISTS, "no")
    node.errors_after = 2
    ended = ask("rules", "apply", "-f", book(), "--json")
    assert ended.status == 1
    assert [step["rate_limit"]["endpoint"] for step in json.loads(ended.out)] == ["*"]


def test_a_rule_that_was_changed_meanwhile_is_not_overwritten(ask, node, book):
    rule = node.add_rule("*", limit=10)
    node.after_list = lambda: setattr(rule, "etag", "another")
    ended = ask("rules", "apply", "-f", book())
    assert ended.status == 1
    assert "update * user: aborted: the rule has another etag by now" in ended.err
    assert node.rules[rule.id].limit == 10


def test_the_book_may_come_from_standard_input(ask, node, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(BOOK.encode())))
    assert ask("rules", "apply", "-f", "-").status == 0
    assert len(node.rules) == 2


def test_a_file_that_cannot_be_read_is_status_2(ask, tmp_path):
    ended = ask("rules", "apply", "-f", tmp_path / "none.yaml")
    assert ended.status == 2
    assert "--file: cannot read" in ended.err
    assert ask("rules", "apply", "-f", tmp_path).status == 2


def test_a_file_without_an_end_is_not_read_to_it(ask, monkeypatch):
    monkeypatch.setattr("ratelimitd.cli.apply.MAX_FILE_BYTES", 10)
    monkeypatch.setattr("ratelimitd.rules.rules_file.MAX_FILE_BYTES", 10)
    ended = ask("rules", "apply", "-f", "/dev/zero")
    assert ended.status == 1
    assert "rules: larger than 10 bytes" in ended.err
    assert MAX_FILE_BYTES > 1_000_000


def test_what_is_exported_is_what_is_applied(ask, node, book):
    ask("rules", "apply", "-f", book())
    exported = ask("rules", "export").out
    assert ask("rules", "apply", "-f", book(exported), "--prune").out == "no changes\n"
    ids = set(node.rules)
    node.rules.clear()
    ask("rules", "apply", "-f", book(exported))
    assert set(node.rules) == ids


def test_the_export_of_nothing_is_an_empty_book(ask, node, book):
    exported = ask("rules", "export").out
    assert exported == "rules: []\n"
    node.add_rule("/x")
    assert ask("rules", "apply", "-f", book(exported), "--prune").status == 0
    assert node.rules == {}


def test_an_export_in_json_is_a_file_that_is_applied_as_well(ask, node, book):
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
    assert '"time_zone": "Europe/Berlin"' in edited.out
    assert '"time_zone": "Europe/Paris"' in edited.out
    assert rule.limits[1].time_zone == "Europe/Paris"
