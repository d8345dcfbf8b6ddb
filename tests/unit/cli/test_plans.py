"""`plans assign`, `unassign`, `show`, `list`, `import`: the requests; a file is sent whole or not at all."""

import json

import grpc
import pytest

from ratelimitd.cli.plans import BATCH
from ratelimitd.rules.assignments import expire_time_of
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.fake_node import status

NOW_S = 1_700_000_000.5
HEADER = "identifier_type,identifier,plan,expire_time,note\n"


def identity(identifier="alice", identifier_type="user"):
    return pb.Identity(identifier_type=identifier_type, identifier=identifier)


@pytest.fixture
def imported(ask, tmp_path):
    """Import a file with this content."""

    def run(content, *arguments):
        path = tmp_path / "plans.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return ask("plans", "import", str(path), *arguments)

    return run


def test_assignment_has_the_typed_values(ask, node):
    node.add_rule("/a", plans={"pro": pb.LimitList()})
    typed = ("user", "alice", "pro", "--expires", "2033-05-18", "--note", "trial")
    ended = ask("plans", "assign", *typed)
    shown = "assigned user alice: pro, until 2033-05-18 00:00:00 UTC (trial)\n"
    assert ended == (0, shown, "")
    assert node.seen[0].request.assignment == pb.Assignment(
        identity=identity(),
        plan="pro",
        expire_time=1_999_987_200,
        note="trial",
        etag=node.assigned["user", "alice"].etag,
    )


def test_plan_that_no_rule_names_is_assigned_with_a_hint(ask, node):
    hint = "no rule names the plan pro: the rules' own limits hold\n"
    ended = ask("plans", "assign", "user", "alice", "pro")
    assert ended == (0, f"assigned user alice: pro\n{hint}", "")
    assert hint not in ask("plans", "assign", "user", "alice", "blocked").out
    json.loads(ask("plans", "assign", "user", "alice", "pro", "--json").out)
    node.page_size = 1
    node.add_rule("/a")
    node.add_rule("/b")
    assert hint not in ask("plans", "assign", "user", "alice", "pro").out  # a later page may


def test_assignment_succeeds_when_the_rules_cannot_be_listed(ask, node):
    node.error, node.errors_after = status(grpc.StatusCode.UNAVAILABLE, "away"), 1
    ended = ask("plans", "assign", "user", "alice", "pro")
    assert ended == (0, "assigned user alice: pro\n", "")


def test_assignment_is_shown_and_removed(ask, node):
    ask("plans", "assign", "user", "alice", "pro")
    assert ask("plans", "show", "user", "alice").out == "user alice: pro\n"
    shown = json.loads(ask("plans", "show", "user", "alice", "--json").out)
    assert (shown["plan"], shown["expire_time"]) == ("pro", "0")
    assert ask("plans", "unassign", "user", "alice", "--etag", "e").out == "unassigned user alice\n"
    assert node.seen[-1].request.etag == "e"
    ended = ask("plans", "show", "user", "alice")
    assert (ended.status, "the identity is assigned to no plan" in ended.err) == (1, True)


def test_list_is_a_table_of_every_page(ask, node):
    node.page_size = 1
    ask("plans", "assign", "user", "alice", "pro", "--note", "n")
    ask("plans", "assign", "ip", "::1", "blocked", "--expires", "1999987200")
    assert ask("plans", "list").out == (
        "TYPE  IDENTIFIER  PLAN     EXPIRES                  NOTE\n"
        "ip    ::1         blocked  2033-05-18 00:00:00 UTC\n"
        "user  alice       pro      never                    n\n"
    )
    listed = json.loads(ask("plans", "list", "--json").out)
    assert [one["plan"] for one in listed] == ["blocked", "pro"]


def test_list_in_csv_is_what_import_reads(ask, node, imported):
    node.page_size = 1
    odd = 'a,"b\r\nc\rd'
    ask("plans", "assign", "user", odd, "pro", "--note", "a, b")
    ask("plans", "assign", "ip", "::1", "blocked", "--expires", "1999987200")
    assigned = dict(node.assigned)
    exported = ask("plans", "list", "--csv").out
    assert exported.splitlines()[:2] == [HEADER.strip(), "ip,::1,blocked,1999987200,"]
    node.assigned.clear()
    assert imported(exported.encode()).out == "assigned 2 identities\n"
    for one in (*assigned.values(), *node.assigned.values()):
        one.etag = ""
    assert node.assigned == assigned
    assert ask("plans", "list", "--csv", "--json").status == 2


def test_list_is_filtered_by_the_node(ask, node):
    ask("plans", "list", "--plan", "pro", "--type", "user", "--prefix", "al")
    request = node.seen[0].request
    found = (request.plan, request.identifier_type, request.identifier_prefix)
    assert found == ("pro", "user", "al")
    assert ask("plans", "list", "--prefix", "al").status == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("0", 0),
        ("1999987200", 1_999_987_200),
        ("-1", -1),
        ("30m", 1_700_001_800),
        ("12h", 1_700_043_200),
        ("30d", 1_702_592_000),
        ("2033-05-18", 1_999_987_200),
        ("2033-05-18T02:00:00+02:00", 1_999_987_200),
        ("2033-05-18T00:00:00Z", 1_999_987_200),
    ],
)
def test_expiry_has_several_formats(text, expected):
    assert expire_time_of(text, NOW_S) == expected


@pytest.mark.parametrize("text", ["tomorrow", "1y", "2033-13-01", "1.5d", "9" * 30])
def test_invalid_expiry_is_refused(ask, node, text):
    ended = ask("plans", "assign", "user", "alice", "pro", "--expires", text)
    assert (ended.status, node.seen) == (2, [])
    assert "--expires must be a duration such as 30d" in ended.err


def test_file_is_assigned_in_batches(imported, node):
    rows = "".join(f"user,u{number},pro,,\n" for number in range(BATCH + 1))
    ended = imported(HEADER + rows)
    assert ended == (0, f"assigned {BATCH + 1} identities\n", "")
    batches = [one.request for one in node.seen if one.method == "BatchAssignPlans"]
    assert [len(one.assignments) for one in batches] == [BATCH, 1]
    assert len(node.assigned) == BATCH + 1


def test_file_may_have_fewer_reordered_columns_a_byte_order_mark_and_quotes(imported, node):
    content = (
        'plan,identifier,identifier_type\nblocked,"a,b\n""c""",api_key\nfree,::FFFF:1.2.3.4,ip\n'
    )
    ended = imported(b"\xef\xbb\xbf" + content.encode(), "--json")
    assert json.loads(ended.out) == {"assigned": 2}
    assert {key: one.plan for key, one in node.assigned.items()} == {
        ("api_key", 'a,b\n"c"'): "blocked",
        ("ip", "1.2.3.4"): "free",
    }


def test_every_invalid_row_is_reported_by_line_and_field_and_nothing_is_sent(imported, node):
    ended = imported(
        HEADER.encode()
        + b"user,good,pro,,\n"
        + b"user,,pro,,\n"
        + b"ip,nowhere,Pro,1,\n"
        + b"all,x,pro,never,\n"
        + b"user,\xff,pro,,\n"
        + b"user,good,free,,\n"
        + b"ip,::1,pro,,\n"
        + b"ip,0::1,pro,,\n"
        + b"user,short,pro\n"
        + b"user,long,pro,,,\n"
        + b'user,noted,pro,,"a\nb"\n'
    )
    assert (ended.status, ended.out, node.seen) == (1, "", [])
    lines = [line.strip() for line in ended.err.splitlines()]
    assert lines[0].endswith("nothing was assigned, because of invalid rows:")
    named = [tuple(line.split(": ")[:2]) for line in lines[1:]]
    assert named == [
        ("line 3", "identifier"),
        ("line 4", "identifier"),
        ("line 4", "plan"),
        ("line 4", "expire_time"),
        ("line 5", "identifier_type"),
        ("line 5", "expire_time"),
        ("line 6", "identifier"),
        ("line 7", "identifier"),
        ("line 9", "identifier"),
        ("line 10", "row"),
        ("line 11", "row"),
        ("line 13", "note"),
    ]
    assert "is the same as in line 2" in lines[8]
    assert "is the same as in line 8" in lines[9]


@pytest.mark.parametrize(
    "content",
    ["", "user,alice,pro\n", "identifier_type,identifier\n", f"{HEADER.strip()},more\n", f"plan,{HEADER}"],
)  # fmt: skip
def test_file_with_another_header_is_refused(imported, node, content):
    ended = imported(content)
    assert (ended.status, node.seen) == (1, [])
    assert "line 1: the header must be identifier_type,identifier,plan" in ended.err


def test_file_that_is_not_csv_is_refused_by_line(imported, node):
    ended = imported(HEADER + 'user,"alice"x,pro,,\n')
    assert (ended.status, node.seen) == (1, [])
    assert "line 2: " in ended.err


def test_undeclared_types_are_reported_with_all_other_invalid_rows(imported, node):
    node.error = status(grpc.StatusCode.INVALID_ARGUMENT, "identifier_type: must be one of …")
    ended = imported(HEADER + "tenant,t,pro,,\nuser,,pro,,\ntenant,u,pro,,\n")
    assert ended.status == 1
    assert "line 2: identifier_type: tenant is not declared by the node" in ended.err
    lines = [tuple(line.strip().split(": ")[:2]) for line in ended.err.splitlines()[1:]]
    assert lines == [
        ("line 2", "identifier_type"),
        ("line 3", "identifier"),
        ("line 4", "identifier_type"),
    ]
    assert node.methods() == ["ListAssignments"]


def test_invalid_rows_are_reported_also_without_a_node(imported, node):
    node.error = status(grpc.StatusCode.UNAVAILABLE, "no node")
    ended = imported(HEADER + "tenant,t,pro,,\nuser,,pro,,\n")
    assert ended.status == 1
    assert "line 3: identifier: " in ended.err
    node.error = status(grpc.StatusCode.UNAVAILABLE, "no node")
    ended = imported(HEADER + "tenant,t,pro,,\n")
    assert (ended.status, "no node" in ended.err) == (1, True)


def test_failed_call_reports_the_rows_assigned_before(imported, node):
    node.error = status(grpc.StatusCode.RESOURCE_EXHAUSTED, "there are 2 assignments")
    node.errors_after = 1
    rows = "".join(f"user,u{number},pro,,\n" for number in range(BATCH + 1))
    ended = imported(HEADER + rows)
    assert ended.status == 1
    assert f"the rows up to line {BATCH + 1} were assigned, and no others" in ended.err
    assert "there are 2 assignments" in ended.err


def test_unreadable_file_is_reported(ask, node, tmp_path):
    ended = ask("plans", "import", str(tmp_path / "none.csv"))
    assert (ended.status, node.seen) == (2, [])
