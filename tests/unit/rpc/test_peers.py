"""Peers as sockets tell them."""

import socket

import pytest

from ratelimitd.rpc.routing import address_of, peer_of, sans_of


@pytest.mark.parametrize(
    ("family", "name", "address"),
    [
        (socket.AF_INET, ("127.0.0.1", 5000), "ipv4:127.0.0.1:5000"),
        (socket.AF_INET6, ("::1", 5000, 0, 0), "ipv6:[::1]:5000"),
        (socket.AF_INET6, ("fe80::1%eth0", 5000, 0, 2), "ipv6:[fe80::1%eth0]:5000"),
        (socket.AF_INET6, ("::ffff:10.0.0.1", 5000, 0, 0), "ipv4:10.0.0.1:5000"),
        (socket.AF_UNIX, "", "unix:"),
        (None, None, "unknown:"),
    ],
)
def test_an_address_is_spelt_as_grpc_spells_it(family, name, address):
    assert address_of(family, name) == address


def test_names_of_every_kind_are_names():
    names = (("DNS", "a.example"), ("URI", "spiffe://b"), ("DirName", (("x", "y"),)))
    assert sans_of({"subjectAltName": names}) == ("a.example", "spiffe://b")
    assert sans_of({}) == ()


class Transport:
    """What asyncio tells about a connection."""

    def __init__(self, **info):
        self.get_extra_info = info.get


class Certified:
    def getpeercert(self):
        return {"subjectAltName": (("DNS", "a.example"),)}


def test_a_peer_is_the_address_of_its_socket_and_the_names_of_its_certificate():
    with socket.socket() as sock:
        plain = peer_of(Transport(socket=sock, peername=("10.0.0.1", 1)))
        certified = peer_of(
            Transport(socket=sock, peername=("10.0.0.1", 1), ssl_object=Certified())
        )
    assert plain == ("ipv4:10.0.0.1:1", ())
    assert certified == ("ipv4:10.0.0.1:1", ("a.example",))


def test_a_connection_that_is_lost_already_is_nobody_local():
    assert peer_of(Transport()).address == "unknown:"
