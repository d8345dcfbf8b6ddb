"""The pages of the rules, used over HTTP on a real node without scripts."""

import html
from dataclasses import replace

import pytest_asyncio

from ratelimitd.model import Calendar, Period
from ratelimitd.observe.live import Live
from ratelimitd.observe.node_status import BusyRule
from ratelimitd.rules.sql.database import open_database
from ratelimitd.rules.sql.store import SqlRuleStore
from ratelimitd.rules.store import RuleChanges, RuleDraft
from ratelimitd.testing import ManualClock, running_node
from ratelimitd.web.pages.rules import GONE, STALE, TAKEN
from tests.page_visitor import PageVisitor, away, errors_in, hidden_in, text_of

RULE = {
    "endpoint": "/orders",
    "identifier_type": "user",
    "limit": "10",
    "window_seconds": "60",
    "algorithm": "token_bucket",
    "enabled": "on",
}
CHECK = {"identifier_type": "user", "identifier": "ada", "cost": "1"}
SCRIPT = "<script>alert('x')</script>"
OTHER_ID = "0b1f2c3d-0000-4000-8000-00000000000a"


@pytest_asyncio.fixture
async def node():
    async with running_node() as found:
        yield found


def book_of(node):
    return node._limiter.book


async def created(visitor, **fields):
    """Create a rule and return its address."""
    answer = await visitor.post("/rules/new", {**RULE, **fields, "step": "store"})
    assert answer.status_code == 303, answer.text
    return answer.headers["location"].partition("?")[0]


async def opened(visitor, address):
    """Return the fields of a rule's form as sent unchanged."""
    page = (await visitor.get(address)).text
    return {**RULE, "etag": hidden_in(page)["etag"]}


async def test_page_explains_a_node_without_rules(visitor):
    page = await visitor.get("/rules")
    assert "no rules yet, so every check is allowed" in page.text


async def test_rule_is_previewed_and_then_created_and_in_force(visitor, node):
    preview = await visitor.post("/rules/new", {**RULE, "step": "preview"})
    assert "Nothing is stored yet." in preview.text
    assert "Until now: no rule, so they are all allowed." in preview.text
    assert len(book_of(node)) == 0
    answer = await visitor.post("/rules/new", {**hidden_in(preview.text), "step": "store"})
    assert answer.headers["location"].endswith("?done=created")
    page = await visitor.get(answer.headers["location"])
    assert "The rule was created." in page.text
    assert "admin@127.0.0.1" in page.text
    [rule] = book_of(node).rules()
    assert (rule.endpoint, rule.limit, rule.window_seconds) == ("/orders", 10, 60)
    table = (await visitor.get("/rules")).text
    assert f'<a href="/rules/{rule.id}"><code>/orders</code></a>' in table


async def test_rule_with_several_limits_is_created_shown_and_edited(visitor, node):
    more = "day 10000 86400 fixed_window"
    preview = await visitor.post("/rules/new", {**RULE, "more": more, "step": "preview"})
    assert '<th scope="row">Limit day</th><td>10\u202f000 in 1 d, fixed window' in preview.text
    answer = await visitor.post("/rules/new", {**hidden_in(preview.text), "step": "store"})
    address = answer.headers["location"].partition("?")[0]
    [rule] = book_of(node).rules()
    assert [(limit.name, limit.limit) for limit in rule.limits] == [
        ("default", 10),
        ("day", 10_000),
    ]
    form = await visitor.get(address)
    assert f">{more}</textarea>" in form.text
    assert '<span class="quiet">day</span>' in (await visitor.get("/rules")).text
    edit = {**RULE, "etag": hidden_in(form.text)["etag"], "more": "", "step": "store"}
    assert (await visitor.post(address, edit)).status_code == 303
    assert [rule.more for rule in book_of(node).rules()] == [()]
    audit = (await visitor.get("/audit")).text
    assert "Limit day: " in audit
    assert "<del>10\u202f000 in 1 d, fixed window</del>" in audit


async def test_limits_are_added_renamed_reordered_and_removed_in_the_form(visitor, node):
    await visitor.post("/rules/new", {**RULE, "step": "store"})
    [rule] = book_of(node).rules()
    day, hour = "day 10000 86400 fixed_window", "hour 900 3600 sliding_window"
    for typed, names, told in (
        (f"{day}\r\n{hour}\r\n", ["default", "day", "hour"], "Limit hour"),
        (f"{hour}\r\n\r\n{day}", ["default", "hour", "day"], "Order of limits"),
        (f"{hour}\r\n{day.replace('day', 'd')}", ["default", "hour", "d"], "Limit d"),
        (hour, ["default", "hour"], "The limit d is removed."),
    ):
        form = await visitor.get(f"/rules/{rule.id}")
        edit = {**RULE, "etag": hidden_in(form.text)["etag"], "more": typed}
        preview = await visitor.post(f"/rules/{rule.id}", {**edit, "step": "preview"})
        assert told in preview.text
        # Store the fields that the preview passes on, as a browser sends them.
        kept = hidden_in(preview.text)
        stored = await visitor.post(f"/rules/{rule.id}", {**kept, "step": "store"})
        assert stored.status_code == 303
        [found] = book_of(node).rules()
        assert [limit.name for limit in found.limits] == names


async def test_observed_limit_is_promoted_after_a_preview(visitor, node):
    more = "candidate 3 60 fixed_window observe"
    await visitor.post("/rules/new", {**RULE, "more": more, "step": "store"})
    [rule] = book_of(node).rules()
    form = await visitor.get(f"/rules/{rule.id}")
    address = f"/rules/{rule.id}/promote?limit=candidate"
    assert f'href="{address}">Enforce candidate</a>' in form.text
    preview = await visitor.get(address)
    assert "candidate denies from now on, and keeps what it counted." in preview.text
    assert "The limit default is removed." in preview.text
    await visitor.post(f"/rules/{rule.id}", {**hidden_in(preview.text), "step": "store"})
    [promoted] = book_of(node).rules()
    assert [(limit.name, limit.limit, limit.enforcement) for limit in promoted.limits] == [
        ("candidate", 3, "enforce")
    ]
    assert (await visitor.get(address)).status_code == 404
    assert (await visitor.get("/rules/none/promote?limit=candidate")).status_code == 404


async def test_burst_is_set_shown_and_removed(visitor, node):
    preview = await visitor.post("/rules/new", {**RULE, "burst": "50", "step": "preview"})
    assert "<td>the first, burst 50</td>" in preview.text
    answer = await visitor.post("/rules/new", {**hidden_in(preview.text), "step": "store"})
    address = answer.headers["location"].partition("?")[0]
    assert [(rule.limit, rule.burst) for rule in book_of(node).rules()] == [(10, 50)]
    form = await visitor.get(address)
    assert 'name="burst" type="text" value="50"' in form.text
    assert '<span class="quiet">default, burst 50</span>' in (await visitor.get("/rules")).text
    edit = {**RULE, "etag": hidden_in(form.text)["etag"], "burst": "", "step": "preview"}
    assert "counts as the new limit at most" in (await visitor.post(address, edit)).text
    wrong = await visitor.post(address, {**edit, "burst": "-1", "step": "store"})
    assert (wrong.status_code, set(errors_in(wrong.text))) == (422, {"burst"})
    assert (await visitor.post(address, {**edit, "step": "store"})).status_code == 303
    assert [rule.capacity for rule in book_of(node).rules()] == [10]


async def test_calendar_rule_is_created_shown_and_edited(visitor, node):
    calendar = {"period": "month", "time_zone": "Europe/Berlin", "anchor_day": "15"}
    rule = {**RULE, "algorithm": "fixed_window", **calendar}
    preview = await visitor.post("/rules/new", {**rule, "step": "preview"})
    assert "a month from day 15 (Europe/Berlin)" in preview.text
    answer = await visitor.post("/rules/new", {**hidden_in(preview.text), "step": "store"})
    address = answer.headers["location"].partition("?")[0]
    [stored] = book_of(node).rules()
    assert stored.calendar == Calendar(Period.MONTH, "Europe/Berlin", 15)
    assert "month from day 15, Europe/Berlin" in (await visitor.get("/rules")).text
    form = (await visitor.get(address)).text
    assert '<option value="month" selected>month</option>' in form
    assert 'value="Europe/Berlin"' in form
    etag = hidden_in(form)["etag"]
    wrong = await visitor.post(
        address, {**rule, "anchor_day": "0", "etag": etag, "step": "preview"}
    )
    assert wrong.status_code == 422
    assert set(errors_in(wrong.text)) == {"anchor_day"}
    plain = {**rule, "period": "", "time_zone": "", "anchor_day": ""}
    edit = {**plain, "etag": etag, "step": "store"}
    assert (await visitor.post(address, edit)).status_code == 303
    assert [one.calendar for one in book_of(node).rules()] == [None]
    assert "a month from day 15 (Europe/Berlin)" in (await visitor.get("/audit")).text


async def test_errors_are_shown_at_the_fields_with_the_input_and_nothing_is_stored(visitor, node):
    for step in ("preview", "store"):
        wrong = {"endpoint": "", "limit": "many", "window_seconds": "-7", "step": step}
        answer = await visitor.post("/rules/new", wrong)
        assert answer.status_code == 422
        assert set(errors_in(answer.text)) == {
            "endpoint",
            "identifier_type",
            "limit",
            "window_seconds",
            "algorithm",
        }
        assert 'value="many"' in answer.text
        assert answer.text.count('aria-invalid="true"') == 5
        assert 'aria-describedby="limit-error limit-hint"' in answer.text
    assert len(book_of(node)) == 0


async def test_second_rule_in_one_place_is_refused_even_if_unknown_to_this_node(
    visitor, node, monkeypatch
):
    await created(visitor)
    answer = await visitor.post("/rules/new", {**RULE, "step": "store"})
    assert (answer.status_code, errors_in(answer.text)) == (422, {"endpoint": TAKEN})
    # As if another node's rule were not yet known here: the service refuses it.
    monkeypatch.setattr(type(book_of(node)), "candidates", lambda *_: ())
    answer = await visitor.post("/rules/new", {**RULE, "step": "store"})
    assert (answer.status_code, errors_in(answer.text)) == (409, {"endpoint": TAKEN})


async def test_script_in_an_endpoint_is_escaped_on_every_page(visitor):
    address = await created(visitor, endpoint=SCRIPT)
    fields = {**await opened(visitor, address), "endpoint": SCRIPT, "limit": "11"}
    pages = [
        await visitor.get(path)
        for path in ("/rules", address, f"{address}/switch", f"{address}/delete", "/audit")
    ]
    pages += [
        await visitor.post(address, {**fields, "step": "preview"}),
        await visitor.post(address, {**fields, "limit": SCRIPT, "step": "preview"}),
        await visitor.post(address, {**fields, "etag": SCRIPT, "step": "preview"}),
        await visitor.get("/rules?q=" + SCRIPT),
        await visitor.get(f"/rules/new?endpoint={SCRIPT}&identifier_type={SCRIPT}"),
    ]
    for page in pages:
        assert SCRIPT not in page.text
        assert html.escape(SCRIPT, quote=False) in page.text.replace("&#39;", "'")


async def test_edit_is_previewed_and_stored(visitor, node):
    address = await created(visitor)
    fields = {**await opened(visitor, address), "limit": "25"}
    preview = await visitor.post(address, {**fields, "step": "preview"})
    assert "<del>10</del>" in preview.text
    assert "<ins>25</ins>" in preview.text
    assert "15 more at once" in preview.text
    again = await visitor.post(address, {**hidden_in(preview.text), "step": "edit"})
    assert 'name="limit" type="text" value="25"' in again.text
    answer = await visitor.post(address, {**hidden_in(preview.text), "step": "store"})
    assert answer.headers["location"] == f"{address}?done=stored"
    assert [rule.limit for rule in book_of(node).rules()] == [25]
    page = (await visitor.get(answer.headers["location"])).text
    assert "The change was stored." in page
    assert "Limit: <del>10</del>" in " ".join(page.split())


async def test_rule_cannot_be_moved_onto_another_one(visitor, monkeypatch, node):
    await created(visitor, endpoint="/taken")
    address = await created(visitor)
    fields = {**await opened(visitor, address), "endpoint": "/taken", "step": "store"}
    answer = await visitor.post(address, fields)
    assert (answer.status_code, errors_in(answer.text)) == (422, {"endpoint": TAKEN})
    monkeypatch.setattr(type(book_of(node)), "candidates", lambda *_: ())
    answer = await visitor.post(address, fields)
    assert (answer.status_code, errors_in(answer.text)) == (409, {"endpoint": TAKEN})


async def test_stale_edit_is_refused_with_both_versions(visitor, node):
    address = await created(visitor)
    mine, theirs = [{**await opened(visitor, address), "limit": limit} for limit in ("77", "55")]
    assert (await visitor.post(address, {**theirs, "step": "store"})).status_code == 303
    for step in ("preview", "store", "edit"):
        answer = await visitor.post(address, {**mine, "step": step})
        assert answer.status_code == 409
        assert "Nothing was stored. The version that is stored now comes from admin@" in answer.text
        assert "<td>55</td><td><ins>77</ins>" in answer.text
    assert [rule.limit for rule in book_of(node).rules()] == [55]
    # Continuing with the typed version applies it to the version just shown.
    form = await visitor.post(address, {**hidden_in(answer.text), "step": "edit"})
    assert 'value="77"' in form.text
    fields = {**RULE, "limit": "77", "etag": hidden_in(form.text)["etag"], "step": "store"}
    assert (await visitor.post(address, fields)).status_code == 303
    assert [rule.limit for rule in book_of(node).rules()] == [77]


async def test_deletion_without_an_etag_is_refused_like_an_edit(visitor, node):
    address = await created(visitor)
    for path, fields in (
        ("", {**RULE, "step": "store"}),
        ("/delete", {}),
        ("/delete", {"etag": ""}),
    ):
        answer = await visitor.post(address + path, fields)
        assert answer.status_code == 409
    assert STALE in answer.text
    assert len([*book_of(node).rules()]) == 1
    answer = await visitor.post(f"{address}/delete", hidden_in(answer.text))
    assert answer.headers["location"] == "/rules?done=deleted"


async def test_stale_edit_with_errors_is_shown_as_typed(visitor):
    address = await created(visitor)
    fields = {**await opened(visitor, address), "limit": "many", "etag": "old"}
    answer = await visitor.post(address, {**fields, "step": "store"})
    assert answer.status_code == 409
    assert "<td>10</td><td>many</td>" in answer.text


class TestChangesByAnotherNode:
    """Not yet known to this node: the services refuse, and the database has the current rule."""

    @pytest_asyncio.fixture
    async def other(self, node):
        """Another node's store on the same database."""
        store = SqlRuleStore(open_database(node._settings.database_url), clock=ManualClock())
        yield store
        await store.close()

    async def test_edit_of_a_changed_rule_is_refused_with_both_versions(self, visitor, other, node):
        address = await created(visitor)
        fields = {**await opened(visitor, address), "limit": "77", "step": "store"}
        await other.update(address.rpartition("/")[2], RuleChanges(limit=55), "", "bob")
        answer = await visitor.post(address, fields)
        assert answer.status_code == 409
        assert "comes from bob" in answer.text
        assert "<td>55</td><td><ins>77</ins>" in answer.text

    async def test_edit_of_a_deleted_rule_offers_to_create_it(self, visitor, other):
        address = await created(visitor)
        fields = {**await opened(visitor, address), "limit": "77", "step": "store"}
        await other.delete(address.rpartition("/")[2], "", "bob")
        answer = await visitor.post(address, fields)
        assert answer.status_code == 409
        assert GONE in answer.text
        assert 'action="/rules/new"' in answer.text
        assert 'value="77"' in answer.text

    async def test_deletion_of_a_changed_rule_is_refused_and_can_be_repeated(self, visitor, other):
        address = await created(visitor)
        page = (await visitor.get(f"{address}/delete")).text
        await other.update(address.rpartition("/")[2], RuleChanges(limit=55), "", "bob")
        answer = await visitor.post(f"{address}/delete", hidden_in(page))
        assert answer.status_code == 409
        assert STALE in answer.text
        assert "<td>55</td>" in answer.text
        again = await visitor.post(f"{address}/delete", hidden_in(answer.text))
        assert again.headers["location"] == "/rules?done=deleted"

    async def test_deletion_of_a_deleted_rule_is_not_found(self, visitor, other):
        address = await created(visitor)
        page = (await visitor.get(f"{address}/delete")).text
        await other.delete(address.rpartition("/")[2], "", "bob")
        answer = await visitor.post(f"{address}/delete", hidden_in(page))
        assert answer.status_code == 404
        assert "There is no such rule" in answer.text

    async def test_rule_unknown_to_this_node_can_be_edited(self, visitor, other, node):
        rule = await other.create(RuleDraft("/new", "user", 5, 60, "fixed_window"), "bob")
        assert book_of(node).get(rule.id) is None
        fields = {**RULE, "endpoint": "/new", "etag": rule.etag, "step": "store"}
        assert (await visitor.post(f"/rules/{rule.id}", fields)).status_code == 303


async def test_rule_is_disabled_enabled_and_deleted_after_previews(visitor, node):
    address = await created(visitor)
    page = (await visitor.get(f"{address}/switch")).text
    assert "<del>yes</del>" in page
    assert "no longer decided by this rule" in page
    assert (await visitor.post(address, {**hidden_in(page), "step": "store"})).status_code == 303
    assert [rule.enabled for rule in book_of(node).rules()] == [False]
    assert 'class="off"' in (await visitor.get("/rules")).text
    page = (await visitor.get(f"{address}/switch")).text
    assert (await visitor.post(address, {**hidden_in(page), "step": "store"})).status_code == 303
    assert [rule.enabled for rule in book_of(node).rules()] == [True]
    page = (await visitor.get(f"{address}/delete")).text
    assert "Delete this rule?" in page
    answer = await visitor.post(f"{address}/delete", hidden_in(page))
    assert "The rule was deleted." in (await visitor.get(answer.headers["location"])).text
    assert len(book_of(node)) == 0


async def test_unknown_rule_is_not_found(visitor):
    for path in ("", "/switch", "/delete"):
        answer = await visitor.get(f"/rules/{OTHER_ID}{path}")
        assert answer.status_code == 404, path
        assert "There is no such rule" in answer.text


async def test_edit_of_an_unknown_rule_is_refused(visitor):
    answer = await visitor.post(f"/rules/{OTHER_ID}", {**RULE, "step": "store"})
    assert answer.status_code == 409
    answer = await visitor.post("/rules/none/delete", {})
    assert answer.status_code == 404


async def test_search_and_pages_reach_each_rule(visitor, node):
    for number in range(3):
        await created(visitor, endpoint=f"/orders/{number}")
    await created(visitor, endpoint="/carts", identifier_type="ip")
    query = "q=ORDERS&type=user&algorithm=token_bucket&state=enabled"
    page = (await visitor.get(f"/rules?{query}")).text
    assert page.count("<code>/orders/") == 3
    assert "/carts" not in page
    assert "No rule matches." in (await visitor.get("/rules?q=nothing")).text
    assert "1–4 of 4 rules" in (await visitor.get("/rules?page=9")).text


async def test_earlier_and_later_pages_are_linked(visitor, monkeypatch):
    monkeypatch.setattr("ratelimitd.web.pages.rule_search.PAGE_RULES", 2)
    for number in range(5):
        await created(visitor, endpoint=f"/{number}")
    page = (await visitor.get("/rules")).text
    assert 'rel="prev"' not in page
    later = html.unescape(page.partition('" rel="next"')[0].rpartition('href="')[2])
    middle = (await visitor.get(later)).text
    assert "<code>/2</code>" in middle
    assert 'rel="prev"' in middle
    assert 'rel="next"' in middle
    assert '<a href="/rules?page=2" aria-current="page">' in middle
    last = (await visitor.get("/rules?page=3&sort=-endpoint")).text
    assert "<code>/0</code>" in last
    assert 'rel="next"' not in last


async def test_table_shows_and_sorts_by_the_traffic_of_each_rule(visitor, node):
    addresses = [await created(visitor, endpoint=f"/{name}") for name in ("idle", "busy")]
    for _ in range(2):
        await visitor.post("/try", {**CHECK, "endpoint": "/busy", "action": "check"})
        await node._rule_traffic.sample()
    page = (await visitor.get("/rules?sort=-allowed")).text
    assert page.index(addresses[1]) < page.index(addresses[0])
    text = text_of(await visitor.get("/rules?sort=-allowed"))
    assert "/busy user 10 in 1 min, token bucket 2 0 20" in text
    assert "/idle user 10 in 1 min, token bucket – 0 0 never since start enabled" in text
    assert 'class="spark"' in page
    assert '<th scope="col" class="number" aria-sort="descending">' in page
    assert '<option value="-allowed" selected>most allowed</option>' in page
    odd = (await visitor.get("/rules?sort=-type")).text
    assert '<option value="-type" selected>as in the table</option>' in odd


async def test_rates_of_all_nodes_are_shown_beside_those_of_this_one(visitor, node, monkeypatch):
    address = await created(visitor)
    [rule] = book_of(node).rules()
    of_this_node = Live.overview

    def of_two(live, **options):
        overview = of_this_node(live, **options)
        [this] = overview.nodes
        rules = [BusyRule(rule.id, 2.0, 1.0), BusyRule("another", 7.0, 7.0)]
        other = this._replace(status=replace(this.status, rules=rules), is_this=False)
        return replace(overview, nodes=[this, other])

    monkeypatch.setattr(Live, "overview", of_two)
    told = "2 allowed and 1 blocked a second on 1 of 2 nodes"
    assert told in (await visitor.get("/rules")).text
    assert told in (await visitor.get(address)).text


async def test_page_says_that_rules_are_not_loaded_yet(tmp_path):
    database = tmp_path / "rules.db"
    database.write_bytes(b"no database" * 100)
    async with (
        running_node(database_url=f"sqlite:///{database}") as node,
        PageVisitor(node.http_address) as visitor,
    ):
        page = await visitor.get("/rules")
        assert "No rules are loaded yet" in page.text
        answer = await visitor.post("/rules/new", {**RULE, "step": "store"})
        assert answer.status_code == 503
        assert "the rule database" in answer.text
        assert "cannot be shown now" in (await visitor.get("/audit")).text
        answer = await visitor.post(f"/rules/{OTHER_ID}/delete", {})
        assert answer.status_code == 404


async def test_unavailable_store_is_reported_with_the_input_kept(visitor, node, monkeypatch):
    address = await created(visitor)
    fields = {**await opened(visitor, address), "limit": "77", "step": "store"}
    page = (await visitor.get(f"{address}/delete")).text

    monkeypatch.setattr("ratelimitd.rules.sql.store.SqlRuleStore.update", away)
    monkeypatch.setattr("ratelimitd.rules.sql.store.SqlRuleStore.delete", away)
    answer = await visitor.post(address, fields)
    assert (answer.status_code, 'value="77"' in answer.text) == (503, True)
    assert "the rule database is away" in answer.text
    answer = await visitor.post(f"{address}/delete", hidden_in(page))
    assert answer.status_code == 503
    assert "the rule database is away" in answer.text


async def test_rule_for_a_combination_is_created_and_one_with_an_unknown_type_reported(tmp_path):
    kept = {"database_url": f"sqlite:///{tmp_path}/rules.db"}
    async with (
        running_node(**kept, identifier_types="tenant") as node,
        PageVisitor(node.http_address) as visitor,
    ):
        for kind in ("user+tenant", "all"):
            await created(visitor, identifier_type=kind, endpoint="**")
        assert {rule.identifier_type for rule in book_of(node).rules()} == {"tenant+user", "all"}
        found = await visitor.get("/rules?type=tenant%2Buser")
        assert "1–1 of 1 rule" in found.text
        preview = await visitor.post(
            "/rules/new", {**RULE, "endpoint": "**", "identifier_type": "ip", "step": "preview"}
        )
        assert "Checks of ip on all endpoints together" in preview.text
    async with running_node(**kept) as node, PageVisitor(node.http_address) as visitor:
        for rule in book_of(node).rules():
            page = (await visitor.get(f"/rules/{rule.id}")).text
            warned = "no request can name tenant, which is not among the IDENTIFIER_TYPES" in page
            assert warned == (rule.identifier_type == "tenant+user")
            fields = {**RULE, "endpoint": "**", "etag": rule.etag, "limit": "9"}
            fields |= {"identifier_type": rule.identifier_type, "step": "store"}
            answer = await visitor.post(f"/rules/{rule.id}", fields)
            assert answer.status_code == 303, answer.text
        assert {rule.limit for rule in book_of(node).rules()} == {9}
        undeclared = {**RULE, "endpoint": "/new", "identifier_type": "tenant"}
        answer = await visitor.post("/rules/new", {**undeclared, "step": "preview"})
        assert answer.status_code == 422
        assert [*errors_in(answer.text)] == ["identifier_type"]
