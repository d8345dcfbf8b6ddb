"""What the pages refuse, and how: nothing is stored, and whoever sits there learns why."""

import re
import time

import pytest
from playwright.sync_api import expect

from ratelimitd.web.pages.sessions import SESSION_S, Sessions
from tests.browser.acts import RULE, create_rule, fill, press, try_check
from tests.browser.conftest import ADMIN_TOKEN, carry, rules_of
from tests.browser.stranger import site

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]  # many pages each

HOSTILE = [
    "/<script>document.title='broken in'</script>",
    '/"><img src=x onerror="document.title=\'broken in\'">',
    "/' autofocus onfocus='document.title=1",
    "javascript:document.title='broken in'",
    "/{{ 7 * 7 }}/${7 * 7}/%3Cscript%3E",
    "/\u202e/&lt;b&gt;",
]

FORM = """<!doctype html><link rel=icon href=data:,>
<form method="post" action="http://{address}/rules/new">
<input name="endpoint" value="/stolen"><input name="identifier_type" value="user"><input name="limit" value="1">
<input name="window_seconds" value="60"><input name="algorithm" value="fixed_window"><input name="step" value="store">
<input name="form_token" value="{token}"><button>Win a prize</button></form>"""


def limits(node):
    return {rule.endpoint: rule.limit for rule in rules_of(node)}


def refused(node, cause):
    return node.metric(f'rate_limiter_web_refused_total{{cause="{cause}"}}')


def test_an_edit_of_a_rule_that_changed_meanwhile_shows_both_versions(node, operator):
    mine = operator.page
    mine.goto(create_rule(mine, Limit="3"))
    theirs = operator.context.new_page()
    theirs.goto(mine.url)
    for page, limit in ((theirs, "7"), (mine, "9")):
        fill(page, {"Limit": limit})
        press(page, "Show what changes")
    press(theirs, "Store the change")
    expect(theirs.get_by_role("status")).to_contain_text("stored")
    press(mine, "Store the change")

    expect(mine.get_by_role("heading", name="This rule was changed meanwhile")).to_be_visible()
    limit = mine.get_by_role("row", name="Limit").get_by_role("cell")
    assert [cell.inner_text().split()[0] for cell in limit.all()] == ["7", "9"]
    assert limits(node) == {"/orders": 7}

    press(mine, "Go on with yours")
    expect(mine.get_by_label("Limit", exact=True)).to_have_value("9")
    press(mine, "Show what changes")
    press(mine, "Store the change")
    expect(mine.get_by_role("status")).to_contain_text("stored")
    assert limits(node) == {"/orders": 9}


def test_a_rule_that_was_deleted_meanwhile_is_not_brought_back(node, operator):
    mine = operator.page
    rule = create_rule(mine)
    mine.goto(rule)
    theirs = operator.context.new_page()
    theirs.goto(f"{rule}/delete")
    press(theirs, "Delete the rule")
    expect(theirs.get_by_role("status")).to_contain_text("deleted")
    fill(mine, {"Limit": "9"})
    press(mine, "Show what changes")
    expect(mine.get_by_role("alert")).to_contain_text("This rule was deleted meanwhile")
    assert limits(node) == {}


def test_an_error_stands_at_its_field_and_what_was_typed_stays(node, operator):
    page = operator.go("/rules/new")
    wrong = RULE | {"Endpoint": "", "Limit": "many", "Window": "0"}
    fill(page, wrong)
    press(page, "Show what changes")
    for label, value in wrong.items():
        field = page.get_by_label(label, exact=True)
        expect(field).to_have_value(value)
        if value in {"", "many", "0"}:
            expect(field).to_have_attribute("aria-invalid", "true")
            expect(field).to_have_accessible_description(re.compile(r"\w+ \w+"))
    assert page.get_by_role("textbox").and_(page.locator("[aria-invalid]")).count() == 3
    assert limits(node) == {}


def test_script_in_a_name_is_text(node, operator):
    page = operator.page
    rules = [create_rule(page, Endpoint=endpoint, Limit="1") for endpoint in HOSTILE]
    for endpoint in HOSTILE:
        assert try_check(page, endpoint, identifier=endpoint).startswith("allowed")
        assert try_check(page, endpoint, identifier=endpoint).startswith("denied")
        assert_harmless(page, endpoint)
    for endpoint, rule in zip(HOSTILE, rules, strict=True):
        for path in (rule, f"{rule}/switch", f"{rule}/delete"):
            page.goto(path)
            assert_harmless(page, endpoint)
    for path in ("/rules", "/audit", "/"):
        page.goto(path)
        assert_harmless(page, *HOSTILE)


def assert_harmless(page, *endpoints):
    """A page shows the endpoints as they are, and nothing in them has become a part of it."""
    for endpoint in endpoints:
        expect(page.get_by_role("main")).to_contain_text(endpoint)
    assert page.locator("script:not([src])").count() == 0
    assert page.locator("main img, main [onfocus], main [onerror]").count() == 0
    assert page.title().endswith("ratelimitd")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_form_on_another_site_changes_nothing(node, operator, host):
    """Under the node's own address on another port a browser even sends the session along."""
    token = operator.go("/rules/new").locator("main [name=form_token]").input_value()
    form = FORM.format(address=node.http_address, token=token)
    before = refused(node, "cross_site")
    with site({"/": form}, host=host) as address:
        page = operator.context.new_page()
        page.goto(f"http://{address}/")
        press(page, "Win a prize")
        expect(page.locator("body")).to_contain_text("This request came from another site")
    operator.requested = [url for url in operator.requested if address not in url]
    assert limits(node) == {}
    assert refused(node, "cross_site") == before + 1


def test_a_form_without_its_token_changes_nothing(node, operator):
    before = refused(node, "form_token")
    page = operator.go("/rules/new")
    fill(page, RULE)
    page.locator("main [name=form_token]").evaluate("field => field.remove()")
    press(page, "Show what changes")
    expect(page.get_by_role("heading", name="This form is not valid any more")).to_be_visible()
    assert limits(node) == {}
    assert refused(node, "form_token") == before + 1


def test_a_form_of_a_session_that_has_ended_changes_nothing(node, operator):
    before = refused(node, "session_expired")
    page = operator.go("/rules/new")
    fill(page, RULE)
    carry(operator, Sessions(ADMIN_TOKEN, lambda: time.time() - SESSION_S - 1).open())
    press(page, "Show what changes")
    expect(page.get_by_role("heading", name="Your session has ended")).to_be_visible()
    assert limits(node) == {}
    assert refused(node, "session_expired") == before + 1
