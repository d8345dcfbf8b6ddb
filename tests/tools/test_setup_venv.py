"""When the checkout's environment is made anew: for a node alone, and for everything."""

import pytest

from tools import setup_venv
from tools.setup_venv import ALL, LISTS, TO_SERVE, WITH_WORKERS, fingerprint, is_current


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Pretends that something was installed from files of pins, which the test may change."""
    for name in ALL:
        (tmp_path / name).write_text(f"{name}==1\n", encoding="utf-8")
    python = tmp_path / "python"
    python.touch()
    monkeypatch.setattr(setup_venv, "REQUIREMENTS", tmp_path)
    monkeypatch.setattr(setup_venv, "VENV_PYTHON", python)
    monkeypatch.setattr(setup_venv, "STAMP", tmp_path / "stamp")

    def install(names):
        (tmp_path / "stamp").write_text(fingerprint(names), encoding="utf-8")
        return tmp_path

    return install


def test_what_was_installed_for_tests_serves_as_well(installed):
    installed(ALL)
    assert is_current(ALL)
    assert is_current(TO_SERVE)


def test_what_was_installed_to_serve_is_not_enough_for_tests_nor_for_workers(installed):
    installed(TO_SERVE)
    assert [is_current(names) for names in LISTS] == [True, False, False]


def test_what_was_installed_for_workers_serves_without_them_too(installed):
    installed(WITH_WORKERS)
    assert [is_current(names) for names in LISTS] == [True, True, False]


def test_pins_of_tests_that_change_are_nothing_to_a_node(installed):
    directory = installed(TO_SERVE)
    (directory / "dev.txt").write_text("pytest==2\n", encoding="utf-8")
    assert is_current(TO_SERVE)


@pytest.mark.parametrize("changed", TO_SERVE)
def test_a_changed_pin_of_a_node_is_installed(installed, changed):
    directory = installed(TO_SERVE)
    (directory / changed).write_text("other==2\n", encoding="utf-8")
    assert not is_current(TO_SERVE)


def test_an_installation_that_did_not_end_is_repeated(installed):
    (installed(ALL) / "stamp").unlink()
    assert not is_current(ALL)


def test_an_environment_without_a_python_is_made_anew(installed):
    (installed(ALL) / "python").unlink()
    assert not is_current(TO_SERVE)
