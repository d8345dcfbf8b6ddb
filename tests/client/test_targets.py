"""Names of nodes: what is understood as gRPC understands it, and what is left to it."""

import asyncio
import socket

import pytest

from ratelimitd_client.targets import MAX_ADDRESSES, Address, Target, parse


@pytest.mark.parametrize(
    ("target", "authority", "addresses"),
    [
        ("127.0.0.1:9090", "127.0.0.1:9090", [Address("127.0.0.1", 9090)]),
        ("[::1]:9090", "[::1]:9090", [Address("::1", 9090)]),
        ("dns:///127.0.0.1:9090", "127.0.0.1:9090", [Address("127.0.0.1", 9090)]),
        ("127.0.0.1", "127.0.0.1", [Address("127.0.0.1", 443)]),
        (
            "ipv4:10.0.0.1:1,10.0.0.2:2",
            "10.0.0.1:1",
            [Address("10.0.0.1", 1), Address("10.0.0.2", 2)],
        ),
        ("ipv6:[::1]:5", "[::1]:5", [Address("::1", 5)]),
        ("unix:/run/node.sock", "localhost", [Address(path="/run/node.sock")]),
        ("unix:///run/node.sock", "localhost", [Address(path="/run/node.sock")]),
        ("unix:node.sock", "localhost", [Address(path="node.sock")]),
    ],
)
def test_an_address_needs_no_look_up(target, authority, addresses):
    parsed = parse(target)
    assert (parsed.authority, list(parsed.fixed)) == (authority, addresses)


@pytest.mark.parametrize("target", ["limiter.internal:9090", "dns:///limiter.internal:9090"])
def test_a_name_is_looked_up(target):
    assert parse(target) == Target(
        "limiter.internal:9090", "limiter.internal", name="limiter.internal", port=9090
    )


@pytest.mark.parametrize(
    "target",
    [
        "",
        "xds:///limiter",
        "dns://8.8.8.8/limiter:9090",
        "unix:",
        "unix://host/path",
        "limiter:99999",
        "limiter:x",
        "[limiter]:1",
        "[127.0.0.1]:1",
        "ipv4:[::1]:1",
        "ipv4:limiter:1",
        "ipv6:",
        "a b:1",
    ],
)
def test_what_only_grpc_knows_is_left_to_it(target):
    assert parse(target) is None


async def test_each_address_of_a_name_is_found_once(monkeypatch):
    loop = asyncio.get_running_loop()
    ends = [("127.0.0.1", 7), ("127.0.0.1", 7), *((f"10.0.0.{n}", 7) for n in range(200))]

    async def found(name, port, *, type):  # noqa: A002 - as the loop has it
        assert (name, port, type) == ("limiter", 7, socket.SOCK_STREAM)
        return [(socket.AF_INET, type, 6, "", end) for end in ends]

    monkeypatch.setattr(loop, "getaddrinfo", found)
    addresses = await parse("limiter:7").addresses(loop)
    assert addresses[:2] == [Address("127.0.0.1", 7), Address("10.0.0.0", 7)]
    assert len(addresses) == MAX_ADDRESSES


async def test_fixed_addresses_are_what_they_are():
    loop = asyncio.get_running_loop()
    assert list(await parse("127.0.0.1:1").addresses(loop)) == [Address("127.0.0.1", 1)]
