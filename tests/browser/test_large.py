"""A large installation, 20 nodes and 10,000 rules: its pages are as small as those of any other."""

import pytest
from playwright.sync_api import expect

from tests.browser.large import MANY_NODES, large
from tests.browser.painted import painted
from tests.browser.visit import transferred

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]  # many pages each

MOST_BYTES = 150_000


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    with large(tmp_path_factory.mktemp("large")) as node:
        yield node.http_address


@pytest.fixture
def painted_address():
    with painted(MANY_NODES) as address:
        yield address


@pytest.mark.parametrize(
    "path", ["/", "/rules", "/rules?q=service-099", "/rules/new", "/try", "/audit", "/plans"]
)
def test_a_page_of_20_nodes_and_10000_rules_takes_150_kb_at_most(address, visit, path):
    visitor = visit(address)
    with transferred(visitor) as octets:
        page = visitor.go(path)
        if path == "/":
            nodes = page.get_by_role("region", name="Nodes").locator("tbody tr")
            expect(nodes).to_have_count(MANY_NODES)
    assert 1_000 < octets.count <= MOST_BYTES


def test_a_page_with_a_whole_quarter_of_an_hour_of_20_nodes_takes_150_kb_at_most(
    painted_address, visit
):
    visitor = visit(painted_address)
    with transferred(visitor) as octets:
        page = visitor.go("/")
        expect(page.locator("#live")).to_have_text("Live, every two seconds.")
    assert 50_000 < octets.count <= MOST_BYTES


def test_one_rule_of_10000_is_found_by_a_part_of_its_name(address, visit):
    page = visit(address).go("/rules")
    expect(page.get_by_role("main")).to_contain_text("1–50 of 10\u202f000 rules")
    page.get_by_label("Endpoint contains").fill("SERVICE-09999")
    page.keyboard.press("Enter")
    expect(page.get_by_role("main")).to_contain_text("1–1 of 1 rule")
    page.get_by_role("link", name="/v1/service-09999/orders", exact=True).click()
    expect(page.get_by_label("Limit", exact=True)).to_have_value("10000")
