"""Options from settings: one for each, and the environment where there is none."""

import inspect
import os

import pytest

from ratelimitd.cli.options import takes_settings
from ratelimitd.errors import SettingsError
from ratelimitd.settings.table import SETTINGS


@pytest.fixture
def loaded(monkeypatch):
    """Call a command that takes settings; returns what it was handed."""
    monkeypatch.setattr(os, "environ", {"RATELIMITD_DRAIN_S": "7"})

    def call(only=(), **given):
        got = []

        def command(settings, *, other: int = 0):
            got.append((settings, other))

        run = takes_settings(command, only)
        names = [name for name in inspect.signature(run).parameters if name != "other"]
        run(**{**dict.fromkeys(names), **given, "other": 1})
        return got[0]

    return call


def parameters(only=()):
    return inspect.signature(takes_settings(lambda settings: None, only)).parameters


def test_there_is_an_option_for_every_setting_and_a_file_for_every_secret():
    expected = {spec.name.lower() for spec in SETTINGS}
    expected |= {f"{spec.name.lower()}_file" for spec in SETTINGS if spec.secret}
    assert set(parameters()) == expected


def test_a_command_may_take_some_of_them_only():
    assert set(parameters(["DATABASE_URL"])) == {"database_url", "database_url_file"}


def test_an_option_beats_the_environment_and_what_is_not_given_is_the_default(loaded):
    settings, other = loaded()
    assert (settings.drain_s, settings.log_level, other) == (7, "info", 1)
    settings, _ = loaded(drain_s="8")
    assert settings.drain_s == 8


def test_the_file_of_a_secret_is_read(loaded, tmp_path):
    (tmp_path / "token").write_text("s3cret\n")
    settings, _ = loaded(admin_token_file=str(tmp_path / "token"))
    assert settings.admin_token == "s3cret"


def test_a_wrong_setting_is_named(loaded):
    with pytest.raises(SettingsError, match="--drain-s"):
        loaded(drain_s="soon")
