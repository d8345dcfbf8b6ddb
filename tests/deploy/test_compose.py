"""The compose file: a valid one, of files that are there, whose secrets fit together."""

import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.monitoring import ROOT
from tests.deploy.settings import settings_with
from tests.servers import Valkey, until
from tests.system.process import PATIENT, Files

COMPOSE = ROOT / "deploy/compose/compose.yaml"
DIRECTORY = COMPOSE.parent
SERVICES = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
USER = re.compile(r"ratelimitd on >\S+ (.+)")


def schema_check(file):
    program = Path(sys.executable).with_name("check-jsonschema")
    return subprocess.run(
        [program, "--builtin-schema", "vendor.compose-spec", file],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def secrets(tmp_path_factory):
    made = tmp_path_factory.mktemp("compose") / "secrets"
    subprocess.run([DIRECTORY / "make-secrets.sh", made], check=True)
    return made


def test_it_is_a_compose_file(tmp_path):
    checked = schema_check(COMPOSE)
    assert checked.returncode == 0, checked.stdout
    wrong = tmp_path / "compose.yaml"
    wrong.write_text(COMPOSE.read_text(encoding="utf-8").replace("restart:", "restarts:"))
    assert schema_check(wrong).returncode == 1


def test_everything_that_is_mounted_or_built_is_there():
    for service in SERVICES.values():
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            assert not source.startswith(".") or (DIRECTORY / source).exists(), source
        if build := service.get("build"):
            assert (DIRECTORY / build["context"] / build["dockerfile"]).is_file()


@pytest.mark.parametrize("name", ["ratelimitd", "upgrade"])
def test_what_a_node_is_told_are_settings(name, secrets):
    settings = settings_with(SERVICES[name]["environment"], instead=secrets)
    assert settings.database_url.startswith("postgresql://ratelimitd:")
    assert settings.database_url.endswith("@postgres/ratelimitd")
    if name == "ratelimitd":
        assert settings.redis_url.endswith("@valkey:6379")
        assert settings.admin_token == (secrets / "admin_token").read_text()


def test_the_secrets_that_are_used_are_those_that_are_made(secrets):
    declared = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["secrets"]
    assert declared == {file.name: {"file": f"secrets/{file.name}"} for file in secrets.iterdir()}
    used = {name for service in SERVICES.values() for name in service.get("secrets", [])}
    assert used == declared.keys()


def test_secrets_that_are_there_stay(secrets):
    before = {file.name: file.read_text() for file in secrets.iterdir()}
    subprocess.run([DIRECTORY / "make-secrets.sh", secrets], check=True)
    assert {file.name: file.read_text() for file in secrets.iterdir()} == before
    assert (secrets / "postgres_password").read_text() in (secrets / "database_url").read_text()


def test_nobody_else_on_the_machine_reads_them_and_everybody_in_a_container_can(secrets):
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in secrets.iterdir()} == {0o644}


def test_the_user_of_the_nodes_has_the_permissions_that_the_documentation_names(secrets):
    documented = USER.findall((ROOT / "docs/cluster.md").read_text(encoding="utf-8"))[0]
    assert USER.findall((secrets / "valkey_users").read_text()) == [documented]


def test_a_node_with_these_secrets_has_a_shared_state(secrets, tmp_path):
    with Valkey(tmp_path / "valkey", "--aclfile", str(secrets / "valkey_users")) as valkey:
        url = (secrets / "redis_url").read_text().replace("valkey:6379", valkey.address)
        with Files(tmp_path).serving("--redis-url", url, *PATIENT) as node:
            until(lambda: node.metric("rate_limiter_cluster_nodes") == 1, "it is a member")
            assert node.metric("rate_limiter_shared_state_up") == 1
            assert node.metric("rate_limiter_redis_errors_total") == 0


def test_prometheus_asks_the_nodes_and_grafana_asks_prometheus():
    prometheus = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    [scrape] = prometheus["scrape_configs"]
    assert scrape["dns_sd_configs"][0]["names"] == ["ratelimitd"]
    assert "ratelimitd" in SERVICES
    [source] = yaml.safe_load((DIRECTORY / "grafana/datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in SERVICES
    [provider] = yaml.safe_load((DIRECTORY / "grafana/dashboards.yaml").read_text())["providers"]
    mounts = dict(mount.split(":")[:2] for mount in SERVICES["grafana"]["volumes"])
    assert mounts["../grafana"] == provider["options"]["path"]
    assert [file.name for file in Path(ROOT / "deploy/grafana").iterdir()] == ["ratelimitd.json"]
