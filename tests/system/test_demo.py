"""`ratelimitd demo` as a newcomer sees it: a greedy caller is held to the limit, and an edit acts at once."""

import re
import signal
import subprocess

import httpx
import pytest

from tests.servers import free_port
from tests.system.process import COMMAND, START_S, running

pytestmark = pytest.mark.system

ROW = re.compile(r"greedy +(\d+) +(\d+) +(\d+) in 1 s")


def reading(shown, limit):
    """What the greedy caller got, from the first reading in which that is the limit to the end of the next one."""
    for _ in range(2):
        shown.lines.clear()
        shown.until(f"{limit} in 1 s  ")
        shown.until("greedy")
    return [int(number) for number in ROW.match(shown.lines[-1]).groups()]


def test_a_limit_acts_and_its_edit_acts():
    a_limit_acts_and_its_edit_acts(COMMAND)


def a_limit_acts_and_its_edit_acts(command):
    grpc_port = free_port(adjacent=3)
    ports = ("--grpc-port", grpc_port, "--http-port", grpc_port + 1, "--api-port", grpc_port + 2)
    with running([*command, "demo", "--no-browser", *ports]) as shown:
        shown.until("stops everything")
        [update] = [line for line in shown.lines if "rules update" in line]
        [page] = re.findall(r"http://\S+/rules", "".join(shown.lines))
        assert "/orders" in httpx.get(page, timeout=START_S).text
        allowed, denied, _ = reading(shown, 5)
        assert 0 < allowed <= 6
        assert denied > 0
        subprocess.run(
            [*command, *update.split()[2:]], check=True, capture_output=True, timeout=START_S
        )
        more, _, _ = reading(shown, 15)
        assert more > allowed
        shown.process.send_signal(signal.SIGINT)
        out, err = shown.process.communicate(timeout=START_S)
        assert shown.process.returncode == 0
        assert out.endswith("stopping\n")
        assert err == ""
