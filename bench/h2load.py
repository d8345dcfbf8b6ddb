"""Load from h2load (C, package nghttp2-client), in the same way for nghttpd and a node.

It checks only the HTTP status, so the caller must verify by other means that a node made the checks.
"""

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from bench.replay import Measured
from bench.scripts import CHECK, SCENARIOS
from bench.servers import Server, cpu_seconds

CHECK_HEADERS = ("content-type: application/grpc", "te: trailers", "grpc-timeout: 5S")
WARM_UP_SECONDS = 1


def installed() -> bool:
    """Return whether h2load is installed."""
    return shutil.which("h2load") is not None


def h2load(
    server: Server, scenario: str, shape: tuple[int, int], *, seconds: int, tls: bool = False
) -> Measured:
    """Measure ``file`` or ``one-key`` of :data:`bench.scripts.SCENARIOS` by one thread of h2load.

    With one call at a time, the latency is the mean over calls; else it is calls in flight / rate.
    """
    with tempfile.TemporaryDirectory() as directory:
        command = _command(server, scenario, shape, tls=tls, directory=Path(directory))
        subprocess.run([*command, "-D", str(WARM_UP_SECONDS)], check=True, stdout=subprocess.PIPE)
        log = Path(directory) / "log"
        if shape == (1, 1):
            command.append(f"--log-file={log}")
        cpu = cpu_seconds(server.pid)
        done = subprocess.run(
            [*command, "-D", str(seconds)], check=True, stdout=subprocess.PIPE, text=True
        )
        cpu = cpu_seconds(server.pid) - cpu
        calls, rate = _counted(done.stdout)
        latency_us = _mean_us(log) if shape == (1, 1) else shape[0] * shape[1] * 1e6 / rate
    return Measured(calls=calls, rate=rate, latency_us=latency_us, cpu_us=cpu * 1e6 / calls)


def _command(
    server: Server, scenario: str, shape: tuple[int, int], *, tls: bool, directory: Path
) -> list[str]:
    command = ["h2load", "-t", "1", "-c", str(shape[0]), "-m", str(shape[1])]
    address = f"{'https' if tls else 'http'}://127.0.0.1:{server.port}"
    if scenario == "file":
        return [*command, f"{address}/file"]
    body = directory / "body"
    body.write_bytes(next(SCENARIOS[scenario].bodies()))
    for header in CHECK_HEADERS:
        command += ["-H", header]
    return [*command, "-d", str(body), address + CHECK.decode()]


def _counted(output: str) -> tuple[int, float]:
    """Return successful calls and calls per second; all calls must have succeeded."""
    done = re.search(r"(\d+) done, (\d+) succeeded, (\d+) failed, (\d+) errored", output)
    rate = re.search(r"finished in \S+, ([\d.]+) req/s", output)
    assert done, output
    assert rate, output
    assert int(done[2]) > 0, output
    assert (done[1], done[3], done[4]) == (done[2], "0", "0"), output
    return int(done[2]), float(rate[1])


def _mean_us(log: Path) -> float:
    """Return the mean latency. Each line holds start time, status and duration in µs."""
    latencies_us = [int(line.split()[2]) for line in log.read_text().splitlines()]
    return sum(latencies_us) / len(latencies_us)
