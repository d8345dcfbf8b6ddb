"""What deploys nodes, as far as it runs without an engine: the commands of the Dockerfile, the unit of systemd."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.dockerfile import sent_to_the_builder, stages
from tests.deploy.monitoring import ROOT
from tests.system.process import COMMAND, NOTHING_COMPILED, START_S, Files

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

UNIT = ROOT / "deploy/systemd/ratelimitd.service"
WORST_EXPOSURE = 20
"""Tenths, of 100, by the count of systemd-analyze; a unit without any hardening has 96."""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """What the build stage makes: its instructions, carried out in a directory instead of in a container."""
    root = tmp_path_factory.mktemp("image")
    source = root / "src"
    source.mkdir()
    for instruction in stages()[0]:
        if instruction.name == "COPY":
            *names, target = instruction.words
            for name in names:
                _copy(ROOT / name, source / target)
        elif instruction.name == "RUN":
            command = instruction.text.replace("/opt/", f"{root}/opt/")
            command = command.replace("python -m", f"{sys.executable} -m")
            ended = subprocess.run(
                ["sh", "-c", command],
                cwd=source,
                env={**os.environ, **NOTHING_COMPILED},
                capture_output=True,
                text=True,
                check=False,
            )
            assert ended.returncode == 0, ended.stdout + ended.stderr
    return root / "opt/ratelimitd/bin"


def _copy(source, target):
    if source.is_file():
        target.mkdir(exist_ok=True)
        shutil.copy(source, target)
        return
    shutil.copytree(
        source,
        target,
        ignore=lambda directory, names: {
            name
            for name in names
            if not sent_to_the_builder((Path(directory) / name).relative_to(ROOT))
        },
    )


def test_what_the_image_holds_serves_and_is_found_healthy(built, tmp_path):
    [check] = [one for one in stages()[1] if one.name == "HEALTHCHECK"]
    name, *arguments = json.loads(check.text.split(" CMD ", 1)[1])
    with Files(tmp_path).serving(command=[str(built / "ratelimitd")]) as node:
        node.create_rule("/a", 1)
        assert [node.check("/a").allowed for _ in range(2)] == [True, False]
        checked = subprocess.run(
            [built / name, *arguments],
            env={**os.environ, "RATELIMITD_TARGET": node.grpc_address},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (checked.returncode, checked.stdout) == (0, "SERVING\n"), checked.stderr
        node.process.terminate()
        assert node.ended()[0] == 0


def test_the_image_holds_our_code_and_neither_pip_nor_what_only_tests_need(built):
    code = "import importlib.util as u; print([n for n in %r if u.find_spec(n)])"
    names = ["ratelimitd", "ratelimitd_client", "pip", "setuptools", "pytest"]
    told = subprocess.run(
        [built / "python", "-c", code % names], capture_output=True, text=True, check=True
    )
    assert told.stdout == "['ratelimitd', 'ratelimitd_client']\n"


def test_the_image_holds_every_file_of_ours_that_is_no_code(built):
    code = "import pathlib, ratelimitd; print(pathlib.Path(ratelimitd.__file__).parent)"
    told = subprocess.run([built / "python", "-c", code], capture_output=True, check=True)
    installed = Path(told.stdout.decode().strip())
    source = ROOT / "src/ratelimitd"
    files = {file.relative_to(source) for file in source.rglob("*") if file.is_file()}
    data = {file for file in files if file.suffix != ".py" and "__pycache__" not in file.parts}
    assert data
    assert not {file for file in data if not (installed / file).is_file()}


@pytest.fixture
def unit(tmp_path):
    """The unit with the command where it is here."""
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/ratelimitd/bin/ratelimitd", COMMAND[0]))
    return copy


def test_systemd_takes_the_unit(unit):
    assert _systemd_analyze("verify", str(unit)) == ""


def test_systemd_finds_little_that_the_node_could_harm(unit):
    _systemd_analyze("security", "--offline=true", f"--threshold={WORST_EXPOSURE}", str(unit))


def _systemd_analyze(*arguments):
    program = shutil.which("systemd-analyze")
    assert program, (
        "no systemd-analyze: run the tests by `make test-system`, which installs systemd"
    )
    ended = subprocess.run(
        [program, "--no-pager", *arguments],
        timeout=START_S,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stderr
