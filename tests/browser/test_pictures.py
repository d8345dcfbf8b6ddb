"""The pictures of the page in the documents: taken here, by the browser that the other tests use.

``--write-pictures`` puts them into docs/pictures; without it they are only taken, and those that are there looked at.
"""

import struct
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser.painted import painted
from tests.browser.visit import PHONE

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

ROOT = Path(__file__).parents[2]
PICTURES = ROOT / "docs/pictures"
MOST_BYTES = 150_000
WINDOW = {"width": 1280, "height": 1210}
KINDS = {
    "light": {"viewport": WINDOW, "color_scheme": "light"},
    "dark": {"viewport": WINDOW, "color_scheme": "dark"},
    "phone": {"viewport": PHONE, "color_scheme": "light", "has_touch": True},
}


@pytest.fixture(scope="module")
def cluster():
    with painted(3) as address:
        yield address


@pytest.fixture
def take(request, tmp_path):
    """Takes a picture of what a page shows."""

    def take(page, name):
        write = request.config.getoption("--write-pictures")
        path = (PICTURES if write else tmp_path) / f"{name}.png"
        page.screenshot(path=path, animations="disabled", caret="hide")
        kept = PICTURES / path.name
        assert size(path) == size(kept), f"take {name} anew: --write-pictures"
        assert kept.stat().st_size <= MOST_BYTES

    return take


def size(path):
    """Width and height of a PNG (its section 11.2.1)."""
    return struct.unpack(">II", path.read_bytes()[16:24])


@pytest.mark.parametrize("kind", KINDS)
def test_overview(cluster, visit, take, kind):
    page = visit(cluster, **KINDS[kind]).go("/")
    expect(page.locator("#live")).to_have_text("Live, every two seconds.")
    take(page, f"page-{kind}")


def test_rules(cluster, visit, take):
    page = visit(cluster, viewport={"width": 1280, "height": 760}).go("/rules")
    expect(page.get_by_role("table")).to_contain_text("/v1/exports/{id}")
    take(page, "page-rules")
