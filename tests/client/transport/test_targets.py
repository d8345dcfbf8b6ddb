"""Names of nodes: what is understood as gRPC understands it, and what is left to it."""

import asyncio
import socket

import pytest

from ratelimitd_client.transport.targets import (
    MAX_ADDRESSES,
    Address,
    Target,
    parse,
    require_target,
)


@pytest.mark.parametrize(
    ("target", "authority", "addresses"),
    [
        ("127.0.0.1:9090", "127.0.0.1:9090", [Address("127.0.0.1", 9090)]),
        ("[::1]:9090", "[::1]:9090", [Address("::1", 9090)]),
        ("dns:///127.0.0.1:9090", "127.0.0.1:9090", [Address("127.0.0.1", 9090)]),
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


def test_the_dot_of_a_fully_qualified_name_is_not_in_that_of_the_certificate():
    assert parse("limiter.internal.:9090") == Target(
        "limiter.internal.:9090", "limiter.internal", name="limiter.internal.", port=9090
    )


@pytest.mark.parametrize(
    "target",
    [
        "xds:///limiter",
        "google-c2p:///limiter",
        "unix-abstract:node",
        "dns://8.8.8.8/limiter:9090",
        "dns:/limiter:9090",
        "DNS:///limiter:9090",
        "UNIX:/run/node.sock",
        "[fe80::1%eth0]:9090",
        "ipv6:[fe80::1%25eth0]:9090",
    ],
)
def test_what_only_grpc_knows_is_left_to_it(target):
    assert parse(target) is None
    require_target(target)


@pytest.mark.parametrize(
    "target",
    [
        "127.0.0.1:9090",
        "limiter.internal:9090",
        "lim_iter.:65535",
        "[::1]:9090",
        "dns:limiter:9090",
        "dns:///limiter:9090",
        "dns:///[::1]:9090",
        "ipv4:10.0.0.1:1,10.0.0.2:2",
        "ipv6:[::1]:5",
        "unix:node.sock",
        "unix:///run/node.sock",
    ],
)
def test_what_the_client_knows_is_a_target(target):
    assert parse(target) is not None
    require_target(target)


@pytest.mark.parametrize(
    "target",
    [
        "",
        " ",
        "passthrough:///limiter:9090",
        "vsock:1:9090",
        "limiter",
        "127.0.0.1",
        "::1",
        "[::1]",
        "dns:///limiter",
        "ipv4:10.0.0.1",
        "ipv4:10.0.0.1:1,10.0.0.2",
        "limiter:",
        ":9090",
        "limiter:0",
        "limiter:-1",
        "limiter:x",
        "limiter:99999",
        "limiter:9090/",
        "limiter:9090\n",
        "a b:1",
        "http://limiter:9090",
        "https://limiter:9090",
        "grpc://limiter:9090",
        "dns://limiter:9090",
        "dns:",
        "[limiter]:1",
        "[127.0.0.1]:1",
        "ipv4:[::1]:1",
        "ipv4:limiter:1",
        "ipv4://10.0.0.1:1",
        "ipv6:",
        "unix:",
        "unix://host/path",
        "unix-abstract:",
        "xds:///",
    ],
)
def test_a_name_of_no_node_is_refused_and_told_how_to_write_one(target):
    assert parse(target) is None
    with pytest.raises(ValueError, match=r"^target must be host:port .* limiter\.internal:9090"):
        require_target(target)


def test_a_target_that_is_refused_is_not_shown():
    with pytest.raises(ValueError, match=r"^target must") as refused:
        require_target("http://user:password@limiter:9090")
    assert "password" not in str(refused.value)


@pytest.mark.parametrize("target", [None, b"limiter:9090", 9090])
def test_a_target_that_is_no_text_is_refused_with_its_type(target):
    with pytest.raises(TypeError, match=rf"^target must be text .* not {type(target).__name__}$"):
        require_target(target)


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
