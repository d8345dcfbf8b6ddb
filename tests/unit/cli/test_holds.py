"""`hold`, `settle`, `holds list`, `holds extend`: the requests, and the exit status for scripts."""

import json

from ratelimiter.v1 import ratelimiter_pb2 as pb

HOLD = ("hold", "user", "alice", "/v1/chat")


def test_hold_has_the_typed_values(ask, node):
    typed = ("--cost", "2000", "--ttl", "120", "--hold-id", "h-1", "--also", "tenant=acme")
    ended = ask(*HOLD, *typed)
    assert ended.status == 0
    assert ended.out.startswith("allowed\n")
    [line] = [line for line in ended.out.splitlines() if line.split()[0] == "hold"]
    assert line.split()[1] in node.held
    assert node.seen[0].request == pb.HoldRequest(
        check=pb.RateLimitRequest(
            identifier="alice",
            identifier_type="user",
            endpoint="/v1/chat",
            tokens_requested=2000,
            also=[pb.Identity(identifier_type="tenant", identifier="acme")],
        ),
        hold_id="h-1",
        ttl_seconds=120,
    )


def test_denied_hold_is_status_3_without_a_hold(ask, node):
    node.limit = 0
    ended = ask(*HOLD)
    assert (ended.status, ended.err) == (3, "")
    assert "hold" not in ended.out
    assert json.loads(ask(*HOLD, "--json").out)["answer"]["reason"] == "LIMIT_EXCEEDED"


def test_settle_shows_the_charge_and_is_status_3_for_an_unknown_hold(ask, node):
    hold = json.loads(ask(*HOLD, "--json").out)["hold"]
    settled = ask("settle", hold, "1234")
    assert (settled.status, settled.out.splitlines()[0]) == (0, "charged 1234")
    assert "minute: 5 per" in settled.out
    again = ask("settle", hold, "1234")
    assert (again.status, again.out.split(":")[0]) == (3, "not known")
    assert json.loads(ask("settle", hold, "0", "--json").out)["known"] is False


def test_hold_is_extended_and_listed(ask):
    hold = json.loads(ask(*HOLD, "--cost", "7", "--json").out)["hold"]
    assert ask("holds", "list").out.splitlines()[1].split() == ["/a", "user", "minute", "1", "7"]
    assert json.loads(ask("holds", "list", "--json").out)[0]["holds"] == "1"
    extended = ask("holds", "extend", hold, "--ttl", "600")
    assert extended.status == 0
    assert extended.out.startswith("ends in ")
    assert json.loads(ask("holds", "extend", hold, "--json").out)["known"] is True
    ask("settle", hold, "7")
    assert ask("holds", "list").out == "no holds are in flight\n"
    assert ask("holds", "extend", hold).status == 3
