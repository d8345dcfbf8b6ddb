"""`serve --workers`: real processes on one port, which share what they count in a real Valkey."""

import contextlib
import json
import os
import signal
import ssl
import threading
import time
from collections import Counter
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import grpc
import httpx
import pytest
import trustme
from google.protobuf.empty_pb2 import Empty
from prometheus_client.utils import floatToGoString

from ratelimitd.cli import main
from ratelimitd.node.serving import TRANSPORTS
from ratelimitd.web.pages.sessions import Sessions
from ratelimiter.v1 import ratelimiter_pb2 as pb
from ratelimiter.v1 import ratelimiter_pb2_grpc as stubs
from tests.named_tokens import digest_of, entry, token_of, write
from tests.servers import Valkey, free_port
from tests.system.process import NEVER_ENDING_S, PATIENT, START_S, Files, one_line, until

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]  # processes start slowly

EXACT = ("--consistency", "strict", *PATIENT)
LIMIT = 20
BOOK = f"""
rules:
  - endpoint: /scarce
    identifier_type: user
    limit: {LIMIT}
    window_seconds: {NEVER_ENDING_S}
    algorithm: fixed_window
  - {{endpoint: /plenty, identifier_type: user, limit: 1000000000, window_seconds: 60, algorithm: token_bucket}}
"""


def files_of(directory):
    """The files of a node, with its book in ``rules.yaml``."""
    (directory / "rules.yaml").write_text(BOOK)
    return Files(directory)


def two_workers(directory):
    """Arguments for two workers with that book."""
    return [
        *("--workers", "2", "--node-id", "n", "--rules-file", str(directory / "rules.yaml")),
        *("--loopback-admin", "on"),  # every caller asks which worker it came to
    ]


@pytest.fixture
def files(tmp_path):
    return files_of(tmp_path)


@pytest.fixture
def several(tmp_path):
    """Arguments for two workers with a shared state."""
    with Valkey(tmp_path / "valkey") as valkey:
        yield [*two_workers(tmp_path), "--redis-url", valkey.url]


@contextlib.contextmanager
def connection(node):
    """A connection of its own, which one of the workers accepts."""
    with grpc.insecure_channel(
        node.grpc_address, [("grpc.use_local_subchannel_pool", 1)]
    ) as channel:
        yield channel


def worker_of(channel):
    return stubs.RateLimiterHealthStub(channel).GetHealthStatus(Empty(), timeout=START_S).node_id


def check(channel, endpoint, identifier="u"):
    request = pb.RateLimitRequest(identifier=identifier, identifier_type="user", endpoint=endpoint)
    return stubs.RateLimiterStub(channel).CheckRateLimit(request, timeout=START_S).allowed


def children_of(node):
    """The process id and the command line of each child; one that has ended has no command line any more."""
    parent = node.process.pid
    for pid in map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            yield pid, Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def workers_of(node):
    """The process ids of the workers, by their name."""
    return {
        command[-2]: pid for pid, command in children_of(node) if "ratelimitd.workers" in command
    }


def runs(pid):
    """Whether a process has not ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_workers_on_one_port_share_a_limit_and_are_one_node_to_a_scraper(files, several, transport):
    with files.serving(*several, *EXACT, "--transport", transport) as node:
        assert node.node_id == "n"
        assert sorted(workers_of(node)) == ["n/0", "n/1"]
        asked, allowed = Counter(), Counter()
        while min(asked["n/0"], asked["n/1"]) < LIMIT:  # the kernel chooses
            with connection(node) as channel:
                worker = worker_of(channel)
                for _ in range(4):
                    allowed[worker] += check(channel, "/scarce")
                    asked[worker] += 1
        assert allowed.total() == LIMIT
        assert node.metric("rate_limiter_requests_allowed_total") == LIMIT
        assert node.metric("rate_limiter_requests_blocked_total") == asked.total() - LIMIT
        assert node.metric("rate_limiter_check_latency_seconds_count") == asked.total()
        assert node.metric("rate_limiter_rules_revision") == 2
        assert node.metric("rate_limiter_workers") == 2
        node.signal(signal.SIGTERM)
        status, rest, log = node.ended()
    assert (status, rest) == (0, "")
    assert all(line.startswith("{") for line in log.splitlines())
    assert log.count('"drained"') == 3


WAITING_CALLERS = 24
"""By chance all of them come to one of two workers once in eight million runs."""


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_callers_that_wait_for_the_port_come_to_all_workers(files, several, transport):
    port = free_port()
    options = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.initial_reconnect_backoff_ms", 10),
        # Workers of a busy machine begin to listen some 100 ms apart; those who come sooner all come to the first.
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]
    with contextlib.ExitStack() as opened:
        waiting = [
            stubs.RateLimiterHealthStub(
                opened.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}", options))
            ).GetHealthStatus.future(Empty(), timeout=START_S, wait_for_ready=True)
            for _ in range(WAITING_CALLERS)
        ]
        own = ("--listen", f"127.0.0.1:{port}", "--transport", transport)
        with files.serving(*several, *own):
            assert {call.result().node_id for call in waiting} == {"n/0", "n/1"}


def test_checks_in_json_reach_the_workers_through_their_parent_and_share_the_limit(files, several):
    sent = {"identifier": "u", "identifier_type": "user", "endpoint": "/scarce"}
    with files.serving(*several, *EXACT) as node, httpx.Client(timeout=START_S) as client:
        page = f"http://{node.http_address}"
        answers = [client.post(f"{page}/v1/check", json=sent) for _ in range(LIMIT + 2)]
        assert [answer.status_code for answer in answers] == [200] * LIMIT + [429] * 2
        assert answers[-1].json()["reason"] == "LIMIT_EXCEEDED"
        assert (
            answers[-1].headers["ratelimit"].startswith(f'"{answers[-1].json()["rule_id"]}";r=0;')
        )
        with connection(node) as channel:
            assert not check(channel, "/scarce")
        assert node.metric("rate_limiter_requests_allowed_total") == LIMIT
        wrong = client.post(f"{page}/ratelimiter.v1.RateLimiter/CheckRateLimit", json={"x": 1})
        assert (wrong.status_code, wrong.json()["code"]) == (400, "invalid_argument")
        assert client.get(f"{page}/openapi.json").json()["openapi"].startswith("3.1")


AS_CALLERS_SAY = ("--timestamps", "caller", *PATIENT)


def test_strict_workers_answer_the_conformance_vectors(files, several, capfd):
    with files.serving(*several, *AS_CALLERS_SAY, "--consistency", "strict") as node:
        assert main(["conformance", "--target", node.grpc_address]) == 0
    assert "cases as expected" in capfd.readouterr().out


def test_workers_answer_the_conformance_vectors(files, several, capfd):
    """A denied check on several limits may deny the next, until what it was charged has been given back.

    And where a check was denied, what a settle gives back arrives a moment later.
    """
    with files.serving(*several, *AS_CALLERS_SAY) as node:
        main(["conformance", "--json", "--target", node.grpc_address])
    cases = json.loads(capfd.readouterr().out)["cases"]
    assert {case["algorithm"] for case in cases if case["ok"] is not True} <= {"policies", "holds"}
    assert any(case["ok"] for case in cases if case["algorithm"] == "policies")


class Load(threading.Thread):
    """Checks through one new connection after another until told to stop; a worker that is killed takes calls along."""

    def __init__(self, node):
        super().__init__(daemon=True)
        self.allowed = 0
        self.lost = Counter()
        self._node = node
        self._enough = threading.Event()

    def run(self):
        while not self._enough.is_set():
            try:
                with connection(self._node) as channel:
                    for _ in range(20):
                        self.allowed += check(channel, "/plenty")
            except grpc.RpcError as error:
                self.lost[error.code()] += 1

    def stop(self):
        self._enough.set()
        self.join(START_S)


def test_a_worker_that_is_killed_under_load_is_replaced_and_no_counter_sinks(files, several):
    names = ["rate_limiter_requests_allowed_total", "rate_limiter_check_latency_seconds_count"]
    with files.serving(*several) as node:
        load = Load(node)
        load.start()
        killed = workers_of(node)["n/0"]
        seen = []

        def scrape():
            seen.append([node.metric(name) for name in names])

        until(lambda: scrape() or seen[-1][0] > 200, "both have counted")
        os.kill(killed, signal.SIGKILL)
        restarts = 'rate_limiter_worker_restarts_total{worker="0"}'
        until(lambda: scrape() or node.metric(restarts) == 1, "its end is seen")
        until(lambda: scrape() or node.metric("rate_limiter_workers") == 2, "it is back")
        until(lambda: workers_of(node).get("n/0", killed) != killed, "it is another process")
        back = load.allowed
        until(lambda: scrape() or load.allowed > back + 200, "both count again")
        load.stop()
        scrape()
        for column in zip(*seen, strict=True):
            assert list(column) == sorted(column)
        assert seen[-1][0] <= load.allowed + sum(load.lost.values())
        assert set(load.lost) <= {grpc.StatusCode.UNAVAILABLE}
        assert httpx.get(f"http://{node.http_address}/readyz").text == "ready\n"
        node.signal(signal.SIGTERM)
        status, _, log = node.ended()
    assert status == 0
    assert "worker 0: ended by signal 9" in log


def test_workers_whose_parent_is_killed_drain_by_themselves(files, several):
    with files.serving(*several) as node:
        pids = workers_of(node).values()
        node.signal(signal.SIGKILL)
        until(lambda: not any(map(runs, pids)), "the workers have ended")
        _, _, log = node.ended()
    assert log.count("the parent process is gone") == 2
    assert log.count('"drained"') == 2


def test_a_login_link_opens_one_session_also_after_its_worker_was_killed(files, several):
    with files.serving(*several, "--loopback-admin", "off", "--admin-token", "t") as node:
        link = f"http://{node.http_address}/login"
        code = {"code": Sessions("t", time.time).link_code(node.http_address)}
        assert httpx.get(link, params=code).headers["location"] == "/"
        os.kill(workers_of(node)["n/0"], signal.SIGKILL)
        answers = []
        until(
            lambda: (
                answers.append(httpx.get(link, params=code).status_code)
                or answers[-1] in {303, 401}
            ),
            "another worker answers",
        )
        assert answers[-1] == 401


def test_a_worker_that_is_told_to_end_drains_and_is_started_anew(files, several):
    with files.serving(*several) as node:
        pid = workers_of(node)["n/1"]
        os.kill(pid, signal.SIGTERM)
        until(lambda: workers_of(node).get("n/1", pid) != pid, "it is another process")
        until(lambda: node.metric("rate_limiter_workers") == 2, "it is back")
        node.signal(signal.SIGTERM)
        assert node.ended()[0] == 0


def test_a_service_manager_that_signals_every_process_gets_a_drain(files, several):
    with files.serving(*several) as node:
        pids = workers_of(node).values()
        for pid in (*pids, node.process.pid, *pids):
            with contextlib.suppress(ProcessLookupError):  # one may have drained already
                os.kill(pid, signal.SIGTERM)
        status, _, log = node.ended()
    assert status == 0
    assert log.count('"drained"') == 3


def test_a_worker_that_has_drained_is_not_killed_by_a_late_signal(files, several):
    with files.serving(*several) as node:
        pids = [*workers_of(node).values()]
        node.signal(signal.SIGSTOP)  # busy elsewhere: its own signals to the workers come late
        while any(map(still_signalled, pids)):  # a pause would miss the moment
            pass
        node.signal(signal.SIGTERM)
        node.signal(signal.SIGCONT)
        status, _, log = node.ended()
    assert status == 0
    assert "ended by signal" not in log
    assert log.count('"drained"') == 3


def still_signalled(pid):
    os.kill(pid, signal.SIGTERM)  # nobody has waited for it yet, so it is there also after its end
    return runs(pid)


def test_a_second_signal_ends_all_at_once(files, several):
    with files.serving(*several) as node:
        pids = workers_of(node).values()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)  # which cannot drain
        node.signal(signal.SIGTERM)
        until(
            lambda: "draining" in httpx.get(f"http://{node.http_address}/readyz").text,
            "it drains",
        )
        node.signal(signal.SIGTERM)
        assert node.ended()[0] == 128 + signal.SIGTERM
        until(lambda: not any(map(runs, pids)), "the workers have ended")


def test_the_port_is_refused_to_any_other_node(files, several, tmp_path):
    with files.serving(*several) as node:
        mine = ["--listen", node.grpc_address, "--state-dir", str(tmp_path / "other")]
        for workers in ("1", "2"):
            status, error = files.refused(*several, *mine, "--workers", workers)
            assert status == 1
            assert one_line(error)
            assert "LISTEN: cannot listen on" in error


def test_a_worker_that_cannot_start_is_one_line_and_status_1(files, several, tmp_path):
    (tmp_path / "no.pem").write_text("no certificate")
    pem = str(tmp_path / "no.pem")
    status, error = files.refused(*several, "--tls-cert", pem, "--tls-key", pem)
    assert status == 1
    assert one_line(error)
    assert "TLS_" in error


def test_many_workers_that_start_at_once_make_one_rule_book(files, several):
    with files.serving(*several, "--workers", "6") as node:
        assert len(workers_of(node)) == 6
        assert node.metric("rate_limiter_workers") == 6
        assert node.metric("rate_limiter_rules_revision") == 2
        node.signal(signal.SIGTERM)
        assert node.ended()[0] == 0


def statuses(node, ca, name):
    """What a token is answered by both workers; without a name, what a check without a token is answered."""
    found = {}
    while len(found) < 2:  # the kernel chooses
        credentials = grpc.ssl_channel_credentials(ca.cert_pem.bytes())
        options = [("grpc.use_local_subchannel_pool", 1)]
        with grpc.secure_channel(node.grpc_address, credentials, options) as channel:
            ask = partial(stubs.RateLimiterHealthStub(channel).GetHealthStatus, Empty())
            worker = ask(timeout=START_S, metadata=bearer("the-admin-token")).node_id
            try:
                if name:
                    ask(timeout=START_S, metadata=bearer(token_of(name)))
                else:
                    check(channel, "/ample")
                found[worker] = grpc.StatusCode.OK
            except grpc.RpcError as error:
                found[worker] = error.code()
    return set(found.values())


def bearer(token):
    return [("authorization", f"Bearer {token}")]


def test_workers_share_tokens_users_and_tls_and_take_a_changed_file(files, several, tmp_path):
    """What each process reads for itself, and what the parent passes on."""
    ca = trustme.CA()

    def issue(year):
        expires = datetime(year, 1, 1, tzinfo=UTC)
        certificate = ca.issue_cert("127.0.0.1", "localhost", not_after=expires)
        certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
        certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
        return f'_expiry_timestamp_seconds{{setting="TLS_CERT"}} {floatToGoString(expires.timestamp())}'

    expiry = issue(2040)
    ca.cert_pem.write_to_path(tmp_path / "ca.pem")
    tokens = tmp_path / "tokens.json"
    ann = {"name": "ann@example.com", "role": "admin"}
    write(tokens, entry("alice"), entry("shop", "check"), ann)
    settings = {
        "--tokens-file": tokens, "--user-header": "X-Forwarded-Email", "--trusted-proxies": "127.0.0.1",
        "--tls-cert": tmp_path / "cert.pem", "--tls-key": tmp_path / "key.pem", "--http-tls": "on",
        "--loopback-admin": "off", "--admin-token": "the-admin-token",
    }  # fmt: skip
    trusting = ssl.create_default_context(cadata=ca.cert_pem.bytes().decode())
    page = {"Accept": "text/html"}
    with (
        files.serving(*several, *(str(one) for pair in settings.items() for one in pair)) as node,
        httpx.Client(
            base_url=f"https://{node.http_address}", verify=trusting, headers=page
        ) as http,
    ):
        status_at_each = partial(statuses, node, ca)
        assert http.get("/readyz").status_code == 200
        assert "rate_limiter_workers 2" in http.get("/metrics").text
        assert expiry in http.get("/metrics").text
        renewed = issue(2050)
        until(lambda: renewed in http.get("/metrics").text, "the renewed certificate")
        assert status_at_each("alice") == {grpc.StatusCode.OK}
        assert status_at_each("bob") == {grpc.StatusCode.UNAUTHENTICATED}
        assert http.get("/rules").status_code == 303
        form = http.get("/login")
        assert "Secure" in form.headers["set-cookie"]
        assert http.get("/rules", headers={"X-Forwarded-Email": ann["name"]}).status_code == 200
        assert http.get("/rules", headers={"X-Forwarded-Email": "alice"}).status_code == 403

        write(tokens, entry("bob"))
        until(lambda: status_at_each("bob") == {grpc.StatusCode.OK}, "the changed file")
        assert status_at_each("alice") == {grpc.StatusCode.UNAUTHENTICATED}
        assert http.get("/rules", headers={"X-Forwarded-Email": ann["name"]}).status_code == 403

        tokens.write_text("{")
        worker = workers_of(node)["n/0"]
        os.kill(worker, signal.SIGKILL)
        until(lambda: workers_of(node).get("n/0") not in {None, worker}, "another worker")
        assert http.get("/readyz").status_code == 200, "the other one has the last good tokens"
        write(tokens, entry("bob"))
        assert status_at_each("bob") == {grpc.StatusCode.OK}, "both, once the file is mended"
        assert status_at_each("") == {grpc.StatusCode.UNAUTHENTICATED}, "the shop's entry is gone"
        node.signal(signal.SIGTERM)
        _, _, log = node.ended()
    assert "TOKENS_FILE" in log
    for secret in (token_of("bob"), digest_of(token_of("bob")), "the-admin-token"):
        assert secret not in log
