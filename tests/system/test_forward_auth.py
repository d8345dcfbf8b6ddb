"""Real proxies that ask a node before they pass a request on, with the configurations of the documentation."""

import http.client
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

import pytest

from ratelimitd.errors import InvalidInputError
from ratelimitd.web.api.forward_auth import segments_of
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.servers import free_port, until
from tests.system.process import NEVER_ENDING_S, START_S, Files
from tests.system.test_behind_proxies import UNPACKED, listens

pytestmark = pytest.mark.system

PAGE = (Path(__file__).parents[2] / "docs/proxies.md").read_text()

NGINX = """
daemon off; user root; pid {directory}/pid; error_log {directory}/error; worker_processes 1;
events {{}}
http {{
access_log off;
client_body_temp_path {directory}/1; proxy_temp_path {directory}/2; fastcgi_temp_path {directory}/3;
uwsgi_temp_path {directory}/4; scgi_temp_path {directory}/5;
{config}
}}
"""

LIMIT = 3


class Application(ThreadingHTTPServer):
    """What the proxies are in front of: answers the body that it is sent, and remembers whom it was asked for."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked = []
        self.port = self.server_address[1]

    def __enter__(self):
        threading.Thread(target=self.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()

    def handle_error(self, *_):
        """Say nothing of a proxy that leaves."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.command, self.path))
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer  # noqa: N815 -- what its base class looks for

    def log_message(self, *_):
        pass


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes


class Site:
    """A proxy in front of an application and beside a node."""

    def __init__(self, node, application, port):
        self.node = node
        self.application = application
        self._port = port

    def ask(self, target="/", *headers, method="GET", body=b""):
        """Ask as a client does; nothing of what it sends is tidied up."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=START_S)
        try:
            connection.putrequest(method, "/", skip_accept_encoding=True)
            # http.client refuses targets that are none.
            connection._buffer[0] = f"{method} {target} HTTP/1.1".encode("latin-1")
            for name, value in headers:
                connection.putheader(name, value)
            if body and "Transfer-Encoding" not in dict(headers):
                connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body or None)
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read())
        finally:
            connection.close()

    def spend(self, times=LIMIT):
        """Spend the whole limit of the address that all requests of these tests come from."""
        for _ in range(times):
            assert self.ask().status == 200


def blocks(language):
    """The code of a language on the page, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def nginx(directory):
    [config] = blocks("nginx")
    text = NGINX.format(directory=directory, config=config)
    return {"nginx.conf": text}, [UNPACKED / "usr/sbin/nginx", "-c", directory / "nginx.conf"]


def haproxy(directory):
    [config], [engine] = blocks("haproxy"), blocks("spoe")
    command = [UNPACKED / "usr/sbin/haproxy", "-db", "-f", "haproxy.cfg"]
    return {"haproxy.cfg": config, "ratelimitd.spoe": engine}, command


def caddy(directory):
    [config] = blocks("caddy")
    quiet = config.replace("{\n", "{\n\tadmin off\n", 1)
    command = [UNPACKED / "usr/bin/caddy", "run", "--adapter", "caddyfile", "--config", "Caddyfile"]
    return {"Caddyfile": quiet}, command


def traefik(directory):
    static, dynamic = blocks("yaml")
    static += "global: {checkNewVersion: false, sendAnonymousUsage: false}\n"
    command = [Path(sys.prefix) / "bin/traefik", "--configFile=static.yml"]
    return {"static.yml": static, "dynamic.yml": dynamic}, command


PROXIES = {"nginx": nginx, "haproxy": haproxy, "caddy": caddy, "traefik": traefik}


@contextmanager
def running(name, directory, node, application, *, spoe_port=0, edits=(), patient=True):
    """A proxy that asks the node; ``patient``: a machine that is busy for 100 ms lets nothing pass unchecked."""
    directory.mkdir()
    ports = {
        "8080": node.http_address.rpartition(":")[2],
        "9091": str(spoe_port),
        "3000": str(application.port),
        "8000": str(free_port()),
        "8001": str(free_port()),
    }
    files, command = PROXIES[name](directory)
    for file, text in files.items():
        placed = re.sub(r"(?<=127\.0\.0\.1:)\d+", lambda found: ports[found[0]], text)
        if patient:
            placed = re.sub(r"\b\d+ms\b", "20s", placed).replace("interval: 1s", "interval: 60s")
        for old, new in edits:
            placed = placed.replace(old, new, 1)
        (directory / file).write_text(placed)
    [library] = {path.parent for path in UNPACKED.glob("usr/lib/*/liblua5.3.so.0")}
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(
            command,
            cwd=directory,
            stdout=log,
            stderr=log,
            env={**os.environ, "HOME": str(directory), "LD_LIBRARY_PATH": str(library)},
        )
    try:
        port = int(ports["8000"])
        until(lambda: listens(port), "the proxy listens")
        site = Site(node, application, port)
        # Traefik reads its routes later. There is no rule yet.
        until(lambda: site.ask().status == 200, "the proxy passes requests on")
        application.asked.clear()
        yield site
    finally:
        process.terminate()
        process.wait(START_S)


@pytest.fixture(scope="module", params=PROXIES)
def name(request):
    return request.param


@contextmanager
def serving(tmp_path, name, *, patient=True):
    spoe_port = free_port()
    settings = (
        *("--trusted-proxies", "127.0.0.1"),
        *("--auth-endpoints", "GET /orders/{id}"),
        *("--spoe-listen", f"127.0.0.1:{spoe_port}"),
    )
    with (
        Files(tmp_path).serving(*settings) as node,
        Application() as application,
        running(
            name, tmp_path / "proxy", node, application, spoe_port=spoe_port, patient=patient
        ) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def one_site(tmp_path_factory, name):
    with serving(tmp_path_factory.mktemp(name), name) as found:
        yield found


@pytest.fixture
def site(one_site):
    """A site without rules, which the test does not stop."""
    yield one_site
    one_site.node.rules.ApplyRateLimits(pb.ApplyRateLimitsRequest(prune=True), timeout=START_S)
    one_site.application.asked.clear()


WINDOWS_S = itertools.count(NEVER_ENDING_S, -1)
"""Each rule has its own, so that no test meets a bucket of another."""


def create_rule(node, endpoint, identifier_type="ip", limit=LIMIT):
    node.create_rule(endpoint, limit, identifier_type, window_s=next(WINDOWS_S))


def test_a_request_over_the_limit_is_denied_and_the_limit_is_told(site, name):
    create_rule(site.node, "GET /orders/{id}")
    body = bytes(100_000)
    for left in (2, 1, 0):
        answer = site.ask(f"/orders/{left}?page=1")
        assert answer.status == 200
        if name != "traefik":  # as the page says
            assert f";r={left};" in answer.headers["RateLimit"]
            assert ";q=3;" in answer.headers["RateLimit-Policy"]
    denied = site.ask("/orders/9")
    assert denied.status == 429
    assert ";r=0;" in denied.headers["RateLimit"]
    assert ";q=3;" in denied.headers["RateLimit-Policy"]
    assert int(denied.headers["Retry-After"]) > 0
    # Another method is another endpoint, without a rule: its request passes whole, and no limit is told.
    passed = site.ask("/orders/9", method="POST", body=body)
    assert (passed.status, passed.body, passed.headers["RateLimit"]) == (200, body, None)
    paths = [f"/orders/{left}?page=1" for left in (2, 1, 0)]
    assert site.application.asked == [*(("GET", path) for path in paths), ("POST", "/orders/9")]


def test_every_identity_of_a_request_is_judged(site):
    create_rule(site.node, "*", "api_key", limit=1)
    create_rule(site.node, "**", "ip", limit=4)
    assert [site.ask("/", ("X-Api-Key", key)).status for key in "aab"] == [200, 429, 200]
    assert [site.ask("/", ("X-Api-Key", key)).status for key in "cde"] == [200, 200, 429]


FORGED = [
    ("X-Forwarded-For", "203.0.113.66"),
    ("X-Forwarded-Host", "other.example"),
    ("X-Forwarded-Method", "DELETE"),
    ("X-Forwarded-Uri", "/orders/5"),
    ("Forwarded", "for=203.0.113.66"),
    ("X-Real-Ip", "203.0.113.66"),
]


def test_what_a_client_claims_has_no_effect(site):
    create_rule(site.node, "*")
    create_rule(site.node, "GET /orders/{id}", limit=1_000)
    site.spend()
    for header in FORGED:
        assert site.ask("/", header).status == 429, header
    assert site.ask("/", *FORGED).status == 429
    for query in ("endpoint=GET%20/orders/{id}", "endpoint=x", "deny=200", "cost=0", "deny=403"):
        assert site.ask(f"/?{query}").status in {403, 429}, query
    assert len(site.application.asked) == LIMIT


def test_a_client_does_not_have_the_headers_of_the_proxy_dropped(site):
    create_rule(site.node, "GET /orders/{id}", limit=1)
    assert site.ask("/orders/1").status == 200
    for dropped in ("X-Forwarded-Uri", "X-Forwarded-Method", "X-Forwarded-For"):
        for connection in (dropped, f"close, {dropped}", f"keep-alive, {dropped.lower()}"):
            forged = [("Connection", connection), (dropped, "/x")]
            assert site.ask("/orders/2", *forged).status in {400, 429}, connection
            assert site.ask("/orders/2", *forged[:1]).status in {400, 429}, connection
    assert len(site.application.asked) == 1


HOSTILE = {
    "escape": ("/%zz",),
    "percent": ("/%",),
    "zero": ("/%00",),
    "above": ("/../../x",),
    "encoded above": ("/%2e%2e/x",),
    "long path": ("/" + "a" * 7_000,),
    "longer path": ("/" + "a" * 15_000,),
    "path of 64 KiB": ("/" + "a" * 65_536,),
    "long query": ("/?" + "a" * 7_000,),
    "long key": ("/", ("X-Api-Key", "k" * 7_000)),
    "many headers": ("/", *((f"X-{number}", "v" * 3_000) for number in range(9))),
    "longest head": ("/" + "a" * 7_000, *((f"X-{number}", "v" * 7_000) for number in range(3))),
    "two keys": ("/", ("X-Api-Key", "a"), ("X-Api-Key", "b")),
    "key no UTF-8": ("/", ("X-Api-Key", "\xff\xfe")),
    "two hosts": ("/", ("X-Forwarded-Host", "a"), ("X-Forwarded-Host", "b")),
    "absolute": ("http://127.0.0.1/x",),
    "cross-site": ("/", ("Sec-Fetch-Site", "cross-site"), ("Origin", "http://evil.example")),
    "many hops": ("/", ("X-Forwarded-For", ",".join(["1.1.1.1"] * 800))),
    "authorization": ("/", ("Authorization", "Bearer x")),
    "expects": ("/", ("Expect", "100-continue")),
    "upgrade": ("/", ("Connection", "Upgrade"), ("Upgrade", "websocket")),
}


def test_no_request_passes_because_its_check_fails(site):
    create_rule(site.node, "**")
    site.spend()
    for what, (target, *headers) in HOSTILE.items():
        try:
            status = site.ask(target, *headers).status
        except (ConnectionError, http.client.HTTPException):
            continue  # the proxy has closed the connection
        assert status >= 400, what
    assert len(site.application.asked) == LIMIT
    assert site.ask().status == 429


def test_requests_for_the_path_of_the_check_keep_the_node_in_use(site):
    """A body that is broken must not reach the node: a proxy would take the failure for the node's."""
    create_rule(site.node, "**")
    site.spend()
    for target in ("/v1/auth", "/v1/auth?", "/v1%2fauth", "/V1/auth"):
        for _ in range(4):
            try:
                broken = site.ask(target, ("Transfer-Encoding", "chunked"), body=b"ZZ\r\n")
            except (ConnectionError, http.client.HTTPException):
                continue  # the proxy has closed the connection
            assert broken.status >= 400, target
        assert site.ask().status == 429, target
    assert len(site.application.asked) == LIMIT


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
def test_without_a_node_requests_pass(tmp_path, name, number):
    with serving(tmp_path, name, patient=False) as site:
        create_rule(site.node, "**")
        until(lambda: site.ask().status == 429, "the limit is spent")
        site.node.signal(number)
        if number == signal.SIGKILL:
            site.node.ended()
        # Caddy and Traefik may first have to find out.
        until(lambda: site.ask().status == 200, "requests pass")
        passed = site.ask("/", method="POST", body=b"order")
        assert (passed.status, passed.body) == (200, b"order")


PIECES = [
    *"/./..//a%?#+&;:@~=,",
    "%2f",
    "%2F",
    "%2e",
    "%2E%2e",
    "%25",
    "%00",
    "%zz",
    "%3f",
    "%23",
    "%ff",
]


def test_paths_are_normalised_as_nginx_does(tmp_path):
    port, chance = free_port(), random.Random(0)
    config = f"server {{ listen 127.0.0.1:{port}; location / {{ return 200 $uri; }} }}"
    (tmp_path / "nginx.conf").write_text(NGINX.format(directory=tmp_path, config=config))
    with subprocess.Popen([UNPACKED / "usr/sbin/nginx", "-c", tmp_path / "nginx.conf"]) as process:
        try:
            until(lambda: listens(port), "nginx listens")
            site = Site(None, None, port)
            for _ in range(1_000):
                target = "/" + "".join(chance.choices(PIECES, k=chance.randrange(12)))
                answer = site.ask(target)
                try:
                    expected = 200, b"/".join(segments_of(target))
                except InvalidInputError:
                    expected = 400, b""
                # A slash at the end does not matter to templates.
                found = answer.body.strip(b"/") if answer.status == 200 else b""
                assert (answer.status, found) == expected, target
        finally:
            process.terminate()


TOKEN = "token-of-the-tests"
_BEARER = f"Bearer {TOKEN}"
WITH_TOKEN = {
    "nginx": ("proxy_http_version", f'proxy_set_header Authorization "{_BEARER}"; '),
    "haproxy": ("x-forwarded-for=", f'authorization=str("{_BEARER}") '),
    "caddy": ("header_up X-Forwarded-Method", f'header_up Authorization "{_BEARER}"\n'),
    "traefik": (
        "    limits:\n      forwardAuth:",
        f"    token: {{headers: {{customRequestHeaders: {{Authorization: {_BEARER}}}}}}}\n",
    ),
}
"""What the page says to add for CHECK_TOKEN, and before what."""


def test_a_node_with_a_check_token_is_given_it_by_the_proxy(tmp_path, name):
    spoe_port = free_port()
    settings = ("--check-token", TOKEN, "--trusted-proxies", "127.0.0.1")
    before, added = WITH_TOKEN[name]
    used = "service: limits\n"  # by Traefik
    edits = [(before, added + before), (used, f"{used}      middlewares: [token]\n")]
    with (
        Files(tmp_path).serving(*settings, "--spoe-listen", f"127.0.0.1:{spoe_port}") as node,
        Application() as application,
        running(
            name,
            tmp_path / "proxy",
            node,
            application,
            spoe_port=spoe_port,
            edits=edits,
        ) as site,
    ):
        create_rule(node, "unmatched")
        site.spend()
        # What a client brings is for the application.
        assert site.ask("/", ("Authorization", "Bearer x")).status == 429


@pytest.mark.parametrize("name", ["nginx", "haproxy"])
def test_several_workers_answer_as_one_node(tmp_path, name):
    spoe_port = free_port()
    settings = ("--workers", "2", "--trusted-proxies", "127.0.0.1")
    with (
        Files(tmp_path).serving(*settings, "--spoe-listen", f"127.0.0.1:{spoe_port}") as node,
        Application() as application,
        running(name, tmp_path / "proxy", node, application, spoe_port=spoe_port) as site,
    ):
        create_rule(node, "unmatched", limit=20)
        # The other worker has the rule a little later.
        until(lambda: site.ask().status == 429, "both deny")
        assert int(site.ask().headers["Retry-After"]) > 0
        node.process.terminate()
        node.ended()


def test_a_proxy_that_is_not_trusted_is_counted(tmp_path):
    with (
        Files(tmp_path).serving() as node,
        Application() as application,
        running("nginx", tmp_path / "proxy", node, application) as site,
    ):
        create_rule(node, "unmatched")
        ignored = node.metric("rate_limiter_auth_forwarding_ignored_total")
        site.spend()
        assert site.ask("/orders/5").status == 429
        found = node.metric("rate_limiter_auth_forwarding_ignored_total") - ignored
        assert found == LIMIT + 1
