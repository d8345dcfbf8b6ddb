import pytest

from ratelimitd.cluster.redis.connection import code_of, error_of, login_error_of
from ratelimitd.errors import (
    StoreClusterDownError,
    StoreCorruptError,
    StoreMisconfiguredError,
    StoreMovingError,
    StoreUnavailableError,
)

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("LOADING Redis is loading the dataset in memory", StoreUnavailableError),
        ("READONLY You can't write against a read only replica.", StoreUnavailableError),
        ("MASTERDOWN Link with MASTER is down", StoreUnavailableError),
        ("OOM command not allowed when used memory > 'maxmemory'.", StoreUnavailableError),
        ("NOREPLICAS Not enough good replicas to write.", StoreUnavailableError),
        ("BUSY Redis is busy running a script.", StoreUnavailableError),
        ("MISCONF Redis is configured to save RDB snapshots", StoreUnavailableError),
        ("CLUSTERDOWN The cluster is down", StoreClusterDownError),
        ("TRYAGAIN Multiple keys request during rehashing of slot", StoreMovingError),
        ("ERR max number of clients reached", StoreUnavailableError),
        ("ERR max number of clients + cluster connections reached", StoreUnavailableError),
        ("NOAUTH Authentication required.", StoreMisconfiguredError),
        ("WRONGPASS invalid username-password pair", StoreMisconfiguredError),
        ("NOPERM User hunter2 has no permissions", StoreMisconfiguredError),
        ("NOPROTO unsupported protocol version", StoreMisconfiguredError),
        ("DENIED Redis is running in protected mode", StoreMisconfiguredError),
        ("WRONGTYPE Operation against a key", StoreCorruptError),
        ("ERR unknown command 'hunter2', with args beginning with: 'hunter2'", StoreCorruptError),
        ("CORRUPT hunter2", StoreCorruptError),
        ("CROSSSLOT Keys in request don't hash to the same slot", StoreCorruptError),
        ("hunter2", StoreCorruptError),
        ("", StoreCorruptError),
    ],
)
def test_each_error_reply_maps_to_an_error_without_its_arguments(text, kind):
    error = error_of(text)
    assert type(error) is kind
    assert SECRET not in str(error)
    of_login = str(login_error_of(text, "a sentinel"))
    assert SECRET not in of_login
    assert "shared state" not in of_login


def test_an_error_in_a_script_names_its_line():
    text = "ERR value hunter2 is bad script: 0123, on @user_script:12."
    assert str(error_of(text)) == "the shared state answered ERR in line 12 of a script"


@pytest.mark.parametrize(
    "text",
    [
        "ERR ACL failure in script: User hunter2 has no permissions to run the 'get' command",
        "ERR The user executing the script can't run this command or subcommand",
        "ERR The user executing the script can't access at least one of the keys",
    ],
)
def test_a_forbidden_command_in_a_script_is_a_missing_permission(text):
    error = error_of(f"{text} script: 0123, on @user_script:12.")
    assert type(error) is StoreMisconfiguredError
    assert str(error) == "the shared state answered NOPERM in line 12 of a script"


def test_the_code_is_the_first_word_in_capitals():
    assert code_of("MOVED 1 127.0.0.1:7000") == "MOVED"
    assert code_of("no code") == ""
    assert str(error_of("no code")) == "the shared state answered an error"


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("LOADING x", StoreUnavailableError),
        ("WRONGPASS x", StoreMisconfiguredError),
        ("ERR DB index is out of range", StoreMisconfiguredError),
        ("ERR AUTH <password> called without any password configured", StoreMisconfiguredError),
        ("unheard of", StoreMisconfiguredError),
        ("MOVED 1 127.0.0.1:7000", StoreUnavailableError),
    ],
)
def test_a_permanent_error_of_the_handshake_is_a_wrong_setting(text, kind):
    assert type(login_error_of(text, "a server")) is kind
