"""What an application gets with the client: gRPC, the messages that it needs, and nothing else."""

import os
import shutil
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

CLIENT = Path(__file__).resolve().parents[2] / "clients" / "python"

LOADED = """
import sys
import {modules}
print(*{{name.partition(".")[0] for name in sys.modules}} - set(sys.stdlib_module_names))
"""

USED = """
import asyncio, importlib, pkgutil, sys
import ratelimitd_client, ratelimiter
for package in (ratelimitd_client, ratelimiter):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            print(module.name, error.name)

from ratelimitd_client import AsyncRateLimiterClient, RateLimiterClient
address = sys.argv[1]

async def ask():
    async with AsyncRateLimiterClient(address, timeout_s=30) as limiter:
        return [(await limiter.check("alone", "user", "/five")).allowed for _ in range(3)]

with RateLimiterClient(address, timeout_s=30) as limiter:
    allowed = [limiter.check("alone", "user", "/five").allowed for _ in range(3)]
assert allowed + asyncio.run(ask()) == [True] * 5 + [False]
"""

REQUIRED = {"googleapis-common-protos", "grpcio", "protobuf"}

OPTIONAL = {"aiohttp", "asgiref", "flask", "opentelemetry", "prometheus_client"}
"""What each middleware and observer imports first that the distribution does not require; asgiref is Django's."""


def loaded_with(modules):
    code = LOADED.format(modules=modules)
    return set(subprocess.check_output([sys.executable, "-c", code], text=True).split())


def test_it_loads_nothing_but_grpcio_and_protobuf():
    # Not the other way round: grpcio itself takes up packages of its own where they are installed.
    ours = loaded_with(
        "ratelimitd_client, ratelimitd_client.testing, ratelimitd_client.middleware, "
        "ratelimitd_client.middleware.asgi, ratelimitd_client.middleware.wsgi"
    )
    assert ours - loaded_with("grpc, google.protobuf") == {
        "ratelimitd_client",
        "ratelimitd_wire",
        "ratelimiter",
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The interpreter of an environment in which the client was installed, and what it asks for."""
    tmp_path = tmp_path_factory.mktemp("alone")
    # A build leaves its files beside the sources, so it is given a copy of them.
    sources = tmp_path / "sources"
    shutil.copytree(CLIENT, sources, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    build = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index")
    pip(sys.executable, *build, "--wheel-dir", str(tmp_path), str(sources))
    [wheel] = tmp_path.glob("*.whl")

    constraints = tmp_path / "constraints.txt"
    required = (*REQUIRED, "typing-extensions")
    pins = [f"{name}=={version(name)}\n" for name in required]
    constraints.write_text("".join(pins))
    venv.create(tmp_path / "venv", with_pip=True)
    python = str(tmp_path / "venv" / "bin" / "python")
    pip(python, "install", "--quiet", "--constraint", str(constraints), str(wheel))
    return python


def pip(python, *arguments):
    command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@pytest.mark.system
@pytest.mark.timeout(300)
def test_installed_alone_it_is_whole_and_asks_a_real_node(alone, real_node):
    names = {line.split("==")[0].partition(" @ ")[0] for line in pip(alone, "freeze").splitlines()}
    assert names - {"typing_extensions"} == REQUIRED | {"ratelimitd-client"}
    assert "No broken requirements" in pip(alone, "check")
    # -I: nothing of the checkout, which is where the tests run, is found.
    command = [alone, "-I", "-c", USED, real_node.grpc_address]
    used = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert used.returncode == 0, used.stderr
    missing = dict(line.split() for line in used.stdout.splitlines())
    assert {name.partition(".")[0] for name in missing.values()} == OPTIONAL
    optional = ("ratelimitd_client.middleware.", "ratelimitd_client.observers.")
    assert all(module.startswith(optional) for module in missing)


@pytest.mark.system
@pytest.mark.timeout(300)
def test_the_type_of_everything_public_is_known_to_whoever_installs_it(alone, tmp_path):
    pyright = str(Path(sys.executable).with_name("basedpyright"))
    command = [pyright, "--verifytypes", "ratelimitd_client", "--ignoreexternal"]
    # With this option it finds the interpreter by PATH alone.
    path = f"{Path(alone).parent}{os.pathsep}{os.environ['PATH']}"
    told = subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PATH": path},
        check=False,
        capture_output=True,
        text=True,
    )
    assert told.returncode == 0, told.stdout
    assert "Type completeness score: 100%" in told.stdout
    assert "ratelimitd_client.middleware.asgi\n" in told.stdout
