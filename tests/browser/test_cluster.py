"""The pages of a cluster: any node shows all nodes, and takes what an operator does for all of them."""

import re

import pytest
from playwright.sync_api import expect

from tests.browser.acts import create_rule, load, press, try_check
from tests.browser.conftest import ADMIN_TOKEN, log_in
from tests.chaos_proxy import ChaosProxy
from tests.cluster.nodes import Nodes
from tests.servers import Valkey
from tests.system.process import PATIENT, Files

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]  # many pages each


@pytest.fixture(scope="module")
def valkey(tmp_path_factory):
    with Valkey(tmp_path_factory.mktemp("valkey")) as valkey:
        yield valkey


@pytest.fixture(scope="module")
def nodes(valkey, tmp_path_factory):
    directory = tmp_path_factory.mktemp("nodes")
    with Nodes(directory, valkey.url, *PATIENT, "--admin-token", ADMIN_TOKEN) as nodes:
        nodes.wait_for_members()
        yield nodes


def test_what_is_done_on_one_node_holds_on_all_and_so_does_the_session(nodes, visit):
    visitors = [visit(node.http_address) for node in nodes.served]
    first, second, third = visitors
    log_in(first.go("/rules"))
    [session] = [one for one in first.context.cookies() if one["name"] == "ratelimitd_session"]
    for visitor in (second, third):
        visitor.context.add_cookies([session])
    create_rule(first.page, Limit="3")
    nodes.agree()
    verdicts = [try_check(visitor.page).split()[0] for visitor in (second, third, second, third)]
    assert verdicts == ["allowed"] * 3 + ["denied"]
    page = third.go("/rules")
    page.get_by_role("link", name="Delete /orders user").click()
    press(page, "Delete the rule")
    nodes.agree()
    expect(first.go("/rules").get_by_role("main")).to_contain_text("There are no rules yet")


def test_any_node_shows_all_and_who_is_gone(nodes, visit):
    page = visit(nodes[1].http_address).go("/")
    log_in(page)
    rows = page.get_by_role("region", name="Nodes").locator("tbody tr")
    expect(rows).to_have_text([re.compile(name) for name in ("n1.*this one", "n0", "n2")])
    for row in rows.all():
        expect(row).not_to_contain_text("gone")
    nodes.kill(2)
    gone = rows.filter(has_text="n2")
    expect(gone).to_contain_text("gone")
    expect(page.locator("#state")).to_contain_text("1 gone")
    nodes.start(2)
    expect(gone).not_to_contain_text("gone")


def test_a_page_shows_that_the_shared_state_is_away_and_when_it_is_tried_again(tmp_path, visit):
    with (
        Valkey(tmp_path / "valkey") as valkey,
        Files(tmp_path).serving("--redis-url", valkey.url, "--breaker-recovery-s", "5") as node,
    ):
        page = visit(node.http_address).page
        page.goto(node.login_link)
        create_rule(page)
        page.goto("/")
        state = page.locator("#state")
        breaker, fail_open = (
            state.locator(".tile", has=page.get_by_text(name, exact=True))
            for name in ("Breaker", "Fail-open")
        )
        expect(breaker).to_contain_text("closed")
        valkey.kill()
        with load(node, "/orders"):
            expect(breaker).to_contain_text(re.compile("open.*next try in", re.DOTALL))
            expect(fail_open.locator("b")).not_to_have_text("0")
            expect(state).to_contain_text("DEGRADED")
            valkey.start()
            expect(breaker).to_contain_text("closed")


def test_a_node_that_fails_open_is_told_by_the_page_of_every_node(tmp_path, visit):
    with (
        Valkey(tmp_path / "valkey") as valkey,
        ChaosProxy(valkey.port) as proxy,
        Nodes(tmp_path / "nodes", [proxy.url, valkey.url], "--admin-token", ADMIN_TOKEN) as nodes,
    ):
        nodes.wait_for_members()
        visitor = visit(nodes[1].http_address)
        log_in(visitor.go("/rules"))
        create_rule(visitor.page)
        nodes.agree()
        page = visitor.go("/")
        state = page.locator("#state")
        expect(state).to_contain_text("HEALTHY")
        proxy.down.latency_ms = 60  # its answers come late, and what it says of itself arrives
        with load(nodes[0], "/orders"):
            expect(state).to_contain_text("DEGRADED")
            expect(state).to_contain_text("1 of 2 nodes are healthy")
            expect(state.locator(".conditions")).to_contain_text("on n0")


def test_the_workers_of_one_port_answer_as_one(tmp_path, visit):
    with (
        Valkey(tmp_path / "valkey") as valkey,
        Files(tmp_path).serving(
            *("--workers", "2", "--node-id", "n", "--redis-url", valkey.url),
            *(*PATIENT, "--consistency", "strict", "--admin-token", ADMIN_TOKEN),
        ) as node,
    ):
        page = visit(node.http_address).go("/rules")
        log_in(page)
        create_rule(page, Limit="3")
        verdicts = [try_check(page).split()[0] for _ in range(4)]
        assert verdicts == ["allowed"] * 3 + ["denied"]


def test_the_name_of_an_identifier_that_one_node_denied_is_shown_by_another(nodes, visit):
    visitor = visit(nodes[1].http_address)
    log_in(visitor.go("/rules"))
    rule = create_rule(visitor.page, Endpoint="/named", Limit="1")
    nodes.agree()
    for _ in range(20):
        nodes[0].check("/named", "ada.lovelace")
    page = visitor.go("/")
    identifiers = page.get_by_role("table", name="Identifiers with the most denials")
    expect(identifiers).to_contain_text("ada…")
    expect(identifiers).not_to_contain_text("lovelace")
    page.get_by_role("link", name="Show names").click()
    expect(identifiers).to_contain_text("ada.lovelace")
    page.goto(f"{rule}/delete")
    press(page, "Delete the rule")
    nodes.agree()
