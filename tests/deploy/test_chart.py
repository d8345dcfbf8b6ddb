"""The Helm chart, rendered by Helm: valid with every value on and off, safe, and strict about what it is given."""

import json
import subprocess

import kubernetes_validate
import pytest
import yaml

from ratelimitd.settings.table import SETTINGS
from tests.deploy.monitoring import ROOT
from tests.deploy.settings import settings_with
from tests.deploy.test_kubernetes import RELEASES, variables
from tools.kubernetes_manifests import CHART, HELM, manifests, rendered

pytestmark = pytest.mark.system  # Helm is built by `make test-system`

SECRET = [each.name for each in SETTINGS if each.secret]
OF_THE_OPERATOR = {"ServiceMonitor"}
"""Kinds that Kubernetes has no schema of."""

EVERYTHING = {
    "image": {"repository": "registry.invalid/ratelimitd", "digest": f"sha256:{'0a' * 32}"},
    "imagePullSecrets": [{"name": "pull"}],
    "replicas": 5,
    "autoscaling": {"enabled": False},
    "settings": {
        "CACHE_ENTRIES": 2_000_000,
        "REFLECTION": False,
        "DRAIN_S": 60,
        "HTTP_TLS": True,
    },
    "secret": {"name": "of-ours", "keys": {"CHECK_TOKEN": "check", "KEY_SECRET": "key"}},
    "tls": {"secretName": "certificate", "clientCA": True},
    "podDisruptionBudget": {"maxUnavailable": "25%"},
    "serviceMonitor": {
        "enabled": True,
        "labels": {"release": "prometheus"},
        "tlsConfig": {"serverName": "ratelimitd.internal"},
    },
    "nodeSelector": {"kubernetes.io/arch": "amd64"},
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
    "affinity": {"podAntiAffinity": {}},
}
NOTHING = {
    "autoscaling": {"enabled": False},
    "settings": {"LOG_FORMAT": None},
    "databaseUpgrade": {"enabled": False},
    "resources": None,
    "podDisruptionBudget": {"enabled": False},
    "networkPolicy": {"enabled": False},
    "podAnnotations": None,
}
CLOSED = {"networkPolicy": dict.fromkeys(("callers", "http", "egress"), ())}
VALUES = {"defaults": {}, "everything": EVERYTHING, "nothing": NOTHING, "closed": CLOSED}


def render(values, tmp_path, release="ratelimitd"):
    file = tmp_path / "values.yaml"
    file.write_text(json.dumps(values))
    text = rendered(["--values", str(file)], release)
    resources = [each for each in yaml.safe_load_all(text) if each]
    return {(each["kind"], each["metadata"]["name"]): each for each in resources}


def pods_of(resources):
    return [
        resource["spec"]["template"]["spec"]
        for (kind, _), resource in resources.items()
        if kind in {"Deployment", "Job"}
    ]


def test_the_manifests_are_those_of_the_chart():
    for path, text in manifests().items():
        assert path.read_text(encoding="utf-8") == text, f"{path}: run `make manifests`"


def test_helm_has_no_complaint():
    subprocess.run([str(HELM), "lint", "--strict", str(CHART)], check=True, capture_output=True)


def test_the_chart_is_of_the_release():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    source = (ROOT / "src/ratelimitd/__init__.py").read_text(encoding="utf-8")
    assert f'__version__ = "{chart["version"]}"' in source
    assert chart["appVersion"] == chart["version"]


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_what_it_makes_is_valid(values, tmp_path):
    for (kind, _), resource in render(values, tmp_path).items():
        if kind not in OF_THE_OPERATOR:
            for release in RELEASES:
                kubernetes_validate.validate(resource, release, strict=True)


def test_what_is_off_is_not_made(tmp_path):
    kinds = {kind for kind, _ in render(NOTHING, tmp_path)}
    assert kinds == {"Deployment", "Service"}


def test_values_reach_the_nodes(tmp_path):
    resources = render(EVERYTHING, tmp_path)
    deployment = resources["Deployment", "ratelimitd"]["spec"]
    assert deployment["replicas"] == 5
    assert ("HorizontalPodAutoscaler", "ratelimitd") not in resources
    pod = deployment["template"]["spec"]
    [container] = pod["containers"]
    assert container["image"] == f"registry.invalid/ratelimitd@sha256:{'0a' * 32}"
    assert pod["imagePullSecrets"] == [{"name": "pull"}]
    volumes = {each["name"]: each.get("secret", {}).get("secretName") for each in pod["volumes"]}
    assert volumes == {"state": None, "secrets": "of-ours", "tls": "certificate"}
    budget = resources["PodDisruptionBudget", "ratelimitd"]["spec"]
    assert budget["maxUnavailable"] == "25%"


@pytest.mark.parametrize(
    ("setting", "scheme"),
    [({}, "HTTP"), ({"HTTP_TLS": "off"}, "HTTP"), ({"HTTP_TLS": "on"}, "HTTPS")],
)
def test_probes_speak_tls_where_the_http_side_does(setting, scheme, tmp_path):
    resources = render({"settings": setting, "tls": {"secretName": "certificate"}}, tmp_path)
    [container] = resources["Deployment", "ratelimitd"]["spec"]["template"]["spec"]["containers"]
    probes = ("startupProbe", "livenessProbe", "readinessProbe")
    assert {container[probe]["httpGet"]["scheme"] for probe in probes} == {scheme}


def test_a_node_understands_what_it_is_told_and_has_the_time_to_drain(tmp_path):
    keys = ("admin-token", "check", "database-url", "key", "redis-url")
    texts = ("a" * 32, "b" * 32, "postgresql://h/d", "c" * 32, "redis://h")
    for name, text in zip(keys, texts, strict=True):
        (tmp_path / name).write_text(text)
    [pod, _] = pods_of(render(EVERYTHING, tmp_path))
    [container] = pod["containers"]
    told = variables(container)
    settings = settings_with(told, secrets="/run/secrets/ratelimitd", instead=tmp_path)
    assert (settings.cache_entries, settings.reflection) == (2_000_000, False)
    assert (settings.redis_url, settings.check_token) == ("redis://h", "b" * 32)
    mounted = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    for file in (settings.tls_cert, settings.tls_key, settings.tls_client_ca):
        assert str(file.parent) == mounted["tls"]
    wait_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > wait_s + settings.drain_s + 2


def test_the_upgrade_runs_before_the_nodes_of_the_same_image(tmp_path):
    resources = render(EVERYTHING, tmp_path)
    job = resources["Job", "ratelimitd-database-upgrade"]
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install,pre-upgrade"
    assert len({pod["containers"][0]["image"] for pod in pods_of(resources)}) == 1


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_no_value_takes_the_protection_of_a_pod_away(values, tmp_path):
    for pod in pods_of(render(values, tmp_path)):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] == 10001
        [container] = pod["containers"]
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_an_empty_list_of_peers_lets_nobody_in(tmp_path):
    policy = render(CLOSED, tmp_path)["NetworkPolicy", "ratelimitd"]["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert not policy["ingress"]
    assert [rule["ports"][0]["port"] for rule in policy["egress"]] == [53]


def test_the_operator_scrapes_each_node_once_as_the_job_of_the_alerts(tmp_path):
    resources = render(EVERYTHING, tmp_path)
    monitor = resources["ServiceMonitor", "ratelimitd"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    [service] = [
        resource
        for (kind, _), resource in resources.items()
        if kind == "Service" and wanted <= resource["metadata"]["labels"].items()
    ]
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "ratelimitd"
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["path"] == "/metrics"
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == (
        "https",
        {"serverName": "ratelimitd.internal"},
    )
    [plain] = render({"serviceMonitor": {"enabled": True}}, tmp_path)[
        "ServiceMonitor", "ratelimitd"
    ]["spec"]["endpoints"]
    assert plain["scheme"] == "http"
    assert "tlsConfig" not in plain


@pytest.mark.parametrize(
    ("values", "scheme"),
    [
        ({}, None),
        ({"settings": {"HTTP_TLS": True}}, "https"),
        (
            {"settings": {"HTTP_TLS": True}, "podAnnotations": {"prometheus.io/scheme": "http"}},
            "http",
        ),
        ({"settings": {"HTTP_TLS": True}, "podAnnotations": {"prometheus.io/scrape": None}}, None),
    ],
    ids=str,
)
def test_annotations_say_how_pods_are_scraped(values, scheme, tmp_path):
    deployment = render(values, tmp_path)["Deployment", "ratelimitd"]["spec"]
    annotations = deployment["template"]["metadata"]["annotations"]
    assert annotations.get("prometheus.io/scheme") == scheme


def test_releases_in_one_namespace_share_no_name_and_no_pod(tmp_path):
    first, second = (render({}, tmp_path, release) for release in ("ratelimitd", "edge"))
    assert not first.keys() & second.keys()
    labels = second["Deployment", "edge-ratelimitd"]["spec"]["template"]["metadata"]["labels"]
    for name in ("ratelimitd", "ratelimitd-nodes"):
        assert not first["Service", name]["spec"]["selector"].items() <= labels.items()


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"replica": 3}, "'replica'"),
        ({"replicas": 0}, "/replicas"),
        ({"image": {"digest": "sha256:0"}}, "/image/digest"),
        ({"settings": {"cache_entries": 1}}, "'cache_entries'"),
        ({"settings": {"OTEL_SAMPLE_RATIO": 0.5}}, "/settings/OTEL_SAMPLE_RATIO"),
        ({"secret": {"keys": {"DATABASE_URL": None}}}, "'DATABASE_URL'"),
        ({"secret": {"keys": {"WORKERS": "workers"}}}, "'WORKERS'"),
        *(({"settings": {name: "x"}}, f"/settings/{name}'") for name in SECRET),
        *(({"settings": {f"{name}_FILE": "x"}}, f"/settings/{name}_FILE'") for name in SECRET),
    ],
    ids=str,
)
def test_a_value_that_makes_no_sense_is_refused_by_name(values, named, tmp_path):
    with pytest.raises(subprocess.CalledProcessError) as refused:
        render(values, tmp_path)
    assert named in refused.value.stderr


def test_every_secret_setting_may_be_one_of_the_secret(tmp_path):
    keys = dict.fromkeys(SECRET, "key")
    [pod, _] = pods_of(render({"secret": {"keys": keys}}, tmp_path))
    assert {f"RATELIMITD_{name}_FILE" for name in keys} <= variables(pod["containers"][0]).keys()
