"""One option per setting, help from docstrings, and `config show`: every setting and no secret."""

import inspect
import json

from ratelimitd.cli.options import VERBATIM, help_of, takes_settings
from ratelimitd.settings.table import SETTINGS


def parameters(only=()):
    return inspect.signature(takes_settings(lambda settings: None, only)).parameters


def test_every_setting_has_an_option_and_every_secret_a_file():
    expected = {spec.name.lower() for spec in SETTINGS}
    expected |= {f"{spec.name.lower()}_file" for spec in SETTINGS if spec.secret}
    assert set(parameters()) == expected


def test_command_may_have_a_subset_of_the_options():
    assert set(parameters(["DATABASE_URL"])) == {"database_url", "database_url_file"}


def documented():
    """Do it.

    A paragraph.

    Example:
      ratelimitd do
      ratelimitd do --twice
    """


def test_only_the_example_keeps_its_lines():
    assert help_of(documented) == (
        f"Do it.\n\nA paragraph.\n\n{VERBATIM}Example:\n  ratelimitd do\n  ratelimitd do --twice"
    )


def test_every_setting_is_shown_with_its_source(run, monkeypatch):
    monkeypatch.setenv("RATELIMITD_DRAIN_S", "7")
    monkeypatch.setenv("RATELIMITD_LOG_LEVEL", "debug")
    rows = [line.split() for line in run("config", "show", "--log-level", "error").out.splitlines()]
    assert rows[0] == ["SETTING", "VALUE", "SOURCE"]
    assert [row[0] for row in rows[1:]] == [setting.name for setting in SETTINGS]
    assert ["DRAIN_S", "7", "environment"] in rows
    assert ["LOG_LEVEL", "error", "flag"] in rows
    assert ["TRANSPORT", "native", "default"] in rows


def test_json_is_a_list_of_the_same(run, tmp_path):
    (tmp_path / "token").write_text("s3cret-token")
    ended = run("config", "show", "--json", "--admin-token-file", tmp_path / "token")
    rows = {row["name"]: row for row in json.loads(ended.out)}
    assert list(rows) == [setting.name for setting in SETTINGS]
    assert rows["ADMIN_TOKEN"]["source"] == "file"
    assert rows["ADMIN_TOKEN"]["value"] not in ("", "s3cret-token")


def test_no_secret_is_shown(run, monkeypatch):
    monkeypatch.setenv("RATELIMITD_ADMIN_TOKEN", "s3cret-token")
    for options in ([], ["--json"]):
        ended = run("config", "show", *options, "--key-secret", "0123456789abcdef-s3cret")
        assert "s3cret" not in ended.out + ended.err


def test_invalid_setting_is_status_1_and_one_line(run, monkeypatch):
    monkeypatch.setenv("RATELIMITD_DRAIN", "7")
    ended = run("config", "show")
    assert (ended.status, ended.out) == (1, "")
    assert "RATELIMITD_DRAIN is not a setting" in ended.err
    assert ended.err.count("\n") == 1
