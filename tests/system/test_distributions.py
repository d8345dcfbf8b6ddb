"""What `make dist` builds: the same bytes again, wheels that serve with every extra, and a list of materials."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import venv
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.deploy.monitoring import ROOT
from tests.servers import free_port
from tests.system.process import NOTHING_COMPILED, START_S, Files, running
from tests.system.test_dev_cluster import dev_cluster
from tests.trace_collector import collector

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

EXTRAS = {"otel", "workers", "dev-cluster"}
PIN = re.compile(r"^([\w.-]+)==([^\s;]+)", re.MULTILINE)
HASH = re.compile(r"--hash=sha256:(\w+)")


def dist(directory, *, umask):
    command = [sys.executable, str(ROOT / "tools/dist.py"), str(directory)]
    environ = {**os.environ, "TZ": "Pacific/Auckland" if umask else "UTC"}
    subprocess.run(command, env=environ, umask=umask, check=True, capture_output=True)
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The files of a first build by their paths."""
    directory = tmp_path_factory.mktemp("dist")
    dist(directory, umask=0o022)
    return directory


@pytest.fixture(scope="module")
def installed(built):
    """Where a clean environment has its commands: both wheels, every extra, and what they require."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        directory.chmod(0o755)  # PostgreSQL does not run as root, and has to find its programs
        install(built, directory)
        yield directory / "venv/bin"


def install(built, directory):
    pins = PIN.findall((ROOT / "requirements/dev.txt").read_text(encoding="utf-8"))
    pins += PIN.findall((ROOT / "requirements/base.txt").read_text(encoding="utf-8"))
    constraints = directory / "constraints.txt"
    constraints.write_text("".join(f"{name}=={pinned}\n" for name, pinned in pins))
    venv.create(directory / "venv", with_pip=True)
    [server], [client] = built.glob("ratelimitd-*.whl"), built.glob("ratelimitd_client-*.whl")
    pip(directory / "venv/bin", "install", "--constraint", str(constraints), str(client),
        f"{server}[{','.join(sorted(EXTRAS))}]")  # fmt: skip


def pip(commands, *arguments):
    command = [commands / "python", "-m", "pip", "--disable-pip-version-check", *arguments]
    environ = {**os.environ, **NOTHING_COMPILED}
    ended = subprocess.run(command, env=environ, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_a_second_build_gives_the_same_bytes(built, tmp_path):
    first = {file.name: file.read_bytes() for file in built.iterdir()}
    assert dist(tmp_path, umask=0o077) == first
    kinds = {name.replace(version("ratelimitd"), "*") for name in first}
    assert kinds == {
        "ratelimitd-*.tar.gz",
        "ratelimitd-*-py3-none-any.whl",
        "ratelimitd-*.cdx.json",
        "ratelimitd_client-*.tar.gz",
        "ratelimitd_client-*-py3-none-any.whl",
    }


def test_the_materials_are_the_pins_with_their_hashes(built):
    [document] = built.glob("*.cdx.json")
    text = document.read_text(encoding="utf-8")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    told = {
        (one["name"], one["version"]): {
            each["content"] for link in one["externalReferences"] for each in link["hashes"]
        }
        for one in json.loads(text)["components"]
    }
    pins = "".join(
        (ROOT / "requirements" / name).read_text(encoding="utf-8")
        for name in ("base.txt", "workers.txt")
    )
    blocks = re.split(r"^(?=\w)", pins, flags=re.MULTILINE)
    asked = {PIN.match(block).groups(): {*HASH.findall(block)} for block in blocks if block}
    assert told == asked
    component = json.loads(text)["metadata"]["component"]
    assert (component["name"], component["version"]) == ("ratelimitd", version("ratelimitd"))


def test_the_extras_are_those_that_are_tried_here(installed):
    code = "from importlib.metadata import metadata as m; print(*m('ratelimitd').get_all('Provides-Extra'))"
    told = subprocess.run(
        [installed / "python", "-I", "-c", code], check=True, capture_output=True, text=True
    )
    assert {*told.stdout.split()} == EXTRAS
    assert "No broken requirements" in pip(installed, "check")


def test_it_serves_with_workers_and_traces(installed, tmp_path):
    with collector() as receiver:
        options = ("--workers", "2", "--otel-endpoint", receiver.url)
        with Files(tmp_path).serving(*options, command=[installed / "ratelimitd"]) as node:
            node.create_rule("/a", 1)
            assert [node.check("/a").allowed for _ in range(2)] == [True, False]
            receiver.wait_for(1)
            node.process.terminate()
            assert node.ended()[0] == 0


ROW = re.compile(r"greedy +(\d+) +(\d+) +(\d+) in 1 s")


def reading(shown, limit):
    """What the greedy caller got, from the first reading in which that is the limit to the end of the next one."""
    for _ in range(2):
        shown.lines.clear()
        shown.until(f"{limit} in 1 s  ")
        shown.until("greedy")
    return [int(number) for number in ROW.match(shown.lines[-1]).groups()]


def test_its_demo_shows_a_limit_and_its_edit_act(installed):
    command = installed / "ratelimitd"
    grpc_port = free_port(adjacent=3)
    ports = ("--grpc-port", grpc_port, "--http-port", grpc_port + 1, "--api-port", grpc_port + 2)
    with running([command, "demo", "--no-browser", *ports]) as shown:
        shown.until("stops everything")
        [update] = [line for line in shown.lines if "rules update" in line]
        [page] = re.findall(r"http://\S+/rules", "".join(shown.lines))
        assert "/orders" in httpx.get(page, timeout=START_S).text
        allowed, denied, _ = reading(shown, 5)
        assert 0 < allowed <= 6
        assert denied > 0
        subprocess.run(
            [command, *update.split()[2:]], check=True, capture_output=True, timeout=START_S
        )
        more, _, _ = reading(shown, 15)
        assert more > allowed
        shown.process.send_signal(signal.SIGINT)
        out, err = shown.process.communicate(timeout=START_S)
        assert shown.process.returncode == 0
        assert out.endswith("stopping\n")
        assert err == ""


def test_it_starts_a_cluster_with_its_servers(installed):
    with dev_cluster([installed / "ratelimitd"]) as shown:
        assert shown.nodes.keys() == {"n1", "n2", "n3"}
