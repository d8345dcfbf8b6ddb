"""A Chromium, Debian's, that looks at the pages of nodes; and whatever went wrong in it that nobody would see.

A ``Visit`` is one visitor: cookies, cache and windows of its own. It records what the console says, which is also
what the content security policy refused, and every request, so that a test can end with the question whether the page
was quiet.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect, sync_playwright

WAIT_MS = 20_000
"""Longest wait for what a page does in its own time: far above what it takes, so that only a hang fails."""

expect.set_options(timeout=WAIT_MS)

DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 375, "height": 812}

ONLY_THIS_MACHINE = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"

STATUS = re.compile(r"the server responded with a status of (\d+)")
"""What the console says of an answer that is no success, also when the page wanted it so."""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    """The browser. As root it has no sandbox, which it then refuses to build; it only ever meets our own pages."""
    program = shutil.which("chromium")
    assert program, "no chromium: run the tests by `make test-system`, which installs it"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=program,
            chromium_sandbox=os.geteuid() != 0,
            args=[ONLY_THIS_MACHINE],
        )
        yield browser
        browser.close()


class Octets:
    """What came over the network, heads and bodies."""

    count = 0


class Visit:
    """One visitor of the pages under ``address``, ``host:port``; ``options`` are those of a browser context.

    ``expected`` are statuses, beside success, that the test provokes.
    """

    def __init__(
        self, browser: Browser, address: str, *, expected: frozenset[int] = frozenset(), **options
    ) -> None:
        self.origin = f"http://{address}"
        self.requested: list[str] = []
        """The URL of every request."""
        self._faults: list[str] = []
        self._expected = expected
        self.context = browser.new_context(
            base_url=self.origin, **{"viewport": DESKTOP, "reduced_motion": "reduce", **options}
        )
        self.context.set_default_timeout(WAIT_MS)
        self.context.on("request", self._note_request)
        self.context.on("console", self._note_message)
        self.context.on("weberror", lambda error: self._faults.append(f"script: {error.error}"))
        self.page: Page = self.context.new_page()

    def go(self, path: str) -> Page:
        """Open a page of the node."""
        self.page.goto(path)
        return self.page

    @property
    def faults(self) -> list[str]:
        """What nobody may find: scripts that failed, refused content, requests to others."""
        strangers = [url for url in self.requested if not self._is_ours(url)]
        return self._faults + [f"request to {url}" for url in strangers]

    def close(self) -> None:
        """Leave."""
        self.context.close()

    def _note_request(self, request: Request) -> None:
        self.requested.append(request.url)

    def _note_message(self, message: ConsoleMessage) -> None:
        status = STATUS.search(message.text)
        if status and int(status[1]) in self._expected:
            return
        if message.type in {"error", "warning"}:
            self._faults.append(f"console, {message.location['url']}: {message.text}")

    def _is_ours(self, url: str) -> bool:
        return url.startswith(self.origin + "/") or urlsplit(url).scheme in {"data", "about"}


@contextlib.contextmanager
def transferred(visit: Visit) -> Iterator[Octets]:
    """Counts what a visitor is sent while the block runs, also of answers that go on."""
    octets = Octets()
    protocol = visit.context.new_cdp_session(visit.page)

    def add(count: int) -> None:
        octets.count += int(count)

    protocol.on(
        "Network.responseReceived", lambda event: add(event["response"]["encodedDataLength"])
    )
    protocol.on("Network.dataReceived", lambda event: add(event["dataLength"]))
    protocol.send("Network.enable")
    yield octets
    protocol.detach()
