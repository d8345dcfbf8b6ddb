"""The pages of a cluster: any node shows all nodes, and takes what an operator does for all of them."""

import pytest
from playwright.sync_api import expect

from tests.browser.acts import create_rule, press, try_check
from tests.browser.conftest import ADMIN_TOKEN, log_in
from tests.cluster.nodes import Nodes
from tests.servers import Valkey
from tests.system.process import Files

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]  # many pages each


@pytest.fixture(scope="module")
def valkey(tmp_path_factory):
    with Valkey(tmp_path_factory.mktemp("valkey")) as valkey:
        yield valkey


@pytest.fixture(scope="module")
def nodes(valkey, tmp_path_factory):
    directory = tmp_path_factory.mktemp("nodes")
    with Nodes(directory, valkey.url, "--admin-token", ADMIN_TOKEN) as nodes:
        nodes.meet()
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


def test_the_workers_of_one_port_answer_as_one(tmp_path, visit):
    with (
        Valkey(tmp_path / "valkey") as valkey,
        Files(tmp_path).serving(
            *("--workers", "2", "--node-id", "n", "--redis-url", valkey.url),
            *("--admin-token", ADMIN_TOKEN),
        ) as node,
    ):
        page = visit(node.http_address).go("/rules")
        log_in(page)
        create_rule(page, Limit="3")
        verdicts = [try_check(page).split()[0] for _ in range(4)]
        assert verdicts == ["allowed"] * 3 + ["denied"]
