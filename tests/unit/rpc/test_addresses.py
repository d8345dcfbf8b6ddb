"""Addresses to listen on, and the room for connections."""

import asyncio
import resource
import socket

import pytest

from ratelimitd.errors import StartupError
from ratelimitd.rpc.acceptor import (
    RESERVED,
    bound_address,
    demand_free,
    listening_sockets,
    room_for,
    split,
)


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
def test_other_text_is_not_an_address(listen):
    with pytest.raises(StartupError, match="LISTEN: "):
        split(listen)


def test_the_bound_address_has_the_assigned_port():
    assert bound_address("127.0.0.1:0", 7) == "127.0.0.1:7"
    assert bound_address("[::]:0", 7) == "[::]:7"
    assert bound_address("unix:/run/s", 1) == "unix:/run/s"


async def test_port_0_is_always_free():
    await demand_free("192.0.2.1:0")


@pytest.mark.parametrize(
    ("family", "host", "text"),
    [(socket.AF_INET, "127.0.0.1", "127.0.0.1"), (socket.AF_INET6, "::1", "[::1]")],
)
async def test_a_port_is_taken_while_a_socket_listens_and_free_afterwards(family, host, text):
    with socket.socket(family) as taken:
        taken.bind((host, 0))
        taken.listen()
        listen = f"{text}:{taken.getsockname()[1]}"
        with pytest.raises(
            StartupError, match=r"LISTEN: cannot listen on .*: Address already in use"
        ):
            await demand_free(listen)
    await demand_free(listen)


async def test_an_address_of_another_host_is_refused():
    with pytest.raises(StartupError, match=r"LISTEN: cannot listen on 192\.0\.2\.1:9090: "):
        await demand_free("192.0.2.1:9090")


async def test_a_socket_file_is_free_unless_it_answers(tmp_path):
    path = tmp_path / "s"
    await demand_free(f"unix:{path}")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        await demand_free(f"unix:{path}")
        listener.listen()
        with pytest.raises(StartupError, match="another process does"):
            await demand_free(f"unix:{path}")


async def test_a_socket_is_bound_for_each_address_of_a_name_and_all_to_one_port(monkeypatch):
    async def both(_host, port, **_options):
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)),
            (socket.AF_INET6, socket.SOCK_STREAM, 0, "", ("::1", port, 0, 0)),
            (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)),
        ]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", both)
    first, second = await listening_sockets("localhost:0")
    with first, second:
        assert first.getsockname()[1] == second.getsockname()[1] != 0
        assert second.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 1


async def test_a_port_is_shared_only_if_all_sockets_request_it():
    [first] = await listening_sockets("127.0.0.1:0", reuse_port=True)
    with first:
        first.listen()
        listen = bound_address("127.0.0.1:0", first.getsockname()[1])
        [second] = await listening_sockets(listen, reuse_port=True)
        with second:
            second.listen()
        with pytest.raises(StartupError, match="Address already in use"):
            await listening_sockets(listen)
        with pytest.raises(StartupError, match="Address already in use"):
            await demand_free(listen)


async def test_the_ipv6_wildcard_accepts_ipv4():
    [sock] = await listening_sockets("[::]:0")
    with sock:
        assert sock.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == 0


async def test_an_address_that_cannot_be_bound_leaves_no_socket_behind():
    with pytest.raises(StartupError, match=r"LISTEN: cannot listen on 192\.0\.2\.1:9090: "):
        await listening_sockets("192.0.2.1:9090")


async def test_a_socket_file_is_bound_and_one_left_behind_replaced(tmp_path):
    path = tmp_path / "s"
    for _ in range(2):
        [sock] = await listening_sockets(f"unix:{path}")
        with sock:
            assert sock.getsockname() == str(path)


async def test_other_files_are_not_replaced(tmp_path):
    path = tmp_path / "s"
    path.write_text("kept")
    with pytest.raises(StartupError, match="LISTEN: cannot listen on unix:"):
        await listening_sockets(f"unix:{path}")
    assert path.read_text() == "kept"


UNLIMITED = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "room", "raised"),
    [
        ((UNLIMITED, UNLIMITED), 1_000, None),
        ((1_000 + RESERVED, 1_000_000), 1_000, None),
        ((999 + RESERVED, 1_000_000), 1_000, 1_000 + RESERVED),
        ((10, UNLIMITED), 1_000, 1_000 + RESERVED),
        ((400, 600), 600 - RESERVED, 600),
        ((400, 400), 400 - RESERVED, None),
        ((64, 64), 1, None),
    ],
)
def test_connections_leave_room_for_the_files_of_the_process(monkeypatch, limits, room, raised):
    told = []
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _kind, now: told.append(now))
    assert room_for(1_000) == room
    assert told == ([] if raised is None else [(raised, limits[1])])


def test_a_lack_of_room_is_logged(monkeypatch, caplog):
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (400, 400))
    room_for(1_000)
    [line] = caplog.messages
    assert line == "room for 144 connections only: the limit of open files is 400"
