"""One browser and one node for all tests of this package; what a test leaves in the node is taken away after it."""

import time

import pytest

from ratelimitd.web.pages.page_base import SESSION_COOKIE
from ratelimitd.web.pages.sessions import Sessions
from ratelimiter.v1 import ratelimiter_pb2 as pb
from tests.browser.visit import Visit, chromium
from tests.system.process import START_S, Files

ADMIN_TOKEN = "token-of-the-tests"
AS_ADMIN = [("authorization", f"Bearer {ADMIN_TOKEN}")]


@pytest.fixture(scope="package")
def browser():
    with chromium() as browser:
        yield browser


@pytest.fixture
def visit(browser):
    """Sends a visitor to an address; whoever comes must leave without having seen a fault."""
    visits = []

    def start(address, **options):
        visits.append(Visit(browser, address, **options))
        return visits[-1]

    yield start
    faults = [fault for visit in visits for fault in visit.faults]
    for visit in visits:
        visit.close()
    assert faults == []


@pytest.fixture(scope="package")
def served(tmp_path_factory):
    files = Files(tmp_path_factory.mktemp("node"))
    with files.serving("--node-id", "n1", "--admin-token", ADMIN_TOKEN) as node:
        yield node


@pytest.fixture
def node(served):
    """A node that lets in who knows its ADMIN_TOKEN; it has no rules."""
    yield served
    for rule in rules_of(served):
        request = pb.DeleteRateLimitRequest(id=rule.id)
        served.rules.DeleteRateLimit(request, timeout=START_S, metadata=AS_ADMIN)


@pytest.fixture
def operator(node, visit):
    """Somebody who has logged in; to be refused is what they are here for."""
    visitor = visit(node.http_address, expected=frozenset({401, 403, 404, 409, 422}))
    open_session(visitor)
    return visitor


def rules_of(node):
    """The rules of a node, also of one with an ADMIN_TOKEN."""
    request = pb.ListRateLimitsRequest()
    return node.rules.ListRateLimits(request, timeout=START_S, metadata=AS_ADMIN).rate_limits


def log_in(page):
    """Fill in the form that a visitor without a session is sent to."""
    page.get_by_label("Token").fill(ADMIN_TOKEN)
    page.get_by_role("button", name="Log in").click()


def open_session(visitor):
    """Let a visitor be one who has logged in."""
    carry(visitor, Sessions(ADMIN_TOKEN, time.time).open())


def carry(visitor, cookie):
    """Give a visitor the cookie of a session."""
    visitor.context.add_cookies(
        [{"name": SESSION_COOKIE, "value": cookie, "url": visitor.origin, "sameSite": "Strict"}]
    )
