import re

import pytest_asyncio

from ratelimitd.limiter.limiter import Limiter
from ratelimitd.model import Decision, Reason
from ratelimitd.testing import running_node
from ratelimitd.web.pages.try_page import COST_PROBLEM, WAIT_PROBLEM, WORDS
from tests.page_visitor import PageVisitor, errors_in, hidden_in, text_of

ALICE = {"identifier_type": "user", "identifier": "alice", "endpoint": "/orders", "cost": "1"}
SCRIPT = "<script>alert('x')</script>"


@pytest_asyncio.fixture
async def node(clock, tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "rules:\n- {endpoint: /orders, identifier_type: user, limit: 3, window_seconds: 60,"
        " algorithm: fixed_window}\n"
        "- endpoint: /upload\n  identifier_type: user\n  limits:\n"
        "  - {limit: 3, window_seconds: 60, algorithm: token_bucket, burst: 5}\n"
    )
    async with running_node(clock=clock, rules_file=rules) as found:
        yield found


async def check(visitor, **fields):
    answer = await visitor.post("/try", {**ALICE, "action": "check", **fields})
    return answer.status_code, text_of(answer)


async def test_burst_may_leave_more_than_the_limit(visitor):
    text = (await check(visitor, endpoint="/upload"))[1]
    assert "Remaining 4 The" in text
    assert "Remaining 3 of 3" in (await check(visitor, endpoint="/upload"))[1]


async def test_calendar_window_is_named_as_the_rule_names_it(clock, tmp_path):
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "rules:\n- endpoint: /orders\n  identifier_type: user\n  limits:\n"
        "  - {name: day, limit: 3, period: day, algorithm: fixed_window}\n"
        "  - {name: plain, limit: 9, window: 1d, algorithm: fixed_window}\n"
    )
    async with (
        running_node(clock=clock, rules_file=rules) as found,
        PageVisitor(found.http_address) as visitor,
    ):
        text = (await check(visitor))[1]
        assert "3 in a day (UTC)" in text
        assert "9 in 1 d" in text
        explained = (await check(visitor, action="explain"))[1]
        assert "day: 3 in a day (UTC)" in explained


async def test_identity_of_another_page_is_filled_into_both_forms(visitor, node):
    answer = await visitor.post("/try", {"pick": "user ada lovelace"})
    assert answer.status_code == 200
    assert answer.text.count('type="text" value="ada lovelace"') == 2
    assert node.stats.allowed_total == node.stats.blocked_total == 0


def test_every_reason_of_a_single_check_has_words():
    assert set(WORDS) == set(Reason) - {Reason.INVALID_REQUEST}


async def test_answer_is_shown_whole_in_words_and_numbers(visitor, node, clock):
    clock.advance(seconds=10)
    status, text = await check(visitor, cost="2")
    assert status == 200
    assert "allowed user alice on /orders" in text
    assert "There was enough left of the limit." in text
    assert "Reason WITHIN_LIMIT" in text
    assert "3 in 1 min" in text
    assert "Remaining 1 of 3" in text
    assert "2023-11-15 00:01:00 UTC, in 50 s" in text
    status, text = await check(visitor, cost="2")
    assert "denied user alice" in text
    assert "The same check passes in 50 s, if nothing else is spent." in text
    assert node.stats.blocked_total == 1


async def test_peek_spends_nothing(visitor):
    for _ in range(2):
        assert "Remaining 0 of 3 The" in (await check(visitor, cost="3", peek="on"))[1]
    assert "Peek only: nothing was spent." in (await check(visitor, peek="on"))[1]


async def test_cost_above_the_limit_never_passes(visitor):
    text = (await check(visitor, cost="4"))[1]
    assert "waiting does not help" in text
    assert "The same check passes" not in text


async def test_answer_without_a_rule_has_no_numbers(visitor):
    text = (await check(visitor, endpoint="/other"))[1]
    assert "No rule applies" in text
    assert "Remaining" not in text


async def test_answer_without_a_check_is_marked(visitor, node, monkeypatch):
    monkeypatch.setattr(node._limiter, "_clock", None)
    status, text = await check(visitor)
    assert status == 200
    assert "allowed without a check user alice" in text


async def test_denial_while_the_breaker_is_open_is_a_denial(visitor, monkeypatch):
    denial = Decision(
        allowed=False, remaining=0, reset_time=9, retry_after=9, reason=Reason.FAIL_OPEN_BREAKER
    )
    monkeypatch.setattr(Limiter, "check", lambda *_: denial)
    text = (await check(visitor))[1]
    assert "denied user alice" in text
    assert WORDS[Reason.FAIL_OPEN_BREAKER] in text


async def test_invalid_cost_is_reported_at_its_field(visitor):
    for cost in ("", "x", "-1", "1.5", str(2**31), "<b>"):
        answer = await visitor.post("/try", {**ALICE, "action": "check", "cost": cost})
        assert (answer.status_code, errors_in(answer.text)) == (422, {"cost": COST_PROBLEM}), cost


async def test_check_may_wait(visitor):
    await check(visitor, endpoint="/upload", cost="5")
    upload = {"endpoint": "/upload", "max_wait_ms": "20000"}
    assert "allowed user alice" in (await check(visitor, **upload, action="explain"))[1]
    waits = (await check(visitor, **upload))[1]
    assert re.search(r"Wait 20\W000 ms before the request proceeds", waits)
    wrong = {**ALICE, "max_wait_ms": "60001", "cost": "x"}
    answer = await visitor.post("/try", wrong)
    assert answer.status_code == 422
    assert errors_in(answer.text) == {"cost": COST_PROBLEM, "max_wait_ms": WAIT_PROBLEM}


async def test_errors_of_the_service_are_shown_at_their_fields(visitor, node):
    fields = {**ALICE, "identifier": "", "identifier_type": "nobody", "endpoint": "*"}
    answer = await visitor.post("/try", {**fields, "action": "check"})
    assert answer.status_code == 422
    assert set(errors_in(answer.text)) == {"identifier", "identifier_type", "endpoint"}
    answer = await visitor.post("/try", {**fields, "action": "ask"})
    assert set(errors_in(answer.text)) == {
        "reset-identifier",
        "reset-identifier_type",
        "reset-endpoint",
    }
    answer = await visitor.post("/try", {**fields, "action": "reset"})
    assert answer.status_code == 422
    assert node.stats.allowed_total == 0


async def test_reset_happens_after_confirmation(visitor):
    await check(visitor, cost="3")
    asked = await visitor.post("/try", {**ALICE, "action": "ask"})
    assert "This cannot be taken back." in asked.text
    assert "denied" in (await check(visitor))[1]
    done = await visitor.post("/try", {**hidden_in(asked.text), "action": "reset"})
    assert "starts afresh" in done.text
    assert "Remaining 2 of 3" in (await check(visitor))[1]


async def test_failed_reset_is_reported(visitor, monkeypatch):
    monkeypatch.setattr("ratelimitd.services.health.MAX_RESETS", 0)
    answer = await visitor.post("/try", {**ALICE, "action": "reset"})
    assert answer.status_code == 429
    assert "0 resets are in progress" in answer.text


async def test_script_in_a_check_is_escaped(visitor):
    fields = dict.fromkeys(ALICE, SCRIPT)
    for action in ("check", "ask", "reset", SCRIPT):
        answer = await visitor.post("/try", {**fields, "action": action})
        assert SCRIPT not in answer.text
    fields = {**ALICE, "identifier": SCRIPT, "endpoint": SCRIPT}
    for action in ("check", "ask", "reset"):
        answer = await visitor.post("/try", {**fields, "action": action})
        assert (answer.status_code, SCRIPT in answer.text) == (200, False)


async def test_address_fills_in_the_endpoint_but_never_an_identifier(visitor):
    page = await visitor.get("/try?endpoint=/orders&identifier_type=ip&identifier=alice")
    assert page.text.count('value="/orders"') == 2
    assert page.text.count('<option value="ip" selected>') == 2
    assert "alice" not in page.text


async def test_node_whose_checks_need_a_token_says_so():
    async with (
        running_node(check_token="token-of-the-checks") as node,
        PageVisitor(node.http_address) as visitor,
    ):
        status, text = await check(visitor)
    assert status == 401
    assert "this call needs the check role" in text


async def test_explanation_spends_nothing_and_gives_reasons(visitor):
    await check(visitor, cost="3")
    status, text = await check(visitor, cost="2", action="explain")
    assert status == 200
    assert "denied user alice on /orders" in text
    assert "/orders user default: 3 in 1 min denies, 0 left wait 60 s" in text
    _, text = await check(visitor, endpoint="/other", action="explain")
    assert "No rule is for this endpoint, for * or for **." in text
    status, text = await check(visitor, identifier="", action="explain")
    assert (status, "must be 1 to 256 bytes" in text) == (422, True)


@pytest_asyncio.fixture
async def tenants(clock, tmp_path):
    """The page of a node with a declared type, and a rule for each identity of a check."""
    rules = tmp_path / "several.yaml"
    rules.write_text(
        "rules:\n"
        "- {endpoint: /orders, identifier_type: user, limit: 3, window_seconds: 60, algorithm: fixed_window}\n"
        "- endpoint: /orders\n  identifier_type: tenant\n  limits:\n"
        "  - {limit: 2, window_seconds: 60, algorithm: fixed_window}\n"
        "  - {name: day, limit: 1, window_seconds: 86400, algorithm: fixed_window, enforcement: observe}\n"
        "- {endpoint: /pairs, identifier_type: ip+user, limit: 3, window_seconds: 60, algorithm: fixed_window}\n"
    )
    node = running_node(clock=clock, rules_file=rules, identifier_types="tenant")
    async with node as found, PageVisitor(found.http_address) as visitor:
        yield visitor


async def test_check_with_further_identities_shows_every_limit(tenants):
    also = {"also-tenant": "acme", "also-ip": ""}
    _, text = await check(tenants, **also)
    assert "allowed user alice , tenant acme on /orders" in text
    assert "Decided by tenant, default: 2 in 1 min" in text
    assert "all were charged" in text
    assert "tenant default: 2 in 1 min allows 1" in text
    assert "tenant day: 1 in 1 d only observes: allows 0" in text
    assert "user default: 3 in 1 min allows 2" in text
    _, text = await check(tenants, identifier="bob", **also)
    assert "tenant day: 1 in 1 d only observes: would deny 0" in text
    _, text = await check(tenants, **also)
    assert "denied user alice , tenant acme" in text
    assert "none was charged" in text
    assert "user default: 3 in 1 min allows 2" in text
    assert "Every limit" not in (await check(tenants, peek="on"))[1]


async def test_explanation_includes_further_identities(tenants):
    await check(tenants, **{"also-tenant": "acme"}, cost="2")
    _, text = await check(tenants, action="explain", **{"also-tenant": "acme"})
    assert "denied user alice , tenant acme" in text
    assert "/orders tenant default: 2 in 1 min denies, 0 left" in text
    assert "Every limit" not in text


async def test_error_of_a_further_identity_is_shown_at_its_field_with_the_input(tenants):
    fields = {**ALICE, "also-ip": "nowhere", "also-user": "bob", "also-tenant": "acme"}
    answer = await tenants.post("/try", {**fields, "action": "check"})
    assert answer.status_code == 422
    assert set(errors_in(answer.text)) == {"also-ip", "also-user"}
    assert 'value="nowhere"' in answer.text
    assert "<details open>" in answer.text


async def test_combination_of_identities_is_reset(tenants):
    pair = {**ALICE, "endpoint": "/pairs", "also-ip": "::1"}
    assert "Remaining 0 of 3" in (await check(tenants, **{**pair, "cost": "3"}))[1]
    asked = await tenants.post("/try", {**pair, "action": "ask"})
    assert "user <code>alice</code>, ip <code>::1</code> gets the whole limit" in asked.text
    await tenants.post("/try", {**hidden_in(asked.text), "action": "reset"})
    assert "Remaining 2 of 3" in (await check(tenants, **pair))[1]
    refused = await tenants.post("/try", {**pair, "also-ip": "nowhere", "action": "ask"})
    assert set(errors_in(refused.text)) == {"reset-also-ip"}


async def test_further_identities_are_offered_for_declared_types_and_collapsed(tenants):
    page = (await tenants.get("/try")).text
    assert re.findall(r'name="also-(\w+)"', page) == ["user", "ip", "api_key", "tenant"] * 2
    assert page.count("<details>") == 2


async def test_too_many_further_identities_are_refused():
    types = [f"t{number}" for number in range(6)]
    async with (
        running_node(identifier_types=",".join(types)) as node,
        PageVisitor(node.http_address) as visitor,
    ):
        also = {f"also-{kind}": "x" for kind in ["api_key", *types]} | {"also-ip": "::1"}
        status, text = await check(visitor, **also)
    assert status == 422
    assert "at most 7" in text


async def test_nearest_rules_are_linked_without_a_rule(visitor, node):
    for action in ("check", "explain"):
        answer = await visitor.post("/try", {**ALICE, "endpoint": "/Orders/", "action": action})
        text = text_of(answer)
        assert "Rules that may have been meant" in text
        assert "/orders for user: differs in case, differs in slashes" in text
        assert re.search(r'<a href="/rules/[0-9a-f-]{36}"><code>/orders<', answer.text)
    assert node.stats.no_rule_total == 1
    assert "may have been meant" not in (await check(visitor))[1]
