"""The command as a whole: its output, its exit status, and that it prints no secret."""

import asyncio
import json

import pytest

from ratelimitd.rules.store import RuleDraft
from tests.rule_stores import sqlite_store


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, value in (("LISTEN", "127.0.0.1:0"), ("HTTP_LISTEN", "")):
        monkeypatch.setenv(f"RATELIMITD_{name}", value)
    return tmp_path


def test_new_directory_has_no_problem_and_stays_empty(run, here):
    ended = run("doctor")
    assert (ended.status, ended.err) == (0, "")
    assert "ok       settings      each is valid\n" in ended.out
    assert ended.out.splitlines()[-1].startswith("problems: 0, warnings: 0, fine: ")
    assert not list(here.iterdir())


def test_problem_is_status_1_with_a_remedy(run, here):
    ended = run("doctor", "--database-url", "sqlite:///none/rules.db")
    assert ended.status == 1
    assert "problem  DATABASE_URL  the rule database cannot be opened: its directory" in ended.out
    assert "→ look at none/rules.db" in ended.out


def test_json_is_a_list_of_findings(run, here):
    findings = json.loads(run("doctor", "--json").out)
    assert {tuple(finding) for finding in findings} == {("area", "level", "what", "remedy")}
    assert {finding["level"] for finding in findings} == {"ok"}


def test_invalid_settings_are_findings_beside_other_checks(run, here, monkeypatch):
    token = here / "token"
    token.write_text("t0ken-text")
    token.chmod(0o644)
    monkeypatch.setenv("RATELIMITD_ADMIN_TOKEN_FILE", str(token))
    monkeypatch.setenv("RATELIMITD_LISTN", "x")
    ended = run("doctor", "--workers", "0", "--json")
    assert ended.status == 1
    levels = [(finding["area"], finding["level"]) for finding in json.loads(ended.out)]
    assert levels == [
        ("ADMIN_TOKEN_FILE", "warning"),
        ("settings", "problem"),
        ("settings", "problem"),
    ]
    assert "did you mean RATELIMITD_LISTEN" in ended.out
    assert "t0ken" not in ended.out


def test_warning_is_not_a_problem(run, here):
    ended = run("doctor", "--listen", "0.0.0.0:0")
    assert ended.status == 0
    assert "warning  TLS_CERT" in ended.out


async def test_options_are_those_of_serve(run, here):
    async with sqlite_store(here) as store:
        await store.create(RuleDraft("/a", "user", 1, 60, "token_bucket"), "test")
    (here / "key").write_text("k" * 32)
    (here / "key").chmod(0o600)
    ended = await asyncio.to_thread(
        run,
        "doctor",
        "--database-url",
        f"sqlite:///{here}/rules.db",
        "--key-secret-file",
        here / "key",
    )
    assert ended.status == 0
    assert "1 rules, revision 1, can be written" in ended.out
    assert "KEY_SECRET_FILE" in ended.out
