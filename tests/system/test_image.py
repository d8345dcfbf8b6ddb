"""The image, built and run without an engine: not as root, without capabilities, on a read-only file system."""

import os
import shutil
import subprocess
import tempfile

import pytest

from tests.deploy.monitoring import ROOT
from tests.system.process import Files

pytestmark = [pytest.mark.long, pytest.mark.system, pytest.mark.timeout(600)]

NUMBER = 10001
"""User and group of the node."""
CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"
BASE = f"""
FROM scratch
ADD base.tar /
COPY ca-certificates.crt {CERTIFICATES}
ENV PIP_CERT={CERTIFICATES}
RUN ln -s /usr/bin/python3 /usr/local/bin/python
"""
"""Stands for the base image, which comes from a registry; pip trusts what this machine trusts."""
RESTRICTED = (
    *("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
    # The limits that podman would set by default may be above those of a machine that is itself a container.
    *("--ulimit", "nofile=4096:4096", "--ulimit", "nproc=4096:4096"),
    *("--network", "host", "--no-healthcheck"),
)


@pytest.fixture(scope="module")
def storage():
    """A directory for all that podman and buildah make, so that they leave the machine's own images alone."""
    with tempfile.TemporaryDirectory() as directory:
        yield directory


def run(*command):
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def podman(storage, tmp_path_factory):
    """Podman with an image ``ratelimitd``."""
    context = tmp_path_factory.mktemp("base")
    (context / "Dockerfile").write_text(BASE)
    shutil.copy(os.environ.get("PIP_CERT", CERTIFICATES), context / "ca-certificates.crt")
    with_python = "--include=python3,python3-venv,ca-certificates"
    run("mmdebstrap", "--quiet", "--variant=minbase", with_python, "bookworm", context / "base.tar")
    stored = ("--root", f"{storage}/root", "--runroot", f"{storage}/run")
    build = ("buildah", *stored, "build", "--isolation", "chroot")
    run(*build, "--tag", "base", context)
    (context / "base.tar").unlink()
    run(*build, "--network", "host", "--format", "docker", "--build-arg", "PYTHON_IMAGE=localhost/base",
        "--tag", "ratelimitd", "--file", ROOT / "deploy/docker/Dockerfile", ROOT)  # fmt: skip
    own = (*stored, "--tmpdir", f"{storage}/podman")
    return ("podman", *own, "--cgroup-manager", "cgroupfs", "--runtime", "runc")


def test_it_serves_without_root_without_capabilities_and_read_only(podman, tmp_path):
    os.chown(tmp_path, NUMBER, NUMBER)
    state = ("--volume", f"{tmp_path}:{tmp_path}")
    command = [*podman, "run", "--rm", "--name", "node", *RESTRICTED, *state, "ratelimitd"]

    def inside(*words):
        return run(*podman, "exec", "node", *words)

    with Files(tmp_path).serving(command=command) as node:
        node.create_rule("/a", 1)
        assert [node.check("/a").allowed for _ in range(2)] == [True, False]
        status = dict(
            line.split(":\t", 1)
            for line in inside("cat", "/proc/1/status").splitlines()
            if ":\t" in line
        )
        assert {*status["Uid"].split(), *status["Gid"].split()} == {str(NUMBER)}
        assert (int(status["CapEff"], 16), int(status["CapBnd"], 16)) == (0, 0)
        assert status["NoNewPrivs"] == "1"
        denied = "for d in / /etc /opt/ratelimitd; do touch $d/x 2>/dev/null && echo $d; done; true"
        assert inside("sh", "-c", denied) == ""
        inside("touch", "/var/lib/ratelimitd/x")
        target = f"RATELIMITD_TARGET={node.grpc_address}"
        health = run(*podman, "exec", "--env", target, "node", "ratelimitd", "health", "--ready")
        assert health == "SERVING\n"
        node.process.terminate()
        assert node.ended()[0] == 0


def test_it_is_the_command_line_too(podman):
    told = run(*podman, "run", "--rm", *RESTRICTED, "ratelimitd", "--version")
    assert told.startswith("ratelimitd ")
