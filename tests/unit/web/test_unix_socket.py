import socket
import stat

import pytest

from ratelimitd.web.server import listening_at, short_name


@pytest.fixture
def path(tmp_path):
    deep = tmp_path / ("d" * 200)
    deep.mkdir()
    return deep / "http.sock"


def connected_to(path):
    with socket.socket(socket.AF_UNIX) as client, short_name(path) as name:
        return client.connect_ex(name) == 0


def test_a_path_of_any_length_can_be_listened_at_by_its_owner_alone(path):
    with listening_at(path):
        assert connected_to(path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not connected_to(path)


def test_what_a_dead_process_left_behind_is_replaced(path):
    listening_at(path).close()
    assert path.is_socket()
    with listening_at(path):
        assert connected_to(path)


def test_a_directory_that_is_not_there_is_an_error_and_leaves_nothing_open(path):
    with pytest.raises(FileNotFoundError):
        listening_at(path.parent / "none" / "http.sock")
