"""Whether a port is free."""

import socket

from ratelimitd.cli.dev.run import is_free


def test_a_port_that_somebody_listens_on_is_taken_until_they_stop():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert not is_free(port)
    assert is_free(port)
