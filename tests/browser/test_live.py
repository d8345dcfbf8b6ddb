"""The page goes on being live when what is in front of its node is not."""

import pytest
from playwright.sync_api import expect

from tests.browser.conftest import open_session

pytestmark = [pytest.mark.system]

REFUSED_MS = 20_000
"""After how long the page asks again, as in overview.js."""


@pytest.mark.parametrize("status", [401, 502, 503])
def test_live_numbers_that_were_refused_are_asked_for_again(node, visit, status):
    visitor = visit(node.http_address, expected=frozenset({status}))
    open_session(visitor)
    visitor.context.clock.install()
    refused = []

    def refuse_once(route):
        refused.append(route.request.url)
        route.fulfill(status=status)

    visitor.context.route("**/events*", refuse_once, times=1)
    page = visitor.go("/")
    expect(page.locator("#live")).to_have_text("Not live: reload the page, or wait.")
    page.clock.fast_forward(REFUSED_MS)
    expect(page.locator("#live")).to_have_text("Live, every two seconds.")
    assert len(refused) == 1
