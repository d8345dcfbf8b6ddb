"""`serve`, `token` and `db upgrade`."""

import dataclasses
import signal
import sqlite3
import subprocess
import sys

import pytest
import typer

from ratelimitd.cli.serve import serve
from ratelimitd.node import supervisor
from ratelimitd.node.tokens_file import parse_tokens
from ratelimitd.services.auth import Role, digest_of
from ratelimitd.settings.sources import flag_of
from ratelimitd.settings.table import SETTINGS, Settings
from ratelimitd.workers import parent


@pytest.fixture
def started(monkeypatch):
    """Replace the node; collects the settings it would run with."""
    started = []

    def run(settings):
        started.append(settings)
        return 4

    monkeypatch.setattr(supervisor, "run", run)
    return started


def test_node_runs_with_the_settings_and_returns_its_status(run, started, monkeypatch):
    monkeypatch.setenv("RATELIMITD_DRAIN_S", "7")
    assert run("serve", "--http-listen", "", "--log-level", "error").status == 4
    assert (started[0].drain_s, started[0].http_listen, started[0].log_level) == (7, None, "error")


def test_several_workers_have_a_parent_that_returns_its_status(started, monkeypatch):
    parents = []
    monkeypatch.setattr(parent, "run", lambda settings: parents.append(settings) or 5)
    settings = dataclasses.replace(Settings.load({}, {}), workers=2)
    with pytest.raises(typer.Exit) as ended:
        serve(settings)
    assert ended.value.exit_code == 5
    assert (parents, started) == ([settings], [])


def test_invalid_setting_is_one_line_and_starts_no_node(run, started):
    ended = run("serve", "--listen", "nowhere", "--drain-s", "soon")
    assert ended.status == 1
    assert ended.err.count("\n") == 1
    assert "--listen" in ended.err
    assert "--drain-s" in ended.err
    assert started == []


def test_help_lists_every_setting_with_its_default(run):
    # A default longer than a line may be broken anywhere.
    out = _without_spaces(run("serve", "--help").out)
    for setting in SETTINGS:
        assert flag_of(setting.name) in out
        assert _without_spaces(setting.default) in out


SIGNALLED = """
import os, signal, sys

# Background processes of a script inherit an ignored SIGINT, and those of nohup an ignored SIGHUP.
signal.signal({number}, signal.SIG_DFL)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), {number})

sys.meta_path.insert(0, Finder())
sys.argv = ["ratelimitd", "serve"]
from ratelimitd.cli import main
sys.exit(main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("module", ["ratelimitd.cli.commands", "ratelimitd.node.supervisor"])
def test_signal_during_the_imports_ends_the_process_with_status_0(module, number, tmp_path):
    code = SIGNALLED.format(module=module, number=int(number))
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, check=False, timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
    assert not [*tmp_path.iterdir()]


def _without_spaces(text):
    return "".join(text.split())


def test_entry_matches_the_token_and_fits_the_file(run):
    entries, tokens = "", []
    for name, role in (("alice", "admin"), ("bob", "read")):
        ended = run("token", name, "--role", role)
        assert ended.status == 0
        entries += ended.out
        tokens.append(ended.err.strip())
    alice, bob = parse_tokens(f"tokens:\n{entries}".encode())
    assert (alice.name, alice.role, alice.digest) == ("alice", Role.ADMIN, digest_of(tokens[0]))
    assert (bob.name, bob.role, bob.digest) == ("bob", Role.READ, digest_of(tokens[1]))
    assert len(tokens[0]) == len(tokens[1]) == 43
    assert not any(token in entries for token in tokens)


def test_invalid_name_or_role_is_refused(run):
    for arguments in (("a b",), ("alice", "--role", "king")):
        ended = run("token", *arguments)
        assert (ended.status, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert ended.err == "Error: role must be check, read or admin\n"


def test_upgrade_creates_a_database_and_is_idempotent(run, tmp_path):
    url = f"sqlite:///{tmp_path / 'rules.db'}"
    for _ in range(2):
        ended = run("db", "upgrade", "--database-url", url)
        assert ended == (0, "the rule database is up to date\n", "")
    connection = sqlite3.connect(tmp_path / "rules.db")
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    connection.close()
    assert "rules" in tables


def test_database_may_come_from_the_environment(run, tmp_path, monkeypatch):
    monkeypatch.setenv("RATELIMITD_DATABASE_URL", f"sqlite:///{tmp_path / 'rules.db'}")
    assert run("db", "upgrade").status == 0
    assert (tmp_path / "rules.db").exists()


def test_file_of_another_program_is_status_1_and_unchanged(run, tmp_path):
    file = tmp_path / "notes.db"
    file.write_bytes(b"not a database, but somebody's notes" * 100)
    ended = run("db", "upgrade", "--database-url", f"sqlite:///{file}")
    assert (ended.status, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert file.read_bytes().startswith(b"not a database")


def test_database_on_a_server_is_upgraded(run, postgres):
    url = postgres.new_database("template0")
    for _ in range(2):
        ended = run("db", "upgrade", "--database-url", url)
        assert ended == (0, "the rule database is up to date\n", "")


def test_refusing_server_is_one_line_without_the_password(run, postgres):
    ended = run("db", "upgrade", "--database-url", postgres.url("migrated", user="guarded:s3cret"))
    place = f"127.0.0.1:{postgres.port}/migrated"
    line = f"Error: the rule database refuses the user or the password of DATABASE_URL: {place}\n"
    assert ended == (1, "", line)
