"""Children of a command: real processes that end on request, on their own, or when killed."""

import os
import pwd
import select
import signal
import subprocess
import sys

import pytest

from ratelimitd.cli.client_options import CliError
from ratelimitd.cli.dev import servers as module
from ratelimitd.cli.dev.servers import failure

SLEEP = "import time; print('here', flush=True); time.sleep(60)"
OBSTINATE = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEP}"


def python(code):
    return [sys.executable, "-c", code]


async def started(children, code=SLEEP, name="child"):
    child = await children.start(name, python(code), read=True)
    assert await child.process.stdout.readline() == b"here\n"
    return child


async def test_stopped_child_ended_on_request(children):
    child = await started(children)
    assert child.runs
    await children.stop()
    assert not child.runs
    assert child.process.returncode == -signal.SIGTERM
    assert await children.ended(child) is False


async def test_child_that_ends_on_its_own_is_unexpected(children):
    child = await started(children)
    os.kill(child.pid, signal.SIGKILL)
    assert await children.ended(child) is True
    assert str(failure(child)) == "child ended with SIGKILL: it wrote nothing"


async def test_children_end_in_reverse_order(children, monkeypatch):
    ended = []
    stop = module._stop

    async def stop_and_tell(child):
        await stop(child)
        ended.append(child.name)

    monkeypatch.setattr(module, "_stop", stop_and_tell)
    for name in ("server", "node"):
        await started(children, name=name)
    await children.stop()
    assert ended == ["node", "server"]


async def test_child_that_does_not_end_is_killed(children, monkeypatch):
    monkeypatch.setattr(module, "STOP_S", 0.05)
    child = await started(children, OBSTINATE)
    await children.stop()
    assert child.process.returncode == -signal.SIGKILL


async def test_paused_child_is_ended(children):
    child = await started(children)
    os.kill(child.pid, signal.SIGSTOP)
    await children.stop()
    assert child.process.returncode == -signal.SIGTERM


async def test_child_is_detached_from_the_terminal(children):
    child = await started(children)
    assert os.getpgid(child.pid) != os.getpgid(0)


async def test_settings_of_a_node_are_not_inherited(children, tmp_path, monkeypatch):
    monkeypatch.setenv("RATELIMITD_LISTEN", "127.0.0.1:1")
    monkeypatch.setenv("OTHER", "kept")
    await children.run("env", python("import os; print('\\n'.join(os.environ))"))
    names = (tmp_path / "env.log").read_text().split()
    assert "RATELIMITD_LISTEN" not in names
    assert "OTHER" in names


async def test_failed_run_quotes_its_last_line(children):
    code = "import sys; print('first', flush=True); sys.exit('Error: no \\x1b[1mroom\\n\\n')"
    with pytest.raises(CliError) as caught:
        await children.run("tool", python(code))
    assert str(caught.value) == "tool ended with status 1: no \N{REPLACEMENT CHARACTER}[1mroom"


STARTS_ONE = """
import asyncio, pathlib, sys
from ratelimitd.cli.dev.servers import Children

async def main():
    child = await Children(pathlib.Path(sys.argv[1])).start("child", ["sleep", "60"])
    print(child.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells a child of it")
def test_child_ends_when_the_command_is_killed(tmp_path):
    with subprocess.Popen([*python(STARTS_ONE), tmp_path], stdout=subprocess.PIPE) as command:
        child = os.pidfd_open(int(command.stdout.readline()))
        try:
            command.kill()
            ended, _, _ = select.select([child], [], [], 30)
            assert ended
        finally:
            os.close(child)


AS_NOBODY = """
import asyncio, pathlib, sys
from ratelimitd.cli.dev.servers import Children

async def main():
    children = Children(pathlib.Path(sys.argv[1]))
    await children.run("id", ["id", "-un"], user="nobody")
    await children.run("groups", ["id", "-G"], user="nobody")

asyncio.run(main())
"""


def test_program_runs_as_the_given_user(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root may run programs as somebody else")
    # In a separate process, like the command: changing the user takes a fork, which gRPC's threads left by other tests
    # may not survive.
    subprocess.run([*python(AS_NOBODY), tmp_path], check=True)
    assert (tmp_path / "id.log").read_text() == "nobody\n"
    assert (tmp_path / "groups.log").read_text() == f"{pwd.getpwnam('nobody').pw_gid}\n"
