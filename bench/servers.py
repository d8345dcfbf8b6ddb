"""The servers under load, each a process on a separate core, and their CPU time.

The load uses the other core; on a machine with one core the figures cover both.
"""

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import trustme

SERVER_CORE, LOAD_CORE = 0, 1
LIMIT, WINDOW_SECONDS = 1_000_000_000, 86_400
"""High enough that no check of a run is denied."""
ENDPOINT = "/api/orders"
SEVERAL_ENDPOINT = "/api/report"
"""Its rule has three limits, which deny no check either at the rate of one core."""
RULES = f"""
rules:
  - {{endpoint: {ENDPOINT}, identifier_type: user, limit: {LIMIT}, window_seconds: {WINDOW_SECONDS},
      algorithm: token_bucket}}
  - endpoint: {SEVERAL_ENDPOINT}
    identifier_type: user
    limits:
      - {{name: short, limit: 2000000, window_seconds: 10, algorithm: token_bucket}}
      - {{name: middle, limit: 2000000, window_seconds: 20, algorithm: token_bucket}}
      - {{name: long, limit: 2000000, window_seconds: 30, algorithm: token_bucket}}
"""
FILE = b"Hello, world\n"
"""The content that nghttpd serves as ``/file``: 13 bytes, about the size of an answer to a check."""
START_SECONDS = 10.0


class Server(NamedTuple):
    """A running server. It uses TLS if it was started with a certificate."""

    port: int
    pid: int
    http_port: int = 0
    """HTTP port of a node that listens on one."""


class Missing(Exception):  # noqa: N818 - what is missing is no error of the program
    """A program that the benchmark needs is not installed."""

    def __init__(self, *, program: str, package: str) -> None:
        super().__init__(f"{program} is not installed: apt-get install {package}")


@contextlib.contextmanager
def load_core() -> Iterator[None]:
    """Keep this process and its children off the servers' core."""
    cores = os.sched_getaffinity(0)
    if len(cores) > 1:
        os.sched_setaffinity(0, {LOAD_CORE})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


@contextlib.contextmanager
def node(*options: str, tls: bool = False, core: int = SERVER_CORE) -> Iterator[Server]:
    """Run a ``ratelimitd`` with one rule, and its database and state in a temporary directory."""
    with tempfile.TemporaryDirectory() as directory:
        rules = Path(directory) / "rules.yaml"
        rules.write_text(RULES)
        command = [
            str(Path(sys.executable).with_name("ratelimitd")), "serve", "--listen", "127.0.0.1:0", "--http-listen", "",
            "--database-url", f"sqlite:///{directory}/rules.db", "--state-dir", f"{directory}/state",
            "--rules-file", str(rules), "--log-level", "error", *options,
        ]  # fmt: skip
        if tls:
            cert, key = _certificate(Path(directory))
            command += ["--tls-cert", str(cert), "--tls-key", str(key)]
        with _started(command, core=core) as process:
            assert process.stdout
            line = process.stdout.readline()
            found = re.search(r"grpc=\S+:(\d+) http=(?:\S*:(\d+))?", line)
            assert found, line
            yield Server(int(found[1]), process.pid, int(found[2] or 0))


@contextlib.contextmanager
def echo() -> Iterator[Server]:
    """Run the bare grpc.aio server of :mod:`bench.echo`."""
    with _started([sys.executable, "-m", "bench.echo"]) as process:
        assert process.stdout
        yield Server(int(process.stdout.readline()), process.pid)


@contextlib.contextmanager
def uvicorn(app: str, **environment: str) -> Iterator[Server]:
    """Run an application, ``module:name``, on Uvicorn."""
    port = _free_port()
    command = [sys.executable, "-m", "uvicorn", app, "--port", str(port), "--log-level", "error"]
    with _started(command, environment=environment) as process:
        _wait_until_connectable(port)
        yield Server(port, process.pid)


@contextlib.contextmanager
def nghttpd() -> Iterator[Server]:
    """Run nghttpd with one thread, serving ``FILE`` in plaintext.

    Raises:
        Missing: it is not installed.
    """
    program = shutil.which("nghttpd")
    if program is None:
        raise Missing(program="nghttpd", package="nghttp2-server")
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "file").write_bytes(FILE)
        port = _free_port()
        command = [program, "--no-tls", "-a", "127.0.0.1", "-n", "1", "-d", directory, str(port)]
        with _started(command) as process:
            _wait_until_connectable(port)
            yield Server(port, process.pid)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and all its threads since its start, in steps of 10 ms (proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def _started(
    command: list[str], *, core: int = SERVER_CORE, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, **(environment or {})}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    # Before it starts threads, which inherit it.
    os.sched_setaffinity(process.pid, {core})
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _certificate(directory: Path) -> tuple[Path, Path]:
    issued = trustme.CA().issue_cert("127.0.0.1")
    cert, key = directory / "cert.pem", directory / "key.pem"
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())
    return cert, key


def _free_port() -> int:
    """Return a free port, for servers that cannot choose or report one."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _wait_until_connectable(port: int) -> None:
    """Wait until a port accepts connections, for servers that do not report readiness."""
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)
        else:
            return
