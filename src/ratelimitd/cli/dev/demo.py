"""``ratelimitd demo``: a node, an API that it limits, and callers of that API, to watch and edit a limit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import webbrowser
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ratelimitd.cli.client_options import CliError
from ratelimitd.cli.dev import run
from ratelimitd.cli.dev.run import HOST, NodePlan, port_option
from ratelimitd.cli.output import Output, sparkline, table_lines
from ratelimitd.errors import StartupError
from ratelimitd.retry import cancel_all

if TYPE_CHECKING:
    from ratelimitd.cli.dev.servers import Children
    from ratelimitd_client import AsyncRateLimiter

ENDPOINT: Final = "/orders"

RULES: Final = f"""\
rules:
  - endpoint: {ENDPOINT}
    identifier_type: user
    limit: 5
    window_seconds: 1
    algorithm: sliding_window
"""

POLITE: Final = ("ann", "ben", "cleo")
GREEDY: Final = "greedy"
POLITE_PER_S: Final = 2
GREEDY_PER_S: Final = 30

SHOWN_S: Final = 1.0
"""Interval between two readings on a terminal; rates are whole numbers."""

PIPED_S: Final = 5.0
"""Interval between two readings elsewhere."""

TIMEOUT_S: Final = 1.0
"""Timeout of a check. Longer than an application's: a busy desktop should show limits, not missed deadlines."""

HISTORY: Final = 30
"""Readings in a caller's sparkline."""

HEAD: Final = ("CALLER", "ALLOWED/S", "DENIED/S", "LIMIT", "LAST 30")

_LIMIT: Final = re.compile(rb"q=(\d+);w=(\d+)")
"""The quota and the window in the header ``RateLimit-Policy``."""


def demo(
    *,
    grpc_port: Annotated[int, port_option("gRPC port of the node.")] = run.GRPC_PORT,
    http_port: Annotated[int, port_option("HTTP port of the node.")] = run.HTTP_PORT,
    api_port: Annotated[int, port_option("Port of the API.")] = 8000,
    browser: Annotated[bool, typer.Option(help="Open the page of the node in the browser.")] = True,
) -> None:
    """Watch a limit act: a node, a small API, three polite callers and a greedy one.

    Edit the limit on the page or on the command line, and see it act at once. Needs nothing else, and leaves nothing
    behind. Ports that are taken are left out. q or Ctrl-C stops everything.

    Example:
      ratelimitd demo
      ratelimitd demo --no-browser
    """
    for may_retry in (True, False):
        [node] = run.nodes(1, grpc_port=grpc_port, http_port=http_port)
        taken = (node.grpc_port, node.http_port)
        [port] = run.free_ports(api_port, 1, taken=taken)
        try:
            asyncio.run(Demo(node, port, Output(), opens_page=browser).run())
        except (CliError, StartupError):
            # Another process, such as a second demo, may have taken a port meanwhile.
            if not may_retry or all(map(run.is_free, (*taken, port))):
                raise
        else:
            return


@dataclass(slots=True)
class Caller:
    """A caller that calls the API at a fixed rate, and its answers."""

    name: str
    per_s: int = POLITE_PER_S
    allowed: int = 0
    denied: int = 0
    limit: str = ""
    """The limit in the last answer."""
    _before: tuple[int, int] = (0, 0)
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=HISTORY))

    async def call(self, port: int) -> None:
        """Call the API on ``port`` repeatedly."""
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            due_s = max(due_s + 1 / self.per_s, loop.time())
            await asyncio.sleep(due_s - loop.time())
            with contextlib.suppress(OSError):  # a call that never reached the API does not count
                self._note(await _get(port, self.name))

    def _note(self, answer: bytes) -> None:
        if answer.startswith(b"HTTP/1.1 200"):
            self.allowed += 1
        else:
            self.denied += 1
        if found := _LIMIT.search(answer):
            self.limit = f"{int(found[1])} in {int(found[2])} s"

    def reading(self, seconds: float) -> Sequence[object]:
        """Return the row of the table for the time since the previous reading."""
        now = self.allowed, self.denied
        allowed, denied = [
            round((after - before) / seconds)
            for after, before in zip(now, self._before, strict=True)
        ]
        self._before = now
        self._rates.append(allowed)
        picture = sparkline(self._rates, HISTORY)
        return self.name, allowed, denied, self.limit, picture


async def _get(port: int, user: str) -> bytes:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        head = f"GET {ENDPOINT} HTTP/1.1\r\nHost: {HOST}\r\nX-User: {user}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode())
        return await reader.read()
    finally:
        writer.close()


@dataclass(frozen=True, slots=True)
class Demo:
    """One run of the command: starts ``node`` and serves the API on ``api_port``."""

    node: NodePlan
    api_port: int
    output: Output
    opens_page: bool
    callers: Sequence[Caller] = field(
        default_factory=lambda: [*map(Caller, POLITE), Caller(GREEDY, GREEDY_PER_S)]
    )

    async def run(self) -> None:
        """Start everything, show it until stopped, and remove all traces.

        Raises:
            CliError: the node cannot start.
            StartupError: the port of the API cannot be bound.
        """
        await run.until_stopped(self._live, self.output)

    async def _live(self, children: Children, directory: Path) -> None:
        # Takes a quarter of a second to import; other commands do without.
        from ratelimitd.web.server import HttpServer  # noqa: PLC0415
        from ratelimitd_client import AsyncRateLimiterClient  # noqa: PLC0415

        rules_file = run.write_rules(directory, RULES)
        command = self.node.command(directory, rules_file=rules_file)
        node = await children.start(self.node.name, command, read=True)
        await run.ready(node)
        async with AsyncRateLimiterClient(self.node.grpc_address, timeout_s=TIMEOUT_S) as limiter:
            api = HttpServer(api_of(limiter), HOST, self.api_port)
            await api.start()
            calling = [asyncio.create_task(one.call(self.api_port)) for one in self.callers]
            try:
                self._show_what_to_try()
                await self._watch()
            finally:
                await cancel_all(*calling)
                await api.stop()

    def _show_what_to_try(self) -> None:
        page = f"http://{self.node.http_address}/"
        is_default = self.node.grpc_port == run.GRPC_PORT
        target = "" if is_default else f" --target {self.node.grpc_address}"
        self.output.line(
            f"An API allows each user 5 requests a second. {GREEDY} sends {GREEDY_PER_S}. Edit the limit:"
        )
        self.output.pairs(
            {
                "on the page": f"{page}rules",
                "or": f"ratelimitd rules update {ENDPOINT} user --limit 15{target}",
                "and call": f"curl -i -H 'X-User: you' http://{HOST}:{self.api_port}{ENDPOINT}",
            }.items()
        )
        self.output.line("q or Ctrl-C stops everything")
        self.output.line()
        self.output.flush()
        if self.opens_page and may_open_page(os.environ):
            webbrowser.open(page)

    async def _watch(self) -> None:
        """Show a reading after each interval; on a terminal it replaces the previous one."""
        # Takes 50 ms to import, as above.
        from rich.console import Console  # noqa: PLC0415
        from rich.live import Live  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        console = Console(highlight=False, markup=False, emoji=False)
        if not console.is_terminal:
            async for rows in self._readings(PIPED_S):
                self.output.table(HEAD, rows)
                self.output.flush()
            return
        with Live(console=console, auto_refresh=False) as live:
            async for rows in self._readings(SHOWN_S):
                live.update(Text("\n".join(table_lines(HEAD, rows, console.width))), refresh=True)

    async def _readings(self, seconds: float) -> AsyncIterator[Sequence[Sequence[object]]]:
        """Yield the callers' answers in each interval, until the quit key is pressed."""
        with run.pressed_keys() as quit_pressed:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(seconds):
                        await quit_pressed.wait()
                        return
                yield [one.reading(seconds) for one in self.callers]


def api_of(limiter: AsyncRateLimiter) -> Any:
    """Return an ASGI application with one answer; ``limiter`` limits callers by ``X-User``.

    The endpoint is the path as sent, so that rules for other paths apply, too; a real application uses its routes.
    """
    from ratelimitd_client.middleware import Identity, Options  # noqa: PLC0415 -- as above
    from ratelimitd_client.middleware.asgi import RateLimitMiddleware  # noqa: PLC0415

    async def answer(_scope: object, _receive: object, send: Any) -> None:
        headers = [(b"content-type", b"text/plain")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"allowed\n"})

    def user(scope: Mapping[str, Any]) -> Identity:
        name = dict(scope["headers"]).get(b"x-user") or b"you"
        return Identity(name.decode("latin-1"), "user")

    options = Options(endpoint=lambda scope: scope["path"], identify=user)
    return RateLimitMiddleware(answer, limiter, options)


def may_open_page(environ: Mapping[str, str]) -> bool:
    """Return whether there is a desktop: elsewhere a browser would take over the terminal."""
    is_desktop = sys.platform in {"darwin", "win32"}
    return is_desktop or bool(environ.get("DISPLAY") or environ.get("WAYLAND_DISPLAY"))
