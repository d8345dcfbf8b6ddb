import html
import json
from datetime import UTC, datetime, timedelta

import pytest_asyncio

from ratelimitd.testing import running_node
from ratelimitd.web.pages import audit
from tests.named_tokens import entry, token_of, write
from tests.page_visitor import PageVisitor, away, hidden_in, text_of

RULE = {
    "identifier_type": "user",
    "limit": "10",
    "window_seconds": "60",
    "algorithm": "token_bucket",
    "step": "store",
}


@pytest_asyncio.fixture
async def visitor():
    async with running_node() as node, PageVisitor(node.http_address) as found:
        yield found


async def create(visitor, endpoint):
    answer = await visitor.post("/rules/new", {**RULE, "endpoint": endpoint})
    return answer.headers["location"].partition("?")[0].rpartition("/")[2]


async def test_changes_are_listed_with_actor_time_and_content(visitor):
    rule_id = await create(visitor, "/orders")
    page = (await visitor.get("/audit")).text
    assert f'<a href="/rules/{rule_id}"><code>/orders user</code></a>' in page
    assert "admin@127.0.0.1" in page
    assert ">created</td>" in page
    assert "Enabled: <ins>no</ins>" in " ".join(page.split())


async def test_changes_of_one_rule_can_be_listed_and_paged(visitor, monkeypatch):
    monkeypatch.setattr(audit, "PAGE_CHANGES", 1)
    rule_id = await create(visitor, "/orders")
    await create(visitor, "/carts")
    page = (await visitor.get("/audit")).text
    assert "/carts" in page
    assert "/orders" not in page
    assert 'href="/audit?before=2"' in page
    assert "The newest" not in page
    page = (await visitor.get("/audit?before=2")).text
    assert "/orders" in page
    assert '<a href="/audit">← The newest</a>' in page
    page = (await visitor.get(f"/audit?rule={rule_id}")).text
    assert "/carts" not in page
    assert "Changes of one rule" in page


async def test_changes_are_filtered_by_actor_content_time_and_rule_across_pages(
    visitor, monkeypatch
):
    monkeypatch.setattr(audit, "PAGE_CHANGES", 1)
    for endpoint in ("/orders", "/carts", "/orders/a"):
        await create(visitor, endpoint)
    page = (await visitor.get("/audit?text=ORDERS&who=admin&action=create&since=2020-01-01")).text
    assert "<code>/orders/a user</code>" in page
    assert 'value="ORDERS"' in page
    assert '<option value="create" selected>created</option>' in page
    later = html.unescape(page.partition('">Earlier')[0].rpartition('href="')[2])
    assert later == "/audit?who=admin&action=create&text=ORDERS&since=2020-01-01&before=3"
    page = (await visitor.get(later)).text
    assert "<code>/orders user</code>" in page
    assert "Earlier →" not in page
    for nothing in (
        "who=bob",
        "action=delete",
        "text=none",
        "until=2020-01-01",
        "since=9998-01-01",
    ):
        assert "No changes are recorded." in (await visitor.get(f"/audit?{nothing}")).text, nothing
    for senseless in ("action=sing", "since=soon", "until=9999-12-31", "since=2026-02-31"):
        assert "/orders/a" in (await visitor.get(f"/audit?{senseless}")).text, senseless


async def test_last_day_of_a_filter_is_included(visitor):
    await create(visitor, "/orders")
    today = datetime.now(UTC).date()
    page = await visitor.get(f"/audit?since={today - timedelta(1)}&until={today + timedelta(1)}")
    assert "/orders" in page.text
    page = await visitor.get(f"/audit?until={today - timedelta(days=2)}")
    assert "/orders" not in page.text


async def test_rules_are_reverted_from_a_row_after_a_preview(visitor):
    await create(visitor, "/orders")
    await create(visitor, "/carts")
    page = await visitor.get("/audit")
    assert 'href="/audit/revert?to=1">Revert to here' in page.text
    assert 'href="/audit/revert?to=2"' not in page.text
    assert 'data-label="Actions">in force</td>' in page.text
    preview = await visitor.get("/audit/revert?to=1")
    assert "1 rule is deleted." in text_of(preview)
    assert "/carts user 10 in 1 min, token bucket; disabled" in text_of(preview)
    assert "/carts" in (await visitor.get("/rules")).text
    fields = hidden_in(preview.text)
    answer = await visitor.post("/audit/revert", fields)
    assert answer.headers["location"] == "/audit?done=reverted"
    assert "The rules were reverted." in (await visitor.get(answer.headers["location"])).text
    assert "/carts" not in (await visitor.get("/rules")).text
    assert "there is nothing to revert" in (await visitor.get("/audit/revert?to=1")).text


async def test_only_rows_that_differ_from_the_rules_in_force_offer_a_revert(visitor):
    await create(visitor, "/orders")
    await create(visitor, "/carts")
    await visitor.post("/plans/assign", {"identifier_type": "user", "identifier": "a", "plan": "p"})
    for query in ("", "?action=create", "?text=carts"):
        rows = (await visitor.get(f"/audit{query}")).text
        assert rows.count('data-label="Actions">in force</td>') == 1
        assert 'href="/audit/revert?to=2"' not in rows
    page = (await visitor.get("/audit")).text
    assert 'data-label="Actions">–</td>' in page
    assert 'href="/audit/revert?to=3"' not in page
    assert 'href="/audit/revert?to=1"' in page


async def test_revert_preview_shows_the_changes_of_each_rule(visitor):
    rule_id = await create(visitor, "/orders")
    edit = {**RULE, "endpoint": "/other", "enabled": "on", "limit": "20", "name": "quick"}
    edit |= {"more": "monthly 500 month fixed_window zone=Europe/Berlin observe"}
    edit |= {"plans": "pro day 1000 86400 fixed_window"}
    page = (await visitor.get(f"/rules/{rule_id}")).text
    answer = await visitor.post(f"/rules/{rule_id}", {**edit, "etag": hidden_in(page)["etag"]})
    assert answer.status_code == 303
    preview = text_of(await visitor.get("/audit/revert?to=1"))
    assert "1 rule is changed." in preview
    assert (
        "/other user; quick 20 in 1 min, token bucket; monthly 500 in a month from day 1"
        " (Europe/Berlin), fixed window, observed; plan pro: day 1 000 in 1 d, fixed window"
    ) in preview.replace("\u202f", " ")
    assert "becomes /orders user; 10 in 1 min, token bucket; disabled" in preview


async def test_revert_after_another_change_is_refused_and_previewed_again(visitor):
    for endpoint in ("/orders", "/carts"):
        await create(visitor, endpoint)
    fields = hidden_in((await visitor.get("/audit/revert?to=1")).text)
    await create(visitor, "/new")
    answer = await visitor.post("/audit/revert", fields)
    assert answer.status_code == 409
    assert "A rule was changed meanwhile, so nothing was reverted." in text_of(answer)
    assert "2 rules are deleted." in text_of(answer)
    assert "/carts" in (await visitor.get("/rules")).text


async def test_invalid_revision_is_refused(visitor):
    await create(visitor, "/orders")
    for given in ("", "0", "-1", "x", "1" * 30):
        answer = await visitor.get(f"/audit/revert?to={given}")
        assert answer.status_code == 404, given
        assert "There is no such revision" in answer.text
        for fields in ({"to": given, "revision": "1"}, {"to": "1", "revision": given}):
            assert (await visitor.post("/audit/revert", fields)).status_code == 404, fields


async def test_unknown_revision_is_refused_with_the_reason(visitor):
    await create(visitor, "/orders")
    answer = await visitor.get("/audit/revert?to=7")
    assert answer.status_code == 422
    assert "The rules cannot be reverted to revision 7" in answer.text


async def test_revert_without_the_form_token_is_refused(visitor):
    for endpoint in ("/orders", "/carts"):
        await create(visitor, endpoint)
    answer = await visitor.post("/audit/revert", {"to": "1", "revision": "2"}, token="forged")
    assert answer.status_code == 403
    assert "/carts" in (await visitor.get("/rules")).text


async def test_invalid_address_lists_the_newest_changes(visitor):
    await create(visitor, "/orders")
    for given in ("before=x", "before=-1", "before=" + "9" * 400, "before=", "rule=", "who=%00"):
        assert "/orders" in (await visitor.get(f"/audit?{given}")).text
    page = await visitor.get("/audit?rule=<b>")
    assert "No changes are recorded." in page.text
    assert "<b></b>" not in page.text


async def test_page_reports_an_unavailable_database_with_an_error_status(visitor, monkeypatch):
    await create(visitor, "/orders")

    with monkeypatch.context() as patched:
        patched.setattr("ratelimitd.rules.sql.store.SqlRuleStore.audit", away)
        page = await visitor.get("/audit")
        assert page.status_code == 503
        assert "The rule database does not answer" in page.text
        assert "/orders" not in page.text
    assert (await visitor.get("/audit")).status_code == 200


async def test_whole_set_of_rules_is_one_row(visitor):
    rule = {
        name: RULE[name] for name in ("identifier_type", "limit", "window_seconds", "algorithm")
    }
    body = {"rate_limits": [{**rule, "endpoint": place} for place in ("/a", "/b")]}
    path = "/RateLimiterConfig/ApplyRateLimits"
    answer = await visitor.send(path, json.dumps(body), "application/json")
    assert answer.status_code == 200
    page = " ".join((await visitor.get("/audit")).text.split())
    assert '<th scope="row">a set of rules</th>' in page
    assert ">applied</td>" in page
    assert ">2 created</td>" in page


async def test_reader_sees_the_changes_and_cannot_revert(tmp_path):
    tokens = write(tmp_path / "tokens.yaml", entry("wallboard", role="read"))
    async with running_node(admin_token="token-of-the-tests", tokens_file=tokens) as node:
        async with PageVisitor(node.http_address) as admin:
            await admin.log_in("token-of-the-tests")
            for endpoint in ("/orders", "/carts"):
                await create(admin, endpoint)
        async with PageVisitor(node.http_address) as reader:
            await reader.log_in(token_of("wallboard"))
            assert "/carts" in (await reader.get("/audit")).text
            assert (await reader.get("/audit/revert?to=1")).status_code == 403
            answer = await reader.post("/audit/revert", {"to": "1", "revision": "2"})
            assert answer.status_code == 403
            assert "/carts" in (await reader.get("/rules")).text
