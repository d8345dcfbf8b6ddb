"""Who cannot see well, has no mouse, a small screen or no JavaScript, can do it all the same."""

from typing import NamedTuple

import pytest
from playwright.sync_api import Page, expect

from tests.browser.accessibility import clipped, tab_stops, violations
from tests.browser.acts import RULE, create_rule, fill, press, reset, try_check
from tests.browser.conftest import LONG, open_session
from tests.browser.painted import painted

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]  # many pages each


class Walk(NamedTuple):
    """To every page there is, in each of its forms."""

    page: Page
    rule: str
    """Where the rule for ``LONG`` is."""

    def overview(self):
        self.page.goto("/")

    def rules(self):
        self.page.goto("/rules")

    def no_rules(self):
        self.page.goto("/rules?q=nothing-like-it")

    def new_rule(self):
        self.page.goto("/rules/new")

    def wrong_rule(self):
        self.page.goto("/rules/new")
        fill(self.page, RULE | {"Limit": "many"})
        press(self.page, "Show what changes")
        expect(self.page.get_by_role("alert")).to_be_visible()

    def a_rule(self):
        self.page.goto(self.rule)

    def preview(self):
        self.page.goto(self.rule)
        fill(self.page, {"Algorithm": "sliding_window", "Window": "60"})
        press(self.page, "Show what changes")
        expect(self.page.get_by_role("table", name="What changes")).to_be_visible()

    def conflict(self):
        self.page.goto(self.rule)
        self.page.locator("[name=etag]").evaluate("field => field.value = 'of another version'")
        press(self.page, "Show what changes")
        expect(self.page.get_by_role("table", name="Both versions")).to_be_visible()

    def switch(self):
        self.page.goto(f"{self.rule}/switch")

    def delete(self):
        self.page.goto(f"{self.rule}/delete")

    def changes(self):
        self.page.goto("/audit")

    def found_changes(self):
        self.page.goto("/audit?who=admin&action=create")

    def revert_form(self):
        self.page.goto("/audit/revert?to=1")
        expect(self.page.get_by_role("heading", name="Bring the rules back")).to_be_visible()

    def plans(self):
        self.page.goto("/plans")
        form = self.page.get_by_role("region", name="Assign", exact=True)
        fill(form, {"Identifier": "alice", "Plan": "gone"})
        press(form, "Assign")
        expect(self.page.get_by_role("table")).to_be_visible()

    def unassign_form(self):
        self.plans()
        press(self.page, "Unassign user alice")
        expect(self.page.get_by_role("heading", name="Take the plan away?")).to_be_visible()

    def try_form(self):
        self.page.goto("/try")

    def denied(self):
        while not try_check(self.page, LONG).startswith("denied"):
            pass

    def reset_form(self):
        self.page.goto("/try")
        form = self.page.get_by_role("region", name="Reset", exact=True)
        fill(form, {"Identifier": "alice", "Endpoint": LONG})
        press(form, "Reset …")
        expect(self.page.get_by_role("heading", name="Reset what was spent?")).to_be_visible()

    def recorded(self):
        self.page.goto(self.rule)
        self.page.get_by_role("link", name="Try this rule on recorded checks").click()
        self.page.get_by_label("Recorded").select_option("2023-11-15 00:00:00 UTC")

    def replayed(self):
        self.recorded()
        press(self.page, "Replay")
        expect(self.page.get_by_text("1 newly denied")).to_be_visible(timeout=60_000)

    def missing(self):
        self.page.goto("/no/such/page")

    def login(self):
        self.page.goto("/login")


WAYS = [name for name in vars(Walk) if not name.startswith("_") and name not in Walk._fields]


@pytest.fixture
def walk(operator, node, visit):
    """Sends a visitor of some kind on a walk past all pages; after each the caller has a look."""
    rule = create_rule(operator.page, Endpoint=LONG, Limit="1")

    def start(**options):
        visitor = visit(node.http_address, expected=frozenset({404, 409, 422}), **options)
        open_session(visitor)
        walk = Walk(visitor.page, rule)
        for way in WAYS:
            getattr(walk, way)()
            yield way, visitor.page

    return start


def test_no_column_is_clipped_where_everything_is_in_trouble(visit):
    with painted(20, strained=True) as address:
        page = visit(address).go("/")
        expect(page.locator("#live")).to_have_text("Live, every two seconds.")
        assert clipped(page) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_grave(walk, scheme):
    found = {way: violations(page) for way, page in walk(color_scheme=scheme)}
    assert found == {way: [] for way in WAYS}


def test_no_column_and_no_action_is_clipped_at_any_width(walk):
    found = {way: clipped(page) for way, page in walk()}
    assert found == {way: [] for way in WAYS}


def test_the_keyboard_reaches_everything_in_order_and_one_sees_where_it_is(walk):
    for way, page in walk():
        stops = tab_stops(page)
        reachable = page.locator(
            "a[href], summary, button:visible, input:visible, select:visible, textarea:visible, [tabindex='0']"
        ).count()
        assert len(stops) == reachable, way
        assert stops[0][0] == "Skip to the content", way
        assert [label for label, seen in stops if not seen] == [], way


def test_a_rule_is_made_and_met_by_keyboard_alone(operator):
    page = operator.go("/rules")

    def tab_to(label):
        for _ in range(60):
            page.keyboard.press("Tab")
            focused = page.evaluate(
                "(document.activeElement.labels?.[0] ?? document.activeElement).innerText.trim()"
            )
            if focused == label:
                return
        pytest.fail(f"Tab does not come to {label}")

    tab_to("New rule")
    page.keyboard.press("Enter")
    page.wait_for_url("**/rules/new")
    for label, text in (("Endpoint", "/typed"), ("Limit", "1"), ("Window", "3600")):
        tab_to(label)
        page.keyboard.press("Control+A")
        page.keyboard.type(text)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Create this rule?")).to_be_visible()
    tab_to("Create the rule")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status")).to_contain_text("The rule was created.")

    tab_to("Try a check")
    page.keyboard.press("Enter")
    page.wait_for_url("**/try")
    for label, text in (("Identifier", "alice"), ("Endpoint", "/typed")):
        tab_to(label)
        page.keyboard.type(text)
    page.keyboard.press("Enter")
    expect(page.locator("#answer")).to_contain_text("allowed")


def test_the_first_stop_leads_past_the_navigation(operator):
    page = operator.go("/rules")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.innerText") == "New rule"


def test_without_javascript_all_forms_work_and_numbers_are_there(node, visit):
    visitor = visit(node.http_address, java_script_enabled=False)
    open_session(visitor)
    page = visitor.page
    rule = create_rule(page, Endpoint="/plain", Limit="1")
    assert [try_check(page, "/plain").split()[0] for _ in range(2)] == ["allowed", "denied"]
    reset(page, "/plain")
    assert try_check(page, "/plain").startswith("allowed")
    page.goto(rule)
    fill(page, {"Limit": "2"})
    press(page, "Show what changes")
    press(page, "Store the change")
    expect(page.get_by_role("status")).to_contain_text("The change was stored.")
    page.goto("/")
    expect(page.get_by_role("main")).to_contain_text("Allowed")
    expect(page.get_by_role("table", name="Means")).to_contain_text("99 % within")
    assert page.locator("svg:visible, button[type=button]:visible").count() == 0
    page.get_by_role("link", name="1 h").click()
    expect(page.get_by_role("heading", name="The last hour")).to_be_visible()
    page.goto(f"{rule}/delete")
    press(page, "Delete the rule")
    expect(page.get_by_role("status")).to_contain_text("The rule was deleted.")
