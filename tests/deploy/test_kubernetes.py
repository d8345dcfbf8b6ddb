"""The Kubernetes manifests, which are those of the chart with its defaults: valid ones, which fit together."""

import json

import kubernetes_validate
import pytest
import yaml

from ratelimitd.errors import SettingsError
from tests.deploy.monitoring import ROOT
from tests.deploy.settings import settings_with

DIRECTORY = ROOT / "deploy/kubernetes"
KUSTOMIZATION = yaml.safe_load((DIRECTORY / "kustomization.yaml").read_text(encoding="utf-8"))
APPLIED_BY_HAND = {"secret.example.yaml", "database-upgrade.yaml"}
NEWEST = int(kubernetes_validate.latest_version().split(".")[1])
RELEASES = ("1.29", *(f"1.{NEWEST - older}" for older in (2, 1, 0)))
"""The oldest that may be met, and the last three."""

RESOURCES = {
    (file.name, resource["kind"], resource["metadata"]["name"]): resource
    for file in sorted(DIRECTORY.glob("*.yaml"))
    if file.name != "kustomization.yaml"
    for resource in yaml.safe_load_all(file.read_text(encoding="utf-8"))
}


def one(kind, name="ratelimitd"):
    [found] = [value for key, value in RESOURCES.items() if key[1:] == (kind, name)]
    return found


DEPLOYMENT = one("Deployment")["spec"]
NODE = DEPLOYMENT["template"]["spec"]
[CONTAINER] = NODE["containers"]
UPGRADE = one("Job", "ratelimitd-database-upgrade")["spec"]["template"]
LABELS = DEPLOYMENT["template"]["metadata"]["labels"]


def variables(container):
    return {entry["name"]: entry.get("value", "") for entry in container["env"]}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("resource", RESOURCES, ids="-".join)
def test_a_manifest_is_one(resource, release):
    kubernetes_validate.validate(RESOURCES[resource], release, strict=True)


def test_a_misspelt_field_would_be_found():
    wrong = json.loads(json.dumps(one("Deployment")).replace("livenessProbe", "liveProbe"))
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, RELEASES[-1], strict=True)


def test_the_kustomization_names_every_file_but_those_for_later():
    files = {key[0] for key in RESOURCES}
    assert {*KUSTOMIZATION["resources"]} == files - APPLIED_BY_HAND


def test_everything_that_selects_nodes_selects_them_and_not_the_upgrade():
    selectors = [
        DEPLOYMENT["selector"]["matchLabels"],
        one("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        *(one("Service", name)["spec"]["selector"] for name in ("ratelimitd", "ratelimitd-nodes")),
    ]
    for selector in selectors:
        assert selector.items() <= LABELS.items()
        assert not selector.items() <= UPGRADE["metadata"]["labels"].items()


def test_the_network_policy_holds_for_the_nodes_and_for_the_upgrade():
    policy = one("NetworkPolicy")["spec"]
    selector = policy["podSelector"]["matchLabels"].items()
    assert selector <= LABELS.items()
    assert selector <= UPGRADE["metadata"]["labels"].items()
    let_in = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
    assert let_in == {port["name"] for port in CONTAINER["ports"]}


def test_the_autoscaler_scales_the_deployment_and_nobody_else_does():
    target = one("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", "ratelimitd")
    assert "replicas" not in DEPLOYMENT


def test_one_service_has_an_address_and_the_other_has_those_of_the_nodes():
    assert "clusterIP" not in one("Service")["spec"]
    assert one("Service", "ratelimitd-nodes")["spec"]["clusterIP"] == "None"


@pytest.mark.parametrize("pod", [NODE, UPGRADE["spec"]], ids=["node", "upgrade"])
def test_a_pod_may_do_nothing_that_it_need_not(pod):
    """The restricted standard, which the namespace enforces, and more."""
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    [container] = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.parametrize("pod", [NODE, UPGRADE["spec"]], ids=["node", "upgrade"])
def test_what_a_pod_is_told_are_settings_and_the_secrets_that_the_example_has(pod, tmp_path):
    secret = one("Secret")["stringData"] | {"admin-token": "a-token"}
    for name, text in secret.items():
        (tmp_path / name).write_text(text)
    [container] = pod["containers"]
    told = variables(container)
    [mount] = [mount for mount in container["volumeMounts"] if mount["name"] == "secrets"]
    settings = settings_with(told, secrets=mount["mountPath"], instead=tmp_path)
    assert settings.database_url.startswith("postgresql://")
    if pod is NODE:
        assert settings.redis_url.startswith("rediss://")
        read = {value.rsplit("/", 1)[1] for name, value in told.items() if name.endswith("_FILE")}
        directory, _, authority = settings.database_url.partition("sslrootcert=")[2].rpartition("/")
        assert directory == mount["mountPath"]
        assert {*read, authority} == secret.keys()


def test_the_admin_token_of_the_example_is_refused():
    example = one("Secret")["stringData"]["admin-token"]
    with pytest.raises(SettingsError, match=r"^RATELIMITD_ADMIN_TOKEN must be"):
        settings_with({"RATELIMITD_ADMIN_TOKEN": example})


def test_probes_ask_for_what_they_mean():
    paths = {
        name: probe["httpGet"]["path"]
        for name, probe in CONTAINER.items()
        if name.endswith("Probe")
    }
    assert paths == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }


def test_a_node_has_the_time_to_drain():
    wait_s = int(CONTAINER["lifecycle"]["preStop"]["exec"]["command"][1])
    settings = settings_with({})
    assert NODE["terminationGracePeriodSeconds"] > wait_s + settings.drain_s + 2
