import contextlib
import errno
import os
import stat

import pytest

from ratelimitd.buckets.state_dir import StateDir
from ratelimitd.errors import StartupError
from ratelimitd.node.admin_token import (
    FILE_NAME,
    find_admin_token,
    own_admin_token,
    read_admin_token,
)

VARIABLE = "RATELIMITD_STATE_DIR"


@pytest.fixture
def token_file(tmp_path):
    return tmp_path / FILE_NAME


def test_a_token_is_generated_once_and_private(tmp_path, token_file):
    made = own_admin_token(tmp_path)
    assert len(made) >= 43  # 32 random bytes
    assert stat.S_IMODE(token_file.stat().st_mode) == 0o600
    assert token_file.read_text() == f"{made}\n"
    assert own_admin_token(tmp_path) == made
    assert [path.name for path in tmp_path.iterdir()] == [FILE_NAME]


def test_two_nodes_have_two_tokens(tmp_path):
    directories = [tmp_path / name for name in "ab"]
    for directory in directories:
        directory.mkdir()
    assert own_admin_token(directories[0]) != own_admin_token(directories[1])


def test_an_existing_token_is_used(tmp_path, token_file):
    token_file.write_text(" chosen-by-hand\r\n")
    token_file.chmod(0o640)  # a group may have access
    assert own_admin_token(tmp_path) == "chosen-by-hand"


def test_the_leftover_of_a_killed_start_is_replaced(tmp_path, token_file):
    aside = tmp_path / f"{FILE_NAME}.tmp"
    aside.write_text("half")
    aside.chmod(0o666)
    assert own_admin_token(tmp_path) != "half"
    assert stat.S_IMODE(token_file.stat().st_mode) == 0o600


def unusable(tmp_path):
    with pytest.raises(StartupError) as caught:
        own_admin_token(tmp_path)
    message = str(caught.value)
    assert str(tmp_path / FILE_NAME) in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "is empty"),
        (" \n\n", "is empty"),
        ("two words", "holds no token"),
        ("é", "holds no token"),
        ("a" * 1025, "holds no token"),
    ],
)
def test_a_file_without_a_token_is_refused(tmp_path, token_file, text, reason):
    token_file.write_text(text)
    token_file.chmod(0o600)
    message = unusable(tmp_path)
    assert reason in message
    assert "delete it" in message
    assert "two words" not in message
    assert token_file.read_text() == text


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o666, 0o601])
def test_a_file_that_others_can_use_is_refused(tmp_path, token_file, mode):
    token_file.write_text("secret\n")
    token_file.chmod(mode)
    message = unusable(tmp_path)
    assert "by other users" in message
    assert "secret" not in message


def test_a_directory_and_a_pipe_are_refused(tmp_path, token_file):
    token_file.mkdir()
    assert "is a directory" in unusable(tmp_path)
    token_file.rmdir()
    os.mkfifo(token_file)
    assert "is not a file" in unusable(tmp_path)


def test_a_file_of_another_user_is_refused(tmp_path, token_file, monkeypatch):
    own_admin_token(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: token_file.stat().st_uid + 1)
    assert "belongs to another user" in unusable(tmp_path)
    assert read_admin_token(token_file, own=False)


def test_an_unreadable_or_unwritable_file_is_refused(tmp_path, token_file):
    token_file.symlink_to(token_file)
    assert "cannot be read" in unusable(tmp_path)
    with pytest.raises(StartupError, match="cannot be written"):
        own_admin_token(tmp_path / "none")


def token_for(environ):
    return find_admin_token("127.0.0.1:9090", environ).token


@pytest.fixture
def running(tmp_path):
    """Yield a state directory in use, with a token."""
    state_dir = StateDir.lock(tmp_path)
    own_admin_token(tmp_path)
    yield state_dir
    state_dir.close()


@pytest.mark.parametrize(
    ("listens", "target", "found"),
    [
        ("127.0.0.1:9090", "127.0.0.1:9090", True),
        ("10.0.0.5:9090", "10.0.0.5:9090", True),
        ("0.0.0.0:9090", "127.0.0.1:9090", True),
        ("0.0.0.0:9090", "127.0.0.2:9090", True),
        ("[::]:9090", "127.0.0.1:9090", True),
        ("[::]:9090", "[::1]:9090", True),
        ("127.0.0.1:9090", "127.0.0.1:9091", False),
        ("127.0.0.1:9090", "prod.example:9090", False),
        ("0.0.0.0:9090", "10.0.0.5:9090", False),
        ("0.0.0.0:9090", "[::1]:9090", False),
        ("10.0.0.5:9090", "127.0.0.1:9090", False),
        ("127.0.0.1:9090", "127.0.0.2:9090", False),
        ("127.0.0.1:9090", "elsewhere.localhost:9090", False),
        ("10.0.0.5:9090", "localhost:9090", False),
        ("nonsense", "127.0.0.1:9090", False),
    ],
)
def test_the_token_is_sent_only_to_the_node_of_its_directory(running, listens, target, found):
    running.publish(listens, made_token=True)
    expected = own_admin_token(running.path) if found else None
    found_token = find_admin_token(target, {VARIABLE: str(running.path)})
    assert found_token[:2] == (target, expected)
    assert bool(found_token.why_none) is not found


@pytest.mark.parametrize(
    ("listens", "asked"),
    [
        ("127.0.0.1:9090", "127.0.0.1:9090"),
        ("0.0.0.0:9090", "127.0.0.1:9090"),
        ("[::]:9090", "127.0.0.1:9090"),
        ("[::1]:9090", "[::1]:9090"),
        ("localhost:9090", "localhost:9090"),
    ],
)
def test_localhost_becomes_the_loopback_address_of_the_node(running, listens, asked):
    running.publish(listens, made_token=True)
    found = find_admin_token("localhost:9090", {VARIABLE: str(running.path)})
    assert found == (asked, own_admin_token(running.path), "")


def test_with_tls_localhost_is_kept_for_the_certificate(running):
    running.publish("127.0.0.1:9090", made_token=True)
    found = find_admin_token("localhost:9090", {VARIABLE: str(running.path)}, tls=True)
    assert found[:2] == ("localhost:9090", None)
    assert found.why_none == (
        f"the node in {running.path} listens on 127.0.0.1:9090, and another program may on localhost:9090"
    )


def test_an_unreadable_directory_is_reported(running, monkeypatch):
    running.publish("127.0.0.1:9090", made_token=True)

    def refused(*_arguments, **_options):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(
        StateDir, "address_in", refused
    )  # tests may run as root, which can read everything
    found = find_admin_token("127.0.0.1:9090", {VARIABLE: str(running.path)})
    assert found.why_none == f"{running.path}: Permission denied"


def test_a_missing_token_is_reported_with_its_path(running):
    running.publish("0.0.0.0:9090", made_token=True)
    (running.path / FILE_NAME).unlink()
    found = find_admin_token("localhost:9090", {VARIABLE: str(running.path)})
    assert found == ("localhost:9090", None, f"{running.path / FILE_NAME} is missing")


def test_a_link_to_a_token_in_a_nodes_directory_is_not_followed(running, tmp_path):
    running.publish("127.0.0.1:9090", made_token=True)
    elsewhere = tmp_path / "elsewhere"
    (running.path / FILE_NAME).rename(elsewhere)
    (running.path / FILE_NAME).symlink_to(elsewhere)
    found = find_admin_token("127.0.0.1:9090", {VARIABLE: str(running.path)})
    assert f"{running.path / FILE_NAME} cannot be read: Too many levels" in found.why_none


def test_another_users_lock_in_the_working_directory_is_ignored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(StateDir.lock("ratelimitd-state")) as state_dir:
        state_dir.publish("127.0.0.1:9090", made_token=True)
        own_admin_token(state_dir.path)
        other = os.geteuid() + 1
        monkeypatch.setattr(os, "geteuid", lambda: other)
        assert find_admin_token("127.0.0.1:9090", {}).why_none == (
            "ratelimitd-state: belongs to another user"
        )
        # Root may use the token of a node that runs as another user, if the directory is named.
        assert token_for({VARIABLE: str(state_dir.path.absolute())})


def test_without_the_variable_the_default_directories_are_searched(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert token_for({}) is None
    state_dir = StateDir.lock("ratelimitd-state")
    state_dir.publish("127.0.0.1:9090", made_token=True)
    made = own_admin_token(state_dir.path)
    assert token_for({}) == made
    assert token_for({VARIABLE: str(tmp_path)}) is None
    state_dir.close()


def test_the_token_of_an_ended_node_is_not_sent(tmp_path):
    environ = {VARIABLE: str(tmp_path)}
    state_dir = StateDir.lock(tmp_path)
    own_admin_token(tmp_path)
    state_dir.publish("127.0.0.1:9090", made_token=True)
    state_dir.close()
    assert token_for(environ) is None
    (tmp_path / "lock").write_text(
        "127.0.0.1:9090\n"
    )  # the node was killed: another program may have its port
    assert token_for(environ) is None
    again = StateDir.lock(tmp_path)
    assert token_for(environ) is None  # it has not published its address
    again.publish("127.0.0.1:9090", made_token=True)
    assert token_for(environ)
    (tmp_path / FILE_NAME).write_text("")
    unusable = find_admin_token("127.0.0.1:9090", environ)
    assert unusable.token is None
    assert f"the admin token {tmp_path / FILE_NAME} " in unusable.why_none
    again.close()
