"""`serve`: from settings to the exit status of the supervisor."""

import dataclasses

import pytest
import typer

from ratelimitd.cli.serve import serve
from ratelimitd.node import supervisor
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


def _without_spaces(text):
    return "".join(text.split())
