import json

import pytest_asyncio

from ratelimitd.errors import StoreUnavailableError
from ratelimitd.testing import running_node
from ratelimitd.web.pages import audit
from tests.page_visitor import PageVisitor

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


async def test_changes_are_listed_with_who_when_and_what(visitor):
    rule_id = await create(visitor, "/orders")
    page = (await visitor.get("/audit")).text
    assert f'<a href="/rules/{rule_id}"><code>/orders</code></a>' in page
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


async def test_an_address_that_says_nothing_sensible_lists_the_newest(visitor):
    await create(visitor, "/orders")
    for given in ("before=x", "before=-1", "before=" + "9" * 400, "before=", "rule="):
        assert "/orders" in (await visitor.get(f"/audit?{given}")).text
    page = await visitor.get("/audit?rule=<b>")
    assert "No changes are recorded." in page.text
    assert "<b></b>" not in page.text


async def test_while_the_database_is_away_the_page_says_so_and_is_no_success(visitor, monkeypatch):
    await create(visitor, "/orders")

    async def away(*_args):
        message = "the rule database is away"
        raise StoreUnavailableError(message)

    with monkeypatch.context() as patched:
        patched.setattr("ratelimitd.rules.sql.store.SqlRuleStore.audit", away)
        page = await visitor.get("/audit")
        assert page.status_code == 503
        assert "The rule database does not answer" in page.text
        assert "/orders" not in page.text
    assert (await visitor.get("/audit")).status_code == 200


async def test_a_whole_set_of_rules_is_one_row(visitor):
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
    assert ">2 created, 0 updated, 0 deleted</td>" in page
