"""This machine: ports, open files, event loop."""

import asyncio
import contextlib
import importlib.util
import os
import resource

import pytest
import trustme

from ratelimitd.buckets.state_dir import StateDir
from ratelimitd.cli.doctor.finding import (
    MAX_NAMED,
    check_event_loop,
    check_open_files,
    check_ports,
    check_unmatched,
)
from ratelimitd.settings.table import Settings
from ratelimitd.settings.urls import reachable
from ratelimitd.testing import running_node
from ratelimitd_client import AsyncRateLimiterClient


def settings(**given):
    return Settings.load({}, {name.upper(): str(value) for name, value in given.items()})


async def ports(**given):
    return await check_ports(settings(**given))


@pytest.mark.parametrize(
    ("hard", "level", "what"),
    [
        (resource.RLIM_INFINITY, "ok", "no limit"),
        (10_256, "ok", "at most 10256"),
        (10_255, "warning", "at most 10255: room for 9999 connections"),
        (100, "warning", "at most 100: room for 1 connections"),
    ],
)
def test_limit_of_open_files_bounds_the_connections(monkeypatch, hard, level, what):
    monkeypatch.setattr(resource, "getrlimit", lambda _kind: (64, hard))
    [finding] = check_open_files()
    assert (finding.level, finding.what) == (level, what)


@pytest.mark.parametrize(("found", "level"), [(object(), "ok"), (None, "warning")])
def test_slow_event_loop_is_reported(monkeypatch, found, level):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: found)
    [finding] = check_event_loop()
    assert finding.level == level


async def test_free_ports_are_fine(unused_tcp_port):
    grpc, http = await ports(listen=f"127.0.0.1:{unused_tcp_port}", http_listen="127.0.0.1:0")
    assert (grpc.level, grpc.what) == ("ok", f"127.0.0.1:{unused_tcp_port}: free")
    assert http.what.endswith("a free port is picked")
    assert len(await ports(listen="127.0.0.1:0", http_listen="")) == 1


async def test_ports_of_a_running_node_are_fine():
    async with running_node() as node:
        for finding in await ports(listen=node.grpc_address, http_listen=node.http_address):
            assert (finding.level, "a ratelimitd listens" in finding.what) == ("ok", True)


@pytest.mark.parametrize(
    "more",
    [{}, {"tls_client_ca": "ca.pem"}, {"transport": "grpcio"}],
    ids=["tls", "mtls", "grpcio"],
)
async def test_port_of_a_running_node_with_tls_is_fine(tmp_path, more):
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate = authority.issue_cert("localhost")
    certificate.private_key_and_cert_chain_pem.write_to_path(tmp_path / "node.pem")
    given = {"tls_cert": tmp_path / "node.pem", "tls_key": tmp_path / "node.pem", **more}
    if "tls_client_ca" in more:
        given["tls_client_ca"] = tmp_path / "ca.pem"
    async with running_node(state_dir=tmp_path / "state", **given) as node:
        given |= {"state_dir": tmp_path / "state"} if more else {}  # plain TLS answers with a text
        grpc, _ = await ports(listen=node.grpc_address, http_listen=node.http_address, **given)
        assert (grpc.level, "a ratelimitd listens" in grpc.what) == ("ok", True)


@pytest.mark.parametrize("answer", [b"SSH-2.0\r\n", b""])
async def test_port_of_another_program_is_a_problem(answer):
    async def serve(_reader, writer):
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        [finding] = await ports(listen=address, http_listen="")
        assert (finding.level, "LISTEN" in finding.remedy) == ("problem", True)
        assert "in use" in finding.what
        # A listener without a textual answer may be this node.
        [finding] = await ports(listen=address, http_listen="", transport="grpcio")
        assert finding.level == "warning"


async def test_port_for_haproxy_is_checked(tmp_path):
    given = {"trusted_proxies": "127.0.0.1", "state_dir": tmp_path, "loopback_admin": "off"}
    async with running_node(spoe_listen="127.0.0.1:0", **given) as node:
        given |= {"listen": node.grpc_address, "http_listen": "", "spoe_listen": node.spoe_address}
        *_, finding = await ports(**given)
        assert (finding.area, finding.level) == ("SPOE_LISTEN", "ok")
        *_, finding = await ports(**given | {"state_dir": tmp_path / "other"})
        assert (finding.level, "in use, by this node or" in finding.what) == ("warning", True)
    *_, finding = await ports(**given)
    assert finding.what.endswith(": free")


async def test_address_of_another_machine_is_a_problem():
    for transport in ("native", "grpcio"):
        [finding] = await ports(listen="192.0.2.1:9090", http_listen="", transport=transport)
        assert (finding.level, "Cannot assign" in finding.what) == ("problem", True)


async def unmatched(state_dir, **given):
    return await check_unmatched(settings(state_dir=state_dir, **given))


async def test_state_directory_of_another_user_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(StateDir.lock("ratelimitd-state")):
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        [finding] = await unmatched("ratelimitd-state")
    assert finding.level == "warning"
    assert finding.what.endswith("ratelimitd-state: belongs to another user")


async def test_endpoints_without_a_rule_are_reported_where_the_node_runs(tmp_path):
    assert await unmatched(tmp_path) == []
    rules = tmp_path / "rules.yaml"
    rules.write_text("rules:\n- {endpoint: /a, identifier_type: user, limit: 9, window: 1m}\n")
    async with running_node(state_dir=tmp_path, rules_file=rules, loopback_admin="off") as node:
        [finding] = await unmatched(tmp_path)
        assert (finding.level, finding.what) == ("ok", "every check of the last minutes had a rule")
        async with AsyncRateLimiterClient(node.grpc_address, timeout_s=10) as client:
            for number in range(MAX_NAMED + 2):
                await client.check("ada", "user", f"/b{number}")
        node._denials.fold()
        [finding] = await unmatched(tmp_path)
        assert finding.level == "warning"
        assert finding.what.startswith("checks without a rule are all allowed: /b")
        assert finding.what.endswith(" and 2 more")
        [refused] = await unmatched(tmp_path, admin_token="w" * 16)
        assert (refused.level, "endpoints without a rule: UNAUTHENTICATED" in refused.what) == (
            "ok",
            True,
        )
    assert await unmatched(tmp_path) == []


TEMPLATES = "GET /orders/{id},/carts,/cart,/files/{path...}"


def write_rules(path, *endpoints):
    of = "identifier_type: ip, limit: 9, window: 1m"
    path.write_text("rules:\n" + "".join(f"- {{endpoint: '{one}', {of}}}\n" for one in endpoints))
    return path


async def test_paths_without_a_template_are_told(tmp_path):
    rules = write_rules(tmp_path / "rules.yaml", "GET /order/{id}")
    async with running_node(state_dir=tmp_path, rules_file=rules) as node:
        async with AsyncRateLimiterClient(node.grpc_address, timeout_s=10) as client:
            await client.check("192.0.2.7", "ip", "unmatched")
        node._denials.fold()
        why, finding = await unmatched(tmp_path, auth_endpoints=TEMPLATES)
    assert why.what.startswith("unmatched: paths without a template in AUTH_ENDPOINTS")
    assert finding.what.endswith("all allowed: unmatched")


async def test_a_template_whose_rule_is_misspelled_is_told_where_a_rule_for_all_judges(tmp_path):
    rules = write_rules(tmp_path / "rules.yaml", "GET /order/{id}", "/carts", "*")
    async with running_node(state_dir=tmp_path, rules_file=rules):
        hidden, finding = await unmatched(tmp_path, auth_endpoints=TEMPLATES)
    assert hidden.level == "warning"
    assert hidden.what == (
        "GET /orders/{id} of AUTH_ENDPOINTS has no rule of its own;"
        " that of GET /order/{id} is spelled nearly the same"
    )
    assert finding.level == "ok"


@pytest.mark.parametrize(
    ("listens_at", "target"),
    [
        ("0.0.0.0:1", "127.0.0.1:1"),
        ("[::]:1", "[::1]:1"),
        ("192.0.2.1:1", "192.0.2.1:1"),
    ],
)
def test_node_that_listens_on_all_addresses_is_called_on_this_machine(listens_at, target):
    assert reachable(listens_at) == target
