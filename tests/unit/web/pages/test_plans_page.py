"""The page of the plans, used without scripts."""

import html
import re

import pytest
import pytest_asyncio

from ratelimitd.testing import running_node
from tests.page_visitor import away, errors_in, hidden_in, text_of

ALICE = {"identifier_type": "user", "identifier": "alice", "plan": "pro"}
SCRIPT = "<script>alert('x')</script>"


@pytest_asyncio.fixture
async def node(clock, tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "rules:\n- {endpoint: /orders, identifier_type: user, limit: 3, window_seconds: 60,"
        " algorithm: fixed_window, plans: {pro: [{limit: 9, window_seconds: 60, algorithm: fixed_window}]}}\n"
    )
    async with running_node(clock=clock, rules_file=rules) as found:
        yield found


async def assigned(visitor, **fields):
    answer = await visitor.post("/plans/assign", {**ALICE, **fields})
    assert (answer.status_code, answer.headers["location"]) == (303, "/plans?done=assigned")
    return await visitor.get(answer.headers["location"])


async def test_page_without_assignments_says_so_and_has_the_form(visitor):
    answer = await visitor.get("/plans")
    assert answer.status_code == 200
    assert "No identity is assigned to a plan" in text_of(answer)
    assert '<a href="/plans" aria-current="page">Plans</a>' in answer.text


async def test_assigned_plan_is_in_force_and_listed(visitor):
    page = await assigned(visitor, expires="1h", note="trial")
    assert "The plan was assigned. It holds from now on." in text_of(page)
    assert "user alice pro 2023-11-15 01:00:00 UTC trial" in text_of(page)
    assert "1 identity is assigned to plans" in text_of(page)
    check = {**ALICE, "endpoint": "/orders", "cost": "1", "action": "check"}
    assert "Remaining 8 of 9" in text_of(await visitor.post("/try", check))


async def test_no_address_contains_an_identifier(visitor):
    page = await assigned(visitor)
    assert not re.search(r'(href|action)="[^"]*alice', page.text)


async def test_errors_are_shown_at_the_field_and_input_is_kept(visitor):
    wrong = {"identifier_type": "ip", "identifier": "alice", "plan": "Pro", "note": "n" * 256}
    answer = await visitor.post("/plans/assign", {**wrong, "expires": "tomorrow"})
    assert answer.status_code == 422
    errors = errors_in(answer.text)
    assert set(errors) == {"assign-identifier", "assign-plan", "assign-note", "assign-expires"}
    assert "a duration such as 30d" in errors["assign-expires"]
    assert 'value="alice"' in answer.text
    answer = await visitor.post("/plans/assign", {**ALICE, "expires": "tomorrow"})
    assert (answer.status_code, set(errors_in(answer.text))) == (422, {"assign-expires"})
    answer = await visitor.post("/plans/assign", {**ALICE, "expires": "2020-01-01"})
    assert (answer.status_code, set(errors_in(answer.text))) == (422, {"assign-expires"})
    assert "No identity is assigned" in text_of(await visitor.get("/plans"))


async def test_input_of_others_is_escaped(visitor):
    page = await assigned(visitor, identifier=SCRIPT, note=SCRIPT)
    assert SCRIPT not in page.text
    assert SCRIPT in html.unescape(page.text)


async def test_identifier_with_control_characters_is_unassigned(visitor):
    page = await assigned(visitor, identifier="a\r%0a\0é")
    row = hidden_in(page.text)
    confirmed = hidden_in((await visitor.post("/plans/unassign", row)).text)
    # A browser sends CRLF for the carriage return, and U+FFFD for the zero byte.
    assert row["identifier"].isprintable()
    assert confirmed["identifier"].isprintable()
    answer = await visitor.post("/plans/unassign", {**confirmed, "step": "store"})
    assert answer.headers["location"] == "/plans?done=unassigned"


async def test_plan_is_unassigned_after_confirmation(visitor):
    page = await assigned(visitor)
    row = {name: value for name, value in hidden_in(page.text).items() if name != "form_token"}
    answer = await visitor.post("/plans/unassign", row)
    assert "user alice leaves the plan pro" in text_of(answer)
    confirmed = hidden_in(answer.text)
    confirmed.pop("form_token")
    answer = await visitor.post("/plans/unassign", {**confirmed, "step": "store"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/plans?done=unassigned")
    assert "The assignment was removed." in text_of(await visitor.get("/plans?done=unassigned"))
    answer = await visitor.post("/plans/unassign", {**confirmed, "step": "store"})
    assert answer.status_code == 404
    assert "the identity is assigned to no plan" in text_of(answer)


@pytest.mark.parametrize("etag", ["stale", ""])
async def test_assignment_changed_meanwhile_is_not_removed(visitor, etag):
    await assigned(visitor)
    stale = {**ALICE, "etag": etag, "step": "store"}
    answer = await visitor.post("/plans/unassign", stale)
    assert answer.status_code == 409
    assert "This assignment was changed meanwhile" in text_of(answer)
    assert "user alice pro" in text_of(answer)


async def test_assignments_are_searched_by_type_prefix_and_plan(visitor):
    for identifier, plan in (("alice", "pro"), ("albert", "blocked"), ("bob", "pro")):
        await assigned(visitor, identifier=identifier, plan=plan)
    await assigned(visitor, identifier_type="ip", identifier="::1")

    async def found(**fields):
        answer = await visitor.post("/plans", fields)
        assert answer.status_code == 200
        return re.findall(r'<th scope="row"><code>([^<]*)</code>', answer.text)

    assert await found(identifier_type="user", identifier_prefix="al") == ["albert", "alice"]
    assert await found(plan="pro") == ["::1", "alice", "bob"]
    assert await found(identifier_type="ip") == ["::1"]
    assert await found(plan="nobody") == []
    answer = await visitor.get("/plans?plan=blocked")
    assert "albert" in text_of(answer)
    assert "alice" not in text_of(answer)


async def test_invalid_search_is_reported_at_the_field(visitor):
    answer = await visitor.post("/plans", {"identifier_prefix": "al", "plan": "No Plan"})
    assert (answer.status_code, set(errors_in(answer.text))) == (
        422,
        {"search-type", "search-plan"},
    )
    for field in ("search-type", "search-plan"):
        described = f'aria-invalid="true" aria-describedby="{field}-error"'
        assert re.search(rf'<(input|select) id="{field}"[^>]*{described}', answer.text)


async def test_later_pages_are_forms(visitor, monkeypatch):
    monkeypatch.setattr("ratelimitd.web.pages.plans.PAGE_ASSIGNMENTS", 2)
    for number in range(3):
        await assigned(visitor, identifier=f"u{number}")
    page = await visitor.get("/plans")
    assert "u1" in page.text
    assert "u2" not in page.text
    later = {"page_token": hidden_in(page.text)["page_token"]}
    page = await visitor.post("/plans", later)
    assert re.findall(r'<th scope="row"><code>([^<]*)</code>', page.text) == ["u2"]
    assert '<a href="/plans">← The first</a>' in page.text


async def test_assigned_plans_that_no_rule_names_are_reported(visitor):
    page = await assigned(visitor, plan="blocked")
    assert "No rule names" not in text_of(page)
    await assigned(visitor, identifier="bob", plan="gone")
    page = await assigned(visitor, identifier="carol", plan="gone")
    assert "No rule names this plan, so the rules' own limits hold: gone (2 assigned)." in text_of(
        page
    )
    assert page.text.count("no rule names it") == 2
    for number in range(10):
        page = await assigned(visitor, identifier=f"u{number}", plan=f"a{number}")
    assert "a0 (1 assigned), a1 (1 assigned)" in text_of(page)
    assert "a9 (1 assigned) and 1 more." in text_of(page)


async def test_invalid_page_is_an_error_rather_than_an_empty_list(visitor):
    answer = await visitor.post("/plans", {"page_token": "x"})
    assert answer.status_code == 422
    assert "page_token" in text_of(answer)
    assert "No identity is assigned" not in text_of(answer)


async def test_audit_page_lists_changes_of_assignments(visitor):
    await assigned(visitor, note="n")
    await assigned(visitor, plan="blocked", expires="1h")
    text = text_of(await visitor.get("/audit"))
    assert "created user alice Plan: pro Note: n" in text
    assert "changed user alice Plan: pro → becomes blocked Until: 2023-11-15 01:00:00 UTC" in text


async def test_page_reports_an_unavailable_database(visitor, monkeypatch):
    monkeypatch.setattr("ratelimitd.rules.sql.assignments.SqlAssignmentStore.assignments", away)
    answer = await visitor.get("/plans")
    assert answer.status_code == 503
    assert "the rule database is away" in text_of(answer)
