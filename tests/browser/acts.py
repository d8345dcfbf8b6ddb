"""What an operator does on the pages, by what they read there: labels, headings and the words on buttons."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from threading import Event, Thread

from playwright.sync_api import Locator, Page, expect

from tests.system.process import NEVER_ENDING_S, Served

CALLER = "caller-of-the-load"

RULE = {
    "Endpoint": "/orders",
    "Identifier type": "user",
    "Limit": "3",
    "Window": str(NEVER_ENDING_S),
    "Algorithm": "fixed_window",
}
"""A rule as it is typed; its window does not end while a test runs."""


def fill(form: Page | Locator, fields: dict[str, str]) -> None:
    """Type or choose the values of fields by their labels."""
    for label, value in fields.items():
        field = form.get_by_label(label, exact=True)
        if field.evaluate("field => field.localName") == "select":
            field.select_option(value)
        else:
            field.fill(value)


def press(page: Page | Locator, name: str) -> None:
    """Press the button of this name."""
    page.get_by_role("button", name=name, exact=True).click()


def create_rule(page: Page, **changes: str) -> str:
    """Create a rule from the table of rules on; ``changes`` are of :data:`RULE`. Returns its address."""
    page.goto("/rules")
    page.get_by_role("link", name="New rule").click()
    fill(page, RULE | changes)
    press(page, "Show what changes")
    expect(page.get_by_role("heading", name="Create this rule?")).to_be_visible()
    press(page, "Create the rule")
    expect(page.get_by_role("status")).to_contain_text("The rule was created.")
    return page.url.partition("?")[0]


def try_check(page: Page, endpoint: str = "/orders", identifier: str = "alice") -> str:
    """Check once by the form; returns what the page says in its heading."""
    page.goto("/try")
    form = page.get_by_role("region", name="Check", exact=True)
    fill(form, {"Identifier type": "user", "Identifier": identifier, "Endpoint": endpoint})
    press(form, "Check")
    return answer(page)


def answer(page: Page) -> str:
    """What the page says about the check that was tried."""
    return page.locator("#answer").inner_text()


def reset(page: Page, endpoint: str = "/orders", identifier: str = "alice") -> None:
    """Let a user start afresh, by the form."""
    page.goto("/try")
    form = page.get_by_role("region", name="Reset", exact=True)
    fill(form, {"Identifier type": "user", "Identifier": identifier, "Endpoint": endpoint})
    press(form, "Reset …")
    expect(page.get_by_role("heading", name="Reset what was spent?")).to_be_visible()
    press(page, "Reset")
    expect(page.get_by_role("status")).to_contain_text("starts afresh")


@contextlib.contextmanager
def load(node: Served, endpoint: str) -> Iterator[None]:
    """Checks every 2 ms while the block runs: one caller again and again, and many once.

    Without a pause they took a core from the browser, which did not answer for 20 s once.
    """
    done = Event()

    def run() -> None:
        for number in itertools.count():
            if done.wait(0.002):
                return
            node.check(endpoint, CALLER if number % 2 else f"caller-{number}")

    thread = Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
