"""Alert rules and dashboard with a real Prometheus: by promtool, and on real nodes."""

import contextlib
import itertools
import re
import subprocess
import threading

import grpc
import pytest

from tests.deploy.monitoring import ALERT_TESTS, ALERTS, ROOT, alerts, dashboard_queries, metrics_in
from tests.servers import Valkey, until
from tests.system.process import PATIENT, START_S, Files
from tests.system.programs import Certificates
from tests.system.prometheus import Prometheus, program

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]


def promtool(*arguments):
    return subprocess.run(
        [program("promtool"), *arguments], capture_output=True, text=True, check=False
    )


def test_prometheus_takes_the_alert_rules_and_the_example_of_its_configuration():
    for kind, file in (("rules", ALERTS), ("config", ROOT / "deploy/prometheus/prometheus.yml")):
        checked = promtool("check", kind, str(file))
        assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("name", alerts())
def test_an_alert_fires_when_it_should_and_only_then(name):
    tried = promtool("test", "rules", str(ALERT_TESTS / f"{name}.yml"))
    assert tried.returncode == 0, tried.stdout + tried.stderr


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("monitored")


@pytest.fixture(scope="module")
def valkey(directory):
    with Valkey(directory / "valkey") as server:
        yield server


@pytest.fixture(scope="module")
def nodes(directory, valkey):
    """Two of a cluster, the second with workers, and one by itself: each has metrics that the others have not."""
    book = f"sqlite:///{directory / 'shared.db'}"
    shared = [
        *("--redis-url", valkey.url, "--database-url", book),
        # A busy machine makes nothing late, and the breaker tries again soon.
        *(*PATIENT, "--breaker-recovery-s", "1"),
    ]
    arguments = {
        "one": shared,
        "crew": [*shared, "--workers", "2"],
        "alone": Certificates(directory).arguments,
    }
    with contextlib.ExitStack() as stack:
        started = {}
        for name, own in arguments.items():
            (directory / name).mkdir()
            started[name] = stack.enter_context(Files(directory / name).serving(*own))
        started["one"].create_rule("/scarce", 1)
        yield started


@pytest.fixture(scope="module")
def prometheus(directory, nodes):
    targets = [node.http_address for node in nodes.values()]
    with Prometheus(directory / "prometheus", targets) as server:
        until(lambda: len(server.query("up == 1")) == len(nodes), "the nodes are scraped")
        yield server


GRAFANA = {"$job": "ratelimitd", "$namespace": ".*", "$instance": ".*", "$__rate_interval": "5s"}
NAMED = set().union(
    *(metrics_in(rule["expr"]) for rule in alerts().values()),
    *(metrics_in(query) for query in dashboard_queries()),
)


def test_prometheus_knows_every_metric_that_is_named_before_anything_has_happened(prometheus):
    """Also those without a series until then, by their TYPE, where OpenMetrics has counters without their suffix."""
    assert prometheus.ask("metadata").keys() >= {name.removesuffix("_total") for name in NAMED}


def test_every_metric_that_is_named_has_series_once_everything_has_happened(nodes, prometheus):
    node = nodes["one"]
    assert [node.check("/scarce").allowed for _ in range(2)] == [True, False]
    with pytest.raises(grpc.RpcError, match="UNIMPLEMENTED"):
        node.channel.unary_unary("/ratelimiter.v1.RateLimiter/Nothing")(b"", timeout=START_S)

    def missing():
        return {name for name in NAMED if not prometheus.query(_series_of(name))}

    until(lambda: not missing(), "every metric has series")


def _series_of(metric):
    """One of its series: a histogram has none of its own name."""
    return f'{{__name__=~"{metric}(_count)?"}}'


def test_prometheus_answers_all_that_the_dashboard_asks(prometheus):
    for query in dashboard_queries():
        prometheus.query(_as_sent(query))  # an error would end the test


def _as_sent(query):
    """A query as Grafana sends it: with the values of its variables, and of labels the series that have them."""
    for variable, value in GRAFANA.items():
        query = query.replace(variable, value)
    assert "$" not in query
    variable = re.fullmatch(r"label_values\((.+), \w+\)", query)
    return variable[1] if variable else query


class Load(threading.Thread):
    """Asks a node about one user after another, so that each is read from the shared state."""

    def __init__(self, node):
        super().__init__(daemon=True)
        self._node = node
        self._done = threading.Event()

    def run(self):
        for number in itertools.count():
            self._node.check("/scarce", f"u{number}")
            if self._done.wait(0.005):
                return

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._done.set()
        self.join(START_S)


def test_the_alerts_fire_when_the_shared_state_is_killed_and_end_when_it_is_back(
    valkey, nodes, prometheus
):
    about_an_outage = {"RateLimiterFailOpen", "RateLimiterRedisDown"}
    with Load(nodes["one"]):
        until(lambda: prometheus.query("rate_limiter_active_buckets > 10"), "there is load")
        until(lambda: not prometheus.firing() & about_an_outage, "neither fires")
        valkey.kill()
        until(lambda: prometheus.firing() >= about_an_outage, "both alerts fire")
        valkey.start()
        until(lambda: not prometheus.firing() & about_an_outage, "both have ended")
