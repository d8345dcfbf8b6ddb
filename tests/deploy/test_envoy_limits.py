"""A real Envoy that asks a node before it passes a request on: what callers of the upstream meet."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.deploy.test_envoy import running_envoy
from tests.servers import free_port, until
from tests.system.process import NEVER_ENDING_S, START_S, Files

pytestmark = pytest.mark.deep

TYPES = "type.googleapis.com/envoy.extensions"
ACTIONS = [
    # An address and a path are one descriptor, a user is another: where a header is missing there is none.
    [
        {"remote_address": {}},
        {"request_headers": {"header_name": ":path", "descriptor_key": "path"}},
    ],
    [{"request_headers": {"header_name": "x-user", "descriptor_key": "user_id"}}],
    [{"request_headers": {"header_name": "x-claimed-ip", "descriptor_key": "ip"}}],
]


ANSWERED = {"x-hold": ("hold", "STRING"), "x-unused": ("unused", "NUMBER")}
"""Response headers of the upstream → what they are as metadata, and their type."""

GIVEN_BACK = {
    "apply_on_stream_done": True,
    "actions": [
        {
            "metadata": {
                "descriptor_key": "hold",
                "metadata_key": {"key": "ratelimitd", "path": [{"key": "hold"}]},
            }
        }
    ],
    "hits_addend": {"format": "%DYNAMIC_METADATA(ratelimitd:unused)%", "is_negative_hits": True},
}


class Upstream(BaseHTTPRequestHandler):
    """Answers everything, and counts it."""

    served = 0

    def do_GET(self):
        type(self).served += 1
        self.send_response(200)
        self.send_header("content-length", "0")
        for name in ANSWERED:
            if name in self.headers:
                self.send_header(name, self.headers[name])
        self.end_headers()

    def log_message(self, *_):
        pass


def _listener(port, *, failure_mode_deny):
    limit = {
        "@type": f"{TYPES}.filters.http.ratelimit.v3.RateLimit",
        "domain": "edge",
        "timeout": f"{START_S}s",
        "failure_mode_deny": failure_mode_deny,
        "rate_limit_service": {
            "transport_api_version": "V3",
            "grpc_service": {"envoy_grpc": {"cluster_name": "ratelimitd"}},
        },
    }
    rules = [
        {
            "header": header,
            "on_header_present": {"metadata_namespace": "ratelimitd", "key": key, "type": kind},
            "remove": True,
        }
        for header, (key, kind) in ANSWERED.items()
    ]
    to_metadata = {
        "@type": f"{TYPES}.filters.http.header_to_metadata.v3.Config",
        "response_rules": rules,
    }
    router = {"@type": f"{TYPES}.filters.http.router.v3.Router"}
    route = {
        "match": {"prefix": "/"},
        "route": {"cluster": "upstream", "rate_limits": [{"actions": each} for each in ACTIONS]},
    }
    manager = {
        "@type": f"{TYPES}.filters.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "edge",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [
            {"name": "envoy.filters.http.ratelimit", "typed_config": limit},
            {"name": "give back", "typed_config": {**limit, "rate_limits": [GIVEN_BACK]}},
            {"name": "envoy.filters.http.header_to_metadata", "typed_config": to_metadata},
            {"name": "envoy.filters.http.router", "typed_config": router},
        ],
    }
    chain = {"filters": [{"name": "http", "typed_config": manager}]}
    return {"name": f"deny={failure_mode_deny}", "address": _at(port), "filter_chains": [chain]}


def _cluster(name, port, **options):
    endpoint = {"endpoint": {"address": _at(port)}}
    load = {"cluster_name": name, "endpoints": [{"lb_endpoints": [endpoint]}]}
    return {"name": name, "type": "STATIC", "load_assignment": load, **options}


def _at(port):
    return {"socket_address": {"address": "127.0.0.1", "port_value": int(port)}}


_HTTP2 = {
    "typed_extension_protocol_options": {
        "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
            "@type": f"{TYPES}.upstreams.http.v3.HttpProtocolOptions",
            "explicit_http_config": {"http2_protocol_options": {}},
        }
    }
}


@contextmanager
def _upstream():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


@contextmanager
def _envoy(directory, node_port, upstream_port):
    """The addresses of Envoy: where a node that does not answer lets requests through, and where it does not."""
    ports = {deny: free_port() for deny in (False, True)}
    resources = {
        "listeners": [_listener(port, failure_mode_deny=deny) for deny, port in ports.items()],
        "clusters": [
            _cluster("ratelimitd", node_port, **_HTTP2),
            _cluster("upstream", upstream_port),
        ],
    }
    urls = {deny: f"http://127.0.0.1:{port}" for deny, port in ports.items()}
    with running_envoy(directory, resources):
        for url in urls.values():
            until(lambda url=url: _answers(url), "Envoy listens")
        yield urls


def _answers(url):
    try:
        return httpx.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with Files(tmp_path_factory.mktemp("node")).serving() as node:
        yield node


@pytest.fixture(scope="module")
def front(tmp_path_factory, node):
    node_port = node.grpc_address.rpartition(":")[2]
    with (
        _upstream() as upstream_port,
        _envoy(tmp_path_factory.mktemp("envoy"), node_port, upstream_port) as urls,
    ):
        yield urls


def test_the_request_after_the_limit_is_429_and_never_reaches_the_upstream(node, front):
    rule_id = node.create_rule("edge/path=/counted", 3, "ip")
    before = Upstream.served
    answers = [httpx.get(f"{front[True]}/counted") for _ in range(5)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429, 429]
    assert Upstream.served - before == 3
    policy = f'"{rule_id}";q=3;w={NEVER_ENDING_S}'
    assert [answer.headers["ratelimit-policy"] for answer in answers] == [policy] * 5
    remaining = [answer.headers["x-ratelimit-remaining"] for answer in answers]
    assert remaining == ["2", "1", "0", "0", "0"]
    assert answers[0].headers["ratelimit"].startswith(f'"{rule_id}";r=2;t=')
    assert "retry-after" not in answers[0].headers
    retry_after = answers[4].headers["retry-after"]
    assert answers[4].headers["ratelimit"] == f'"{rule_id}";r=0;t={retry_after}'


def test_what_one_descriptor_is_denied_for_costs_the_other_nothing(node, front):
    node.create_rule("edge/path=/both", 4, "ip")
    node.create_rule("edge", 1)
    url = f"{front[True]}/both"
    as_ada = [httpx.get(url, headers={"x-user": "ada"}).status_code for _ in range(3)]
    assert as_ada == [200, 429, 429]
    alone = [httpx.get(url).status_code for _ in range(4)]
    assert alone == [200, 200, 200, 429]


def test_what_a_request_has_not_used_of_its_hold_is_given_back_when_it_is_done(node, front):
    node.create_rule("/v1/chat", 10)
    ada = {"identifier": "ada", "identifier_type": "user", "endpoint": "/v1/chat"}
    check = pb.RateLimitRequest(**ada, tokens_requested=8)
    held = node.holds.Hold(pb.HoldRequest(check=check), timeout=START_S)
    answer = httpx.get(front[True], headers={"x-hold": held.hold, "x-unused": "5"})
    assert (answer.status_code, "x-hold" in answer.headers) == (200, False)
    look = pb.RateLimitRequest(**ada, tokens_requested=7, peek=True)
    until(
        lambda: node.checks.CheckRateLimit(look, timeout=START_S).allowed,
        "5 of 8 tokens are given back, so that 7 of 10 are left",
    )


@pytest.mark.parametrize(("failure_mode_deny", "status"), [(False, 200), (True, 500)])
def test_what_is_malformed_is_let_through_only_if_envoy_is_told_to(
    front, failure_mode_deny, status
):
    answer = httpx.get(front[failure_mode_deny], headers={"x-claimed-ip": "nowhere"})
    assert answer.status_code == status


def test_so_is_everything_while_no_node_is_there(tmp_path):
    with Files(tmp_path).serving() as going, _upstream() as upstream_port:
        port = going.grpc_address.rpartition(":")[2]
        with _envoy(tmp_path, port, upstream_port) as urls:
            going.process.kill()
            going.ended()
            assert httpx.get(urls[False]).status_code == 200
            assert httpx.get(urls[True]).status_code == 500
