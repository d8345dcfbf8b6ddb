"""The charts of the overview: what they say to a pointer, and for which ranges."""

import re

import pytest
from playwright.sync_api import expect

from tests.browser.painted import painted

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def cluster():
    with painted(3) as address:
        yield address


RANGES = {
    "5 m": ("5 minutes", 5),
    "15 m": ("15 minutes", 15),
    "1 h": ("hour", 60),
    "24 h": ("24 hours", 1440),
}


@pytest.mark.parametrize("name", RANGES)
def test_each_range_is_drawn_whole_with_ticks_of_both_axes(cluster, visit, name):
    title, minutes = RANGES[name]
    page = visit(cluster).go("/")
    page.get_by_role("link", name=name, exact=True).click()
    expect(page.get_by_role("heading", name=f"The last {title}", exact=True)).to_be_visible()
    # Then all pieces of the past are drawn.
    expect(page.locator("#live")).to_have_text("Live, every two seconds.")
    chart = page.locator("[data-chart=checks]")
    ticks = chart.locator("text").all_text_contents()
    times = [tick for tick in ticks if ":" in tick]
    assert 3 <= len(times) <= 10
    assert 4 <= len(ticks) - len(times) <= 6
    assert ticks[0] == "0"
    span_s = (_minute(times[-1]) - _minute(times[0])) % 1440
    assert minutes / 2 <= span_s <= minutes
    line = chart.locator("path.line1").get_attribute("d")
    xs = [float(x) for x in re.findall(r"[ML]([\d.]+) ", line)]
    box = chart.locator("svg").bounding_box()
    assert xs[0] < 70
    assert xs[-1] == pytest.approx(box["width"] - 14, abs=1)


def _minute(time):
    hours, minutes = map(int, time.split(":"))
    return 60 * hours + minutes


def test_a_pointer_is_told_the_values_of_its_moment_and_then_those_of_now(cluster, visit):
    page = visit(cluster).go("/")
    expect(page.locator("#live")).to_have_text("Live, every two seconds.")
    chart = page.locator("[data-chart=latency]")
    values = chart.locator(".key b")
    expect(values.first).to_have_text(re.compile(r"^[\d.]+ ms$"))
    expect(chart.locator(".moment")).to_have_text("now")
    now = values.all_text_contents()
    chart.locator("svg").hover(position={"x": 300, "y": 60})
    expect(chart.locator(".moment")).to_have_text(re.compile(r"^at \d\d:\d\d:\d\d$"))
    assert chart.locator(".cursor").get_attribute("d").startswith("M")
    there = values.all_text_contents()
    assert there != now
    page.mouse.move(0, 0)
    expect(chart.locator(".moment")).to_have_text("now")
    assert values.all_text_contents() == now


def test_a_chart_is_drawn_anew_for_another_width(cluster, visit):
    page = visit(cluster).go("/")
    line = page.locator("[data-chart=buckets] path.line1")
    expect(line).to_have_attribute("d", re.compile("L"))
    page.set_viewport_size({"width": 375, "height": 800})
    expect(page.locator("[data-chart=buckets] svg")).to_have_attribute(
        "viewBox", re.compile(r"^0 0 [23]\d\d ")
    )


def test_a_rule_has_a_chart_of_its_own(cluster, visit):
    page = visit(cluster).go("/rules?sort=-blocked")
    page.locator("tbody th a").first.click()
    expect(
        page.get_by_role("heading", name="Traffic on this node, the last 15 minutes")
    ).to_be_visible()
    chart = page.locator("[data-chart=rule]")
    expect(chart.locator("path.line2")).to_have_attribute("d", re.compile("L"))
    expect(chart.locator(".key b").first).to_have_text(re.compile(r"^[\d.]+$"))
    page.get_by_role("link", name="1 h", exact=True).click()
    expect(page.get_by_role("heading", name="Traffic on this node, the last hour")).to_be_visible()
    assert chart.locator("path.line1").get_attribute("d").count("L") > 300


def test_a_rule_that_was_never_matched_says_so_in_the_table_and_on_its_page(cluster, visit):
    page = visit(cluster).go("/rules?sort=match")
    row = page.locator("tbody tr").first
    expect(row).to_contain_text("never since start")
    row.get_by_role("link").first.click()
    expect(page.get_by_role("main")).to_contain_text("never since start")
    assert page.locator("[data-chart]").count() == 0


def test_rules_are_sorted_by_their_headings_and_on_a_phone_by_the_form(cluster, visit):
    page = visit(cluster).go("/rules")
    page.get_by_role("link", name="Blocked").click()
    heading = page.get_by_role("columnheader", name="Blocked")
    expect(heading).to_have_attribute("aria-sort", "descending")
    most = page.locator("tbody th").first.inner_text()
    page.set_viewport_size({"width": 375, "height": 800})
    page.get_by_label("Sorted by").select_option("most allowed")
    page.get_by_role("button", name="Search").click()
    expect(page).to_have_url(re.compile("sort=-allowed"))
    assert page.locator("tbody th").first.inner_text() != most
