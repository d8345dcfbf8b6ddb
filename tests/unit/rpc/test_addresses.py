import socket

import pytest

from ratelimitd.errors import StartupError
from ratelimitd.rpc.addresses import bound_address, demand_free, split


@pytest.mark.parametrize(
    ("listen", "expected"),
    [
        ("127.0.0.1:9090", ("127.0.0.1", 9090)),
        ("[::1]:0", ("::1", 0)),
        ("localhost:1", ("localhost", 1)),
    ],
)
def test_an_address_has_a_host_and_a_port(listen, expected):
    assert split(listen) == expected


@pytest.mark.parametrize("listen", ["", "9090", ":9090", "host:", "host:http"])
def test_other_text_is_no_address(listen):
    with pytest.raises(StartupError, match="LISTEN: "):
        split(listen)


def test_the_bound_address_has_the_port_that_was_got():
    assert bound_address("127.0.0.1:0", 7) == "127.0.0.1:7"
    assert bound_address("[::]:0", 7) == "[::]:7"
    assert bound_address("unix:/run/s", 1) == "unix:/run/s"


async def test_port_0_is_always_free():
    await demand_free("192.0.2.1:0")


@pytest.mark.parametrize(
    ("family", "host", "text"),
    [(socket.AF_INET, "127.0.0.1", "127.0.0.1"), (socket.AF_INET6, "::1", "[::1]")],
)
async def test_a_port_is_taken_while_somebody_listens_and_free_again_after(family, host, text):
    with socket.socket(family) as taken:
        taken.bind((host, 0))
        taken.listen()
        listen = f"{text}:{taken.getsockname()[1]}"
        with pytest.raises(
            StartupError, match=r"LISTEN: cannot listen on .*: Address already in use"
        ):
            await demand_free(listen)
    await demand_free(listen)


async def test_an_address_of_another_host_is_not_ours_to_listen_on():
    with pytest.raises(StartupError, match=r"LISTEN: cannot listen on 192\.0\.2\.1:9090: "):
        await demand_free("192.0.2.1:9090")


async def test_a_socket_file_is_free_unless_somebody_answers(tmp_path):
    path = tmp_path / "s"
    await demand_free(f"unix:{path}")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        await demand_free(f"unix:{path}")
        listener.listen()
        with pytest.raises(StartupError, match="another process does"):
            await demand_free(f"unix:{path}")
