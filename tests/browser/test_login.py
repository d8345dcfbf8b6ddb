"""Who may see the pages, where an ADMIN_TOKEN is set: by the form, for eight hours, on every node with that token."""

import time
from urllib.parse import urlsplit

import pytest

from ratelimitd.web.pages.sessions import SESSION_S, Sessions
from tests.browser.conftest import ADMIN_TOKEN, carry, log_in
from tests.system.process import Files

pytestmark = pytest.mark.system

REFUSED = frozenset({401})
WRONG_TOKENS = 'rate_limiter_web_refused_total{cause="wrong_token"}'


def path_of(page):
    return urlsplit(page.url).path


def go_back(page):
    """As the button of the browser does; Playwright asks for the history first, maybe of a page that goes."""
    page.evaluate("() => { history.back(); }")


def test_who_logs_in_comes_back_to_where_they_wanted_to_go_and_logs_out(node, visit):
    page = visit(node.http_address).go("/rules?enabled=no")
    assert path_of(page) == "/login"
    log_in(page)
    assert page.url.endswith("/rules?enabled=no")
    page.get_by_role("button", name="Log out").click()
    assert path_of(page) == "/login"
    go_back(page)
    page.wait_for_url("**/login?next=/rules%3Fenabled%3Dno")
    page.goto("/rules")
    assert path_of(page) == "/login"


def test_another_token_is_refused_and_counted(node, visit):
    before = node.metric(WRONG_TOKENS)
    page = visit(node.http_address, expected=REFUSED).go("/login")
    page.get_by_label("Token").fill("somebody else's")
    page.get_by_role("button", name="Log in").click()
    assert page.get_by_role("alert").inner_text() == "This token may not log in on this node."
    page.goto("/rules")
    assert path_of(page) == "/login"
    assert node.metric(WRONG_TOKENS) == before + 1


def test_the_link_of_a_new_node_opens_its_pages_once(tmp_path, visit):
    with Files(tmp_path).serving() as node:
        page = visit(node.http_address).page
        page.goto(node.login_link)
        assert path_of(page) == "/"
        assert "code" not in page.url
        page.goto("/rules")
        assert path_of(page) == "/rules"
        other = visit(node.http_address, expected=REFUSED).page
        other.goto(node.login_link)
        assert "was used before" in other.get_by_role("alert").inner_text()
        other.get_by_label("Token").fill(node.admin_token)
        other.get_by_role("button", name="Log in").click()
        assert path_of(other) == "/"


def test_a_session_ends_after_eight_hours(node, visit):
    visitor = visit(node.http_address)
    for age_s, expected in ((SESSION_S - 60, "/rules"), (SESSION_S + 1, "/login")):
        carry(visitor, Sessions(ADMIN_TOKEN, lambda age=age_s: time.time() - age).open())
        assert path_of(visitor.go("/rules")) == expected


def test_a_session_of_another_token_is_none(node, visit):
    visitor = visit(node.http_address)
    carry(visitor, Sessions("the token of yesterday", time.time).open())
    assert path_of(visitor.go("/rules")) == "/login"
