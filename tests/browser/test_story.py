"""What an operator does with a node, from the first login to the last rule, in the order in which they would do it."""

import re

import pytest
from playwright.sync_api import expect

from tests.browser.acts import CALLER, create_rule, fill, load, press, reset, try_check
from tests.browser.conftest import log_in, rules_of

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]  # many pages each

RISEN = re.compile(r"L[\d.]+ (?!168\.0)")
"""A line that is not all at the bottom of its chart: 12 rem high, with room for 24 px of labels."""

ALLOWED, DENIED = "allowed user alice on /orders", "denied user alice on /orders"


def test_a_rule_is_created_seen_to_limit_edited_switched_off_and_deleted(node, visit):
    page = visit(node.http_address).go("/")
    log_in(page)

    rule = create_rule(page, Limit="3")
    assert [try_check(page) for _ in range(4)] == [ALLOWED] * 3 + [DENIED]

    page.goto("/")
    figures = {name: page.locator("#state .tile", has_text=name) for name in ("Allowed", "Blocked")}
    lines = [page.locator(f"[data-chart=checks] path.line{number}") for number in (1, 2)]
    for figure in figures.values():
        expect(figure.locator("b")).to_have_text("0")
    with load(node, "/orders"):
        for figure in figures.values():
            expect(figure.locator("b")).not_to_have_text("0")
        for line in lines:
            expect(line).to_have_attribute("d", RISEN)
    denied = page.get_by_role("table", name="Endpoints with the most denials")
    expect(denied.get_by_role("row", name="/orders")).to_be_visible()
    identifiers = page.get_by_role("table", name="Identifiers with the most denials")
    expect(identifiers).to_contain_text("call…")
    expect(identifiers).not_to_contain_text(CALLER)
    page.get_by_role("link", name="Show names").click()
    expect(identifiers).to_contain_text(CALLER)

    reset(page)
    assert [try_check(page) for _ in range(4)] == [ALLOWED] * 3 + [DENIED]

    page.goto(rule)
    fill(page, {"Limit": "5"})
    press(page, "Show what changes")
    changed = page.get_by_role("row", name="Limit")
    expect(changed).to_have_text("Limit 3 → becomes 5", use_inner_text=True)
    press(page, "Store the change")
    expect(page.get_by_role("status")).to_contain_text("The change was stored.")
    assert [try_check(page) for _ in range(3)] == [ALLOWED] * 2 + [DENIED]

    page.goto("/rules")
    page.get_by_role("link", name="Disable /orders user").click()
    expect(page.get_by_role("main")).to_contain_text("no rule, so they are all allowed")
    press(page, "Store the change")
    assert try_check(page) == ALLOWED

    page.goto("/rules")
    page.get_by_role("link", name="Enable /orders user").click()
    press(page, "Store the change")
    assert try_check(page) == DENIED

    page.goto("/rules")
    page.get_by_role("link", name="Delete /orders user").click()
    press(page, "Delete the rule")
    expect(page.get_by_role("status")).to_contain_text("The rule was deleted.")
    expect(page.get_by_role("main")).to_contain_text("There are no rules yet")
    assert try_check(page) == ALLOWED

    page.get_by_role("link", name="Changes").click()
    rows = page.get_by_role("table", name="Changes of rules").locator("tbody tr").all()[:5]
    told = [[cell.inner_text() for cell in row.get_by_role("cell").all()[1:3]] for row in rows]
    assert [what for _, what in told] == ["deleted", "changed", "changed", "changed", "created"]
    assert {who for who, _ in told} == {"admin@127.0.0.1"}


def test_a_deleted_rule_comes_back_by_a_revert(node, operator):
    page = operator.page
    page.goto(f"{create_rule(page, Limit='3')}/delete")
    press(page, "Delete the rule")
    page.get_by_role("link", name="Changes").click()
    page.get_by_label("What").select_option("created")
    press(page, "Search")
    page.get_by_role("link", name="Revert to here").first.click()
    expect(page.get_by_role("main")).to_contain_text("1 rule is created.")
    press(page, "Revert")
    expect(page.get_by_role("status")).to_contain_text("The rules were reverted.")
    [rule] = rules_of(node)
    assert (rule.endpoint, rule.limit) == ("/orders", 3)
