"""The command line as a whole: its commands, and the exit status of every kind of end."""

import io
import os
import subprocess
import sys

import pytest
import typer
from typer.main import get_command

from ratelimitd import __version__
from ratelimitd.cli import commands, main
from ratelimitd.cli.client_options import CliError
from ratelimitd.errors import StartupError
from ratelimitd.settings.sources import COMMAND_VARIABLES
from ratelimitd.settings.table import Settings


def names():
    """Yield every command, with its group."""
    for name in commands.COMMANDS:
        found = get_command(commands.app).get_command(None, name)
        parts = getattr(found, "commands", None)
        yield from [f"{name} {part}" for part in parts] if parts else [name]


@pytest.fixture
def ends_with(monkeypatch):
    """Replace every command by one that raises."""

    def replace(error):
        app = typer.Typer()

        @app.command()
        def command():
            raise error

        monkeypatch.setattr(commands, "app", app)

    return replace


def test_version_is_that_of_the_package(run):
    assert run("--version") == (0, f"ratelimitd {__version__}\n", "")


@pytest.mark.parametrize("command", [*names()])
def test_help_of_every_command_has_an_example(run, command):
    ended = run(*command.split(), "--help")
    assert ended.status == 0
    assert f"    ratelimitd {command}" in ended.out.partition("  Example:\n")[2]


@pytest.mark.parametrize("arguments", [["--frobnicate"], ["frobnicate"], ["check", "user"], []])
def test_invalid_command_line_is_status_2_with_a_hint(run, arguments):
    ended = run(*arguments)
    assert ended.status == 2
    assert "Usage: ratelimitd" in ended.out + ended.err


def test_known_error_is_one_line_on_stderr_with_its_status(run, ends_with):
    ends_with(CliError("the node said\nno", 3))
    assert run() == (3, "", "Error: the node said no\n")


def test_details_of_an_error_follow_line_by_line(run, ends_with):
    ends_with(CliError("refused:", details=["a: wrong", "b: wrong"]))
    assert run() == (1, "", "Error: refused:\n  a: wrong\n  b: wrong\n")


def test_error_of_the_node_is_status_1(run, ends_with):
    ends_with(StartupError("the port is taken"))
    assert run() == (1, "", "Error: the port is taken\n")


def test_ctrl_c_is_quiet_and_status_130(run, ends_with):
    ends_with(KeyboardInterrupt())
    assert run() == (130, "", "")


def test_ctrl_c_outside_of_a_command_is_status_130(run, monkeypatch):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "app", interrupted)
    assert run() == (130, "", "")


def test_exit_without_a_number_is_an_error(run, monkeypatch):
    def stop(*_arguments, **_options):
        sys.exit("text")

    monkeypatch.setattr(commands, "app", stop)
    assert run().status == 1


def test_command_that_returns_is_status_0(run, monkeypatch):
    monkeypatch.setattr(commands, "app", lambda *_arguments, **_options: None)
    assert run().status == 0


def test_closed_pipe_causes_no_traceback(monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["--version"]) == 1
        stdout.write("what comes later goes nowhere")


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_closed_stream_is_replaced_by_null(run, ends_with, monkeypatch, name):
    monkeypatch.setattr(sys, name, None)
    assert run("rules", "schema").status == 0
    ends_with(CliError("no"))
    ended = run()
    assert (ended.status, ended.out) == (1, "")
    getattr(sys, name).close()


def test_unwritable_output_is_one_line(run, ends_with):
    ends_with(OSError(28, "No space left on device"))
    assert run() == (1, "", "Error: No space left on device\n")
    ends_with(OSError("odd"))
    assert run() == (1, "", "Error: odd\n")


def test_unexpected_error_is_one_line_without_the_debug_variable(run, ends_with, monkeypatch):
    ends_with(ZeroDivisionError("s3cret"))
    ended = run()
    assert ended.status == 1
    assert ended.err == (
        "Error: this is a bug (ZeroDivisionError); RATELIMITD_DEBUG=1 shows where\n"
    )
    monkeypatch.setenv("RATELIMITD_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        run()


class Terminal(io.BytesIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("stream", "text"), [(Terminal, b"?\n"), (io.BytesIO, "→\n".encode())])
def test_unencodable_character_is_replaced_on_a_terminal_only(monkeypatch, stream, text):
    written = stream()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(commands, "app", lambda **_options: sys.stdout.write("→\n"))
    assert main([]) == 0
    assert written.getvalue() == text


def test_shell_completion_offers_commands_and_choices(run, monkeypatch):
    monkeypatch.setenv("_RATELIMITD_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "ratelimitd ")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert {"serve", "check", "rules"} <= set(run().out.split())
    monkeypatch.setenv("COMP_WORDS", "ratelimitd check ")
    monkeypatch.setenv("COMP_CWORD", "2")
    assert run().out.split() == ["user", "ip", "api_key"]
    monkeypatch.setenv("COMP_WORDS", "ratelimitd rules create /x user --algorithm ")
    monkeypatch.setenv("COMP_CWORD", "6")
    assert run().out.split() == ["token_bucket", "sliding_window", "fixed_window", "concurrency"]


def test_former_prefix_of_variables_is_accepted_with_a_warning_and_the_current_one_wins(
    ask, node, monkeypatch
):
    monkeypatch.setenv("RATELIMITCTL_TARGET", "127.0.0.1:1")
    monkeypatch.setenv("RATELIMITCTL_TOKEN", "s3cret")
    monkeypatch.setenv("RATELIMITD_TOKEN", "present")
    ended = ask("rules", "list")
    assert ended.status == 0
    assert ended.err == (
        "Warning: RATELIMITCTL_TARGET, RATELIMITCTL_TOKEN: the prefix is RATELIMITD_ now\n"
    )
    monkeypatch.delenv("RATELIMITD_TARGET")
    monkeypatch.setenv("RATELIMITCTL_TARGET", node.address)
    assert ask("rules", "list").status == 0
    monkeypatch.delenv("RATELIMITD_TARGET")


def test_node_ignores_variables_of_the_command_line():
    environ = {f"RATELIMITD_{name}": "x" for name in COMMAND_VARIABLES}
    assert Settings.load(environ, {}).listen == Settings.load({}, {}).listen


def test_grpc_writes_no_lines_by_default(monkeypatch):
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    main(["--version"])
    assert os.environ["GRPC_VERBOSITY"] == "NONE"
    monkeypatch.setenv("GRPC_VERBOSITY", "DEBUG")
    main(["--version"])
    assert os.environ["GRPC_VERBOSITY"] == "DEBUG"


def test_grpc_error_is_one_line_of_the_command(tmp_path):
    (tmp_path / "ca.pem").write_text("-----BEGIN nothing")
    code = "import sys; from ratelimitd.cli import main; sys.exit(main(sys.argv[1:]))"
    command = ["health", "--target", "127.0.0.1:1", "--ca", str(tmp_path / "ca.pem")]
    environ = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    ended = subprocess.run(
        [sys.executable, "-c", code, *command],
        capture_output=True,
        text=True,
        env=environ,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
