"""The table of roles, cell by cell: each role on each interface with each credential, against real nodes."""

from contextlib import contextmanager
from itertools import groupby

import pytest

from ratelimitd.node.serving import TRANSPORTS
from ratelimitd.services.auth import Role
from tests.every_surface import REQUESTS, attempts
from tests.system.process import Files

CREDENTIALS = ("none", "wrong", "check", "admin")

OWN = {"none": "c--", "wrong": "c--", "check": "c--", "admin": "cra"}
"""Roles (check, read, admin) of each credential on a node without settings, where every caller may check."""

GUARDED = {"none": "---", "wrong": "---", "check": "c--", "admin": "cra"}
"""The same with CHECK_TOKEN and ADMIN_TOKEN."""

CHECK_ONLY = GUARDED
"""The same with CHECK_TOKEN alone: the node makes the admin token."""


@contextmanager
def node_with(directory, transport, *settings):
    # HTTP does not depend on the transport of gRPC.
    http = () if transport == "native" else ("--http-listen", "")
    with Files(directory).serving("--transport", transport, *http, *settings) as node:
        yield node


def holds(node, credential):
    """Return the headers of a credential."""
    tokens = {
        "none": None,
        "wrong": "wrong",
        "check": "the-check-token",
        "admin": node.admin_token or "the-admin-token",
    }
    return {"authorization": f"Bearer {tokens[credential]}"} if tokens[credential] else {}


def observed(node, credential):
    """Return the roles (check, read, admin) of a credential by interface."""
    found = sorted(attempts(node.grpc_address, node.http_address, holds(node, credential)))
    surfaces = 4 if node.http_address != "off" else 1
    assert len(found) >= 2 * len(REQUESTS) * surfaces
    return {
        surface: {role: {one.passed for one in same if one.role is role} for role in Role}
        for surface, same in ((s, list(g)) for s, g in groupby(found, lambda one: one.surface))
    }


@pytest.mark.deep
@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
@pytest.mark.parametrize(
    ("settings", "table"),
    [
        ((), OWN),
        (("--check-token", "the-check-token"), CHECK_ONLY),
        (("--check-token", "the-check-token", "--admin-token", "the-admin-token"), GUARDED),
    ],
    ids=["without settings", "with a check token", "with both tokens"],
)
def test_each_credential_holds_its_roles_on_every_surface(tmp_path, transport, settings, table):
    with node_with(tmp_path, transport, *settings) as node:
        for credential in CREDENTIALS:
            for surface, roles in observed(node, credential).items():
                for role, letter in ((Role.CHECK, "c"), (Role.READ, "r"), (Role.ADMIN, "a")):
                    expected = letter in table[credential]
                    assert roles[role] <= {expected}, (credential, surface, role)


@pytest.mark.deep
def test_no_header_makes_a_caller_an_administrator(tmp_path):
    with node_with(tmp_path, "native") as node:
        for header in ("x-forwarded-for", "forwarded", "x-real-ip"):
            for one in attempts(node.grpc_address, node.http_address, {header: "127.0.0.1"}):
                assert one.passed is (one.role is Role.CHECK), (header, one)
