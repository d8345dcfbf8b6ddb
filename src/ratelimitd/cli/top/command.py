"""The command: reads a node repeatedly, and shows the changes in between.

A node that becomes unreachable is reported as such and read again; one that is unreachable at first ends the command.
Changes nothing on a node.
"""

from __future__ import annotations

import itertools
import json
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import Annotated, Final

import typer

from ratelimitd.cli.client_options import CliError, Target, asks_node, demand
from ratelimitd.cli.output import on_signal, single_keys
from ratelimitd.cli.top.reading import NAMES, Frame, Look, reading
from ratelimitd.errors import printable
from ratelimitd_client import NodeClient

MAX_NAMED_RULES: Final = 10_000
"""Rules whose names are read, ten pages of them; a node counts at most 1,000 separately."""

HISTORY: Final = 500
"""Rates kept for the sparkline: more than a terminal is wide."""


_HANGUP: Final[signal.Signals] = getattr(signal, "SIGHUP", signal.SIGTERM)
"""Windows has no such signal."""


@asks_node
def top(
    target: Target,
    *,
    interval: Annotated[
        float,
        typer.Option(min=0.1, max=3_600, metavar="SECONDS", help="Interval between readings."),
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show one reading, and exit.")] = False,
    rules: Annotated[
        int, typer.Option(min=0, max=1_000, metavar="N", help="Number of rules to show.")
    ] = 10,
) -> None:
    """Watch the rates, latencies, breaker and most blocked rules of a node. q ends it.

    Into a pipe it prints one reading below the other, and with --json each as one line.

    Example:
      ratelimitd top
      ratelimitd top --once --json | jq .blocked_per_s
    """
    with (
        nullcontext() if once else suppress(KeyboardInterrupt),
        # Otherwise they end the process with the terminal as the view left it.
        on_signal(signal.SIGTERM, _exit),
        on_signal(_HANGUP, _exit),
        target.client() as client,
        single_keys() as keyboard,
    ):
        node = _Node(client, target, time.monotonic)
        pause = keyboard.quits_within if keyboard else _sleep
        frames = _frames(node, pause, interval, rules=rules, once=once)
        if target.output.as_json:
            _print_json(frames, target)
        else:
            _show(frames, interval, full_screen=not once)


def _exit(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)  # as shells report the signal


def _sleep(seconds: float) -> bool:
    time.sleep(seconds)
    return False


class _Node:
    """The watched node, and the names of its rules."""

    def __init__(self, client: NodeClient, target: Target, time_s: Callable[[], float]) -> None:
        self.names: Mapping[str, str] = {}
        self._client = client
        self._target = target
        self._time_s = time_s
        self._named_revision: int | None = None

    def look(self) -> Look:
        """Read the node.

        Raises:
            CliError: the node does not answer, or refuses.
        """
        with self._target.explained():
            health = self._client.health()
            if health.rules_revision != self._named_revision:
                rules = itertools.islice(self._client.rules(), MAX_NAMED_RULES)
                self.names = {
                    rule.id: f"{printable(rule.endpoint)} {rule.identifier_type}" for rule in rules
                }
                self._named_revision = health.rules_revision
            return Look.of(self._time_s(), health, self._client.metrics(NAMES))


def _frames(
    node: _Node, pause: Callable[[float], bool], interval_s: float, *, rules: int, once: bool
) -> Iterator[Frame]:
    """Yield a frame after each interval, for which ``pause`` waits, until it returns whether to quit.

    Raises:
        CliError: the first look fails, or one fails and only ``once`` a frame is wanted.
    """
    before = node.look()
    shown = reading(before, before, rules=rules)
    rates: deque[float] = deque(maxlen=HISTORY)
    while not pause(interval_s):
        try:
            earlier, before = before, node.look()
            node_id = before.health.node_id
            demand(node_id == earlier.health.node_id, f"another node answers now: {node_id}")
        except CliError as failure:
            if once:
                raise
            yield Frame(shown, node.names, tuple(rates), str(failure))
            continue
        shown = reading(earlier, before, rules=rules)
        rates.append(shown.allowed_per_s + shown.blocked_per_s)
        yield Frame(shown, node.names, tuple(rates))
        if once:
            return


def _print_json(frames: Iterator[Frame], target: Target) -> None:
    from ratelimitd.cli.top.view import as_json  # noqa: PLC0415 -- see _show

    for frame in frames:
        value = {"error": frame.lost} if frame.lost else as_json(frame.reading, frame.names)
        target.output.line(json.dumps(value, ensure_ascii=False))
        target.output.flush()


def _show(frames: Iterator[Frame], interval_s: float, *, full_screen: bool) -> None:
    """Show frames: on a terminal each replaces the previous one, else one below the other."""
    # Takes 50 ms to import; other commands do without.
    from rich.console import Console  # noqa: PLC0415
    from rich.live import Live  # noqa: PLC0415

    from ratelimitd.cli.top.view import drawn  # noqa: PLC0415

    console = Console(highlight=False, markup=False, emoji=False)
    if not (full_screen and console.is_terminal):
        for frame in frames:
            console.print(drawn(frame, console.width))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        live.update(f"the first reading takes {interval_s:g} s; q ends it", refresh=True)
        for frame in frames:
            live.update(drawn(frame, console.width), refresh=True)
