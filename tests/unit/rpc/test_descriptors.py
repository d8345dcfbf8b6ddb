"""How many connections the limit of open files leaves room for."""

import resource

import pytest

from ratelimitd.rpc.acceptor import RESERVED, room_for

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
