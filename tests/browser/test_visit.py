"""What the other tests of this package lean on: a fault that nobody looks for is found all the same."""

import pytest

from tests.browser.stranger import site
from tests.browser.visit import Visit

pytestmark = pytest.mark.system

FAULTY = {
    "a script that fails": ("<script>throw new Error('broken')</script>", "", "broken"),
    "a console error": ("<script>console.error('it was I')</script>", "", "it was I"),
    "something that is missing": ('<img src="http://127.0.0.1:1/x.png">', "", "127.0.0.1:1"),
    "another host": ('<img src="http://example.com/x.png">', "", "request to http://example.com/"),
    "a refused script": ("<script>1</script>", "script-src 'self'", "Content Security Policy"),
    "a refused style": (
        '<p style="color: red">',
        "default-src 'self'",
        "Content Security Policy",
    ),
}


@pytest.mark.parametrize("name", FAULTY)
def test_a_visitor_notices(browser, name):
    html, policy, expected = FAULTY[name]
    with site({"/": f"<!doctype html><link rel=icon href=data:,>{html}"}, policy=policy) as address:
        visit = Visit(browser, address)
        visit.go("/")
        faults = visit.faults
        visit.close()
    assert any(expected in fault for fault in faults), faults


def test_a_visitor_finds_no_fault_with_a_page_that_has_none(visit):
    with site({"/": "<!doctype html><link rel=icon href=data:,><p>fine"}) as address:
        assert visit(address).go("/").inner_text("p") == "fine"


def test_an_answer_that_the_test_provokes_is_no_fault(node, browser):
    for expected, found in ((frozenset({404}), 0), (frozenset(), 1)):
        visit = Visit(browser, node.http_address, expected=expected)
        visit.go("/there/is/no/such/page")
        faults = [fault for fault in visit.faults if "favicon" not in fault]
        visit.close()
        assert len(faults) == found
