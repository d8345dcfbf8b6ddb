"""The harness for other rate limiters: against our own nodes, and servers that answer as the others do."""

import argparse
import asyncio
import contextlib
import os
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.message_factory import GetMessages

from bench.peers import Peer, PeerError, ask, beside, listeners, look_at, parse
from bench.protocols import PROTOCOLS, NotAllowedError
from bench.servers import RULES, Server
from ratelimitd.testing import running_node
from tests.envoy_messages import Request, Response
from tests.servers import free_port


def messages(package, **fields):
    """Classes of messages, of lists of ``TYPE NAME NUMBER``; another message's name is for a repeated field."""
    file = descriptor_pb2.FileDescriptorProto(name=package, package=package, syntax="proto3")
    for name, text in fields.items():
        added = file.message_type.add(name=name).field
        for kind, field, number in map(str.split, text.split(",")):
            if kind in fields:
                options = {"type_name": f".{package}.{kind}", "label": "LABEL_REPEATED"}
            else:
                options = {"type": f"TYPE_{kind.upper()}", "label": "LABEL_OPTIONAL"}
            added.add(name=field, number=int(number), **options)
    return {name.rpartition(".")[2]: one for name, one in GetMessages([file]).items()}


# The parts of ``gubernator.proto`` and ``throttlecrab.proto`` that are used; of an enumeration its integer.
GUBERNATOR = messages(
    "pb.gubernator",
    RateLimitReq="string name 1, string unique_key 2, int64 hits 3, int64 limit 4, int64 duration 5",
    GetRateLimitsReq="RateLimitReq requests 1",
    RateLimitResp="int32 status 1, int64 limit 2, int64 remaining 3, int64 reset_time 4, string error 5",
    GetRateLimitsResp="RateLimitResp responses 1",
)
THROTTLECRAB = messages(
    "throttlecrab",
    ThrottleRequest="string key 1, int32 max_burst 2, int32 count_per_period 3, int32 period 4, int32 quantity 5",
    ThrottleResponse="bool allowed 1, int32 limit 2, int32 remaining 3, int32 retry_after 4, int32 reset_after 5",
)
SHAPE = (2, 4)
BRIEF = {"seconds": 0.3, "warm_up": 0.1}


def port_of(node):
    return int(node.grpc_address.rpartition(":")[2])


class Fake:
    """Answers as one of the peers does: the limit less what it was asked for, from one bucket."""

    def __init__(self, kind):
        self.kind = kind
        self.remaining = 1_000_000_000
        self.denies_from = 0
        """Number of the first check that is denied; 0: none."""
        self.charges = True
        self.asked = 0

    def answer(self, data):
        self.asked += 1
        self.remaining -= self.charges
        denied = 0 < self.denies_from <= self.asked
        return getattr(self, self.kind.replace("-", "_"))(data, denied).SerializeToString()

    def gubernator(self, data, denied):
        [request] = GUBERNATOR["GetRateLimitsReq"].FromString(data).requests
        assert (request.hits, request.duration) == (1, 86_400_000)
        response = {"status": int(denied), "limit": request.limit, "remaining": self.remaining}
        return GUBERNATOR["GetRateLimitsResp"](responses=[response])

    def throttlecrab(self, data, denied):
        request = THROTTLECRAB["ThrottleRequest"].FromString(data)
        assert request.quantity == 1
        return THROTTLECRAB["ThrottleResponse"](
            allowed=not denied, limit=request.max_burst, remaining=self.remaining
        )

    def envoy_ratelimit(self, _data, denied):
        response = Response(overall_code=1 + denied)
        response.statuses.add(
            code=1 + denied, current_limit={"requests_per_unit": 9}, limit_remaining=self.remaining
        )
        return response

    def limitador(self, data, denied):
        too_many = Request.FromString(data).hits_addend > 4_000_000_000
        return Response(overall_code=1 + (denied or too_many))


@contextlib.contextmanager
def running(fake):
    """The fake as a peer."""
    *_, service, method = PROTOCOLS[fake.kind].path.decode().split("/")
    handler = grpc.unary_unary_rpc_method_handler(lambda data, _context: fake.answer(data))
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {method: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield Peer(fake.kind, port, (os.getpid(),))
    finally:
        server.stop(None).wait()


@pytest.fixture
def fake():
    return Fake("gubernator")


@pytest.mark.deep
async def test_all_take_turns_and_are_told_beside_ours(tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text(RULES)
    settings = {"rules_file": rules, "log_level": "error", "envoy_fields": "none"}
    async with running_node(**settings) as ours, running_node(**settings) as other:
        with contextlib.ExitStack() as stack:
            server = Server(port_of(ours), os.getpid())
            kinds = ("ratelimitd", "ratelimitd-envoy")
            peers = [parse(f"{kind}=127.0.0.1:{port_of(other)}") for kind in kinds]
            peers += [
                stack.enter_context(running(Fake(kind))) for kind in ("gubernator", "throttlecrab")
            ]
            peers[-1] = peers[-1]._replace(pids=())
            # In a thread, since the nodes need the loop of this one.
            rows = await asyncio.to_thread(beside, server, peers, shapes=[SHAPE], rounds=1, **BRIEF)
    assert {peer.pids for peer in peers[:-1]} == {(os.getpid(),)}
    assert all(row.value > 0 and row.baseline > 0 for row in rows if row.unit == "checks/s")
    of_ours = [f"{kind}:{server.port}" for kind in kinds]
    assert [row.name for row in rows] == [
        f"{name}, 2x4: {what}"
        for name in (*of_ours, *(str(peer) for peer in peers))
        for what in ("best", "median", "CPU")
        if (name, what) != (str(peers[-1]), "CPU")
    ]


@pytest.mark.parametrize("kind", ["gubernator", "throttlecrab", "envoy-ratelimit", "limitador"])
def test_an_answer_is_known_by_how_it_begins(kind):
    fake, protocol = Fake(kind), PROTOCOLS[kind]
    answers = [fake.answer(protocol.message)]
    fake.denies_from = 1
    answers.append(fake.answer(protocol.message))
    framed = [b"\0" + len(answer).to_bytes(4, "big") + answer for answer in answers]
    assert [bool(protocol.allowed.match(each)) for each in framed] == [True, False]


@pytest.mark.parametrize("size", [1, 16, 300])
def test_an_error_of_gubernator_allows_nothing(size):
    answer = GUBERNATOR["GetRateLimitsResp"](responses=[{"error": "x" * size}]).SerializeToString()
    framed = b"\0" + len(answer).to_bytes(4, "big") + answer
    assert not PROTOCOLS["gubernator"].allowed.match(framed)
    with pytest.raises(NotAllowedError, match="x"):
        PROTOCOLS["gubernator"].remaining(answer)


def test_a_denied_check_fails_before_the_load(fake):
    fake.denies_from = 1
    with running(fake) as peer, pytest.raises(PeerError, match=r"gubernator:\d+: .*: \{1: 1"):
        ask(peer, SHAPE, **BRIEF)
    assert fake.asked == 1


def test_a_denied_check_in_the_load_fails(fake):
    fake.denies_from = 20
    with (
        running(fake) as peer,
        pytest.raises(PeerError, match=r"gubernator:\d+: instead of a succ"),
    ):
        ask(peer, SHAPE, **BRIEF)


def test_checks_that_are_answered_but_not_charged_fail(fake):
    fake.charges = False
    with running(fake) as peer, pytest.raises(PeerError, match="answered, but -1 charged"):
        ask(peer, SHAPE, **BRIEF)


def test_an_envoy_service_without_a_rule_fails():
    fake = Fake("envoy-ratelimit")
    fake.envoy_ratelimit = lambda *_: Response(overall_code=1, statuses=[{"code": 1}])
    with running(fake) as peer, pytest.raises(PeerError, match="no limit is in force"):
        look_at(peer)


def test_a_limitador_without_a_limit_fails():
    fake = Fake("limitador")
    fake.limitador = lambda *_: Response(overall_code=1)
    with running(fake) as peer, pytest.raises(PeerError, match="none is in force"):
        look_at(peer)


def test_a_server_of_another_kind_fails(fake):
    with running(fake) as peer, pytest.raises(PeerError, match="UNIMPLEMENTED"):
        ask(peer._replace(kind="throttlecrab"), SHAPE, **BRIEF)


def test_the_listener_of_a_port_is_found_and_who_is_named_comes_first(fake):
    with running(fake) as peer:
        assert list(listeners(peer.port)) == [os.getpid()]
        pid = os.getppid()
        assert parse(f"gubernator=localhost:{peer.port},pid={pid},pid={os.getpid()}").pids == (
            pid,
            os.getpid(),
        )
    assert parse(f"gubernator=localhost:{free_port()}").pids == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gubernator", "must be KIND"),
        ("nginx=127.0.0.1:80", "must be KIND"),
        ("gubernator=127.0.0.1:1051,pid=x", "must be KIND"),
        ("gubernator=192.0.2.1:1051", "on this machine"),
        ("gubernator=127.0.0.1:1051,pid=0", "no process 0"),
    ],
)
def test_what_names_no_peer_is_refused(text, message):
    with pytest.raises(argparse.ArgumentTypeError, match=message):
        parse(text)
