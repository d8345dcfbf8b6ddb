import contextlib
import errno
import fcntl
import os
import stat
from functools import partial
from pathlib import Path

import pytest

from ratelimitd.buckets.state_dir import LOCK_NAME, StateDir
from ratelimitd.errors import StartupError


def test_a_directory_is_created_with_its_parents_for_its_owner_only(tmp_path):
    state_dir = StateDir.lock(tmp_path / "a" / "b")
    assert stat.S_IMODE(state_dir.path.stat().st_mode) == 0o700
    assert stat.S_IMODE((state_dir.path / LOCK_NAME).stat().st_mode) == 0o600
    state_dir.close()


def test_an_existing_directory_is_used_with_its_content(tmp_path):
    (tmp_path / "kept").write_text("as it was")
    StateDir.lock(str(tmp_path)).close()
    assert (tmp_path / "kept").read_text() == "as it was"


def test_a_directory_in_use_is_refused_until_it_is_free(tmp_path):
    first = StateDir.lock(tmp_path)
    descriptors = len([*Path("/proc/self/fd").iterdir()])
    with pytest.raises(StartupError, match="in use by another node"):
        StateDir.lock(tmp_path)
    assert len([*Path("/proc/self/fd").iterdir()]) == descriptors
    first.close()
    StateDir.lock(tmp_path).close()


def test_a_path_that_is_not_a_directory_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match=r"^STATE_DIR: .*file cannot be used: Not a directory$"):
        StateDir.lock(tmp_path / "file")


def test_a_lock_that_cannot_be_opened_is_refused(tmp_path):
    (tmp_path / LOCK_NAME).mkdir()
    with pytest.raises(StartupError, match="cannot be used"):
        StateDir.lock(tmp_path)


def test_a_file_system_without_locks_is_not_reported_as_another_node(tmp_path, monkeypatch):
    opened = []

    def flock(fd, _operation):
        opened.append(fd)
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StartupError, match="cannot be locked: No locks available"):
        StateDir.lock(tmp_path)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_the_lock_file_has_the_address_of_its_running_node(tmp_path):
    state_dir = StateDir.lock(tmp_path)
    assert StateDir.address_in(tmp_path, made_token=True) == ""
    state_dir.publish("127.0.0.1:9090", made_token=True)
    assert StateDir.address_in(tmp_path, made_token=True) == "127.0.0.1:9090"
    state_dir.close()
    assert StateDir.address_in(tmp_path, made_token=True) == ""
    assert (tmp_path / LOCK_NAME).read_bytes() == b"", (
        "the next node may hold the lock before it has an address"
    )


def test_a_link_to_a_lock_file_is_not_followed_in_a_relative_path(tmp_path, monkeypatch):
    with contextlib.closing(StateDir.lock(tmp_path / "own")) as state_dir:
        state_dir.publish("127.0.0.1:9090", made_token=True)
        (tmp_path / "planted").mkdir()
        (tmp_path / "planted" / LOCK_NAME).symlink_to(state_dir.path / LOCK_NAME)
        monkeypatch.chdir(tmp_path)
        assert StateDir.address_in(Path("own"), made_token=True) == "127.0.0.1:9090"
        with pytest.raises(OSError, match="symbolic links"):
            StateDir.address_in(Path("planted"), made_token=True)


def test_the_lock_of_another_user_in_a_relative_path_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(StateDir.lock("own")) as state_dir:
        state_dir.publish("127.0.0.1:9090", made_token=True)
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
        with pytest.raises(PermissionError, match="belongs to another user"):
            StateDir.address_in(Path("own"), made_token=True)
        assert StateDir.address_in(tmp_path / "own", made_token=True) == "127.0.0.1:9090"


def test_the_address_of_a_killed_node_is_ignored(tmp_path):
    (tmp_path / LOCK_NAME).write_text("127.0.0.1:9090\n")
    assert StateDir.address_in(tmp_path, made_token=True) == ""
    state_dir = StateDir.lock(tmp_path)
    assert StateDir.address_in(tmp_path, made_token=True) == ""
    state_dir.close()


def test_a_full_disk_is_an_error_that_names_the_directory(tmp_path, monkeypatch):
    state_dir = StateDir.lock(tmp_path)

    def full(*_arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(StartupError, match=f"{tmp_path} cannot be written: No space left"):
        state_dir.publish("127.0.0.1:9090", made_token=True)
    state_dir.close()


def test_a_directory_without_a_lock_file_has_no_address(tmp_path):
    with pytest.raises(FileNotFoundError):
        StateDir.address_in(tmp_path, made_token=True)


def test_a_node_with_a_configured_token_is_found_only_without_made_token(tmp_path):
    with_token, without = (
        partial(StateDir.address_in, tmp_path, made_token=one) for one in (True, False)
    )
    state_dir = StateDir.lock(tmp_path)
    state_dir.publish("127.0.0.1:9090", made_token=False)
    assert (with_token(), without()) == ("", "127.0.0.1:9090")
    state_dir.close()
    assert without() == ""
    StateDir.lock(tmp_path).publish("[::1]:1", made_token=True)
    assert (with_token(), without()) == ("[::1]:1", "[::1]:1")
