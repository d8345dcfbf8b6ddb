"""``/backtest``: shows which recorded checks edited rules would deny, before they are saved.

The replay runs in a separate process, as the command does: it takes seconds of CPU. Nothing is uploaded.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route

from ratelimitd.backtest.recorder import FILE_NAME, WHOLE
from ratelimitd.errors import RuleInvalidError
from ratelimitd.model import US_PER_S, Rule
from ratelimitd.rules.rules_file import dump_rules, dump_rules_json, parse_rules
from ratelimitd.rules.store import RuleDraft
from ratelimitd.rules.validation import RuleRow
from ratelimitd.web.pages.page_base import Fields, Frame
from ratelimitd.web.pages.rendering import instant

MAX_WINDOW_BYTES: Final = 50_000_000
"""Maximum size of a replay, the newest files of a window: two million checks, about 10 s."""

MAX_WINDOWS: Final = 288
"""Selectable files: those of a day, at moderate load."""

MAX_RULES: Final = 2_000
"""Rules in a replay: a thread writes them for the other process in at most a second."""

REPLAY_S: Final = 60.0
"""Maximum duration of a replay."""

MAX_LOGGED: Final = 4_000
"""Characters from the end of a failed replay's output that are logged."""

ANSWER_S: Final = 5.0
"""How long the answer to the form waits for the result; a longer replay gets a page of its own. Shorter than the
connection's and the worker's timeouts for an answer."""

REFRESH_S: Final = 2
"""Interval at which that page reloads."""

LEFT_S: Final = 10.0
"""A replay whose result has not been requested for this long is ended: the visitor has left."""

PROGRAM: Final = """
import os, sys
from ratelimitd.node.process import ending_with
ending_with(int(sys.argv.pop(1)))()
os.nice(10)
from ratelimitd.cli import main
raise SystemExit(main())
"""
"""The command, in a process that ends with the process whose id is its first argument. The child sets this up itself:
doing so between fork and exec would copy the page tables of a node that answers checks."""

COMMAND: Final = (sys.executable, "-P", "-c", PROGRAM)

_REPLAYED: Final = {0, 4}
"""Exit statuses of a completed replay."""

WINDOWS: Final[Mapping[str, float]] = {"the last hour": 3_600, "the last day": 86_400}
"""Names of windows that end now, with their length in seconds."""

EXAMPLE: Final = "rules: []\n"

_log = logging.getLogger(__name__)


class BacktestPage:
    """The endpoints of the page."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._parts = frame.parts
        self._replay: _Replay | None = None
        """The running replay, or the last one."""

    def routes(self) -> list[BaseRoute]:
        """Return their routes."""
        return [
            Route("/backtest", self._frame.reading(self.show)),
            Route("/backtest", self._frame.posting(self.replay), methods=["POST"]),
        ]

    async def show(self, request: Request) -> Response:
        """Show the form for the rule in the parameter ``rule``, or the replay in the parameter ``replay``."""
        if (wanted := request.query_params.get("replay")) is not None:
            return await self._show_replay(request, wanted)
        book = self._parts.book()
        rule = book.get(request.query_params.get("rule", "")) if book else None
        text = EXAMPLE if rule is None else dump_rules([_draft_of(rule)])
        return await self._page(request, next(iter(WINDOWS)), text)

    async def replay(self, request: Request, fields: Fields) -> Response:
        """Replay with the rules of the form in place of those of the same endpoint and type."""
        self._frame.demand(request, self._parts.may_administer)
        window, text = fields.get("window", ""), fields.get("rules", "")
        if self._replay is not None and self._replay.is_running:
            problem = "Another replay is running. Try again in some seconds."
            return await self._page(request, window, text, status_code=409, problem=problem)
        replay = self._replay = _Replay(window, text, self._result(window, text))
        result = await replay.result(ANSWER_S)
        if result is None:
            return RedirectResponse(f"/backtest?replay={replay.id}", 303)
        return await self._page(request, window, text, **result)

    async def _show_replay(self, request: Request, wanted: str) -> Response:
        """Show the result, or that the replay is still running."""
        self._frame.demand(request, self._parts.may_administer)
        replay = self._replay
        if replay is None or replay.id != wanted:
            problem = "The result of this replay is not kept any more."
            return await self._page(
                request, next(iter(WINDOWS)), EXAMPLE, status_code=404, problem=problem
            )
        result = await replay.result(0)
        if result is not None:
            return await self._page(request, replay.window, replay.rules, **result)
        page = await self._page(request, replay.window, replay.rules, is_running=True)
        page.headers["Refresh"] = str(REFRESH_S)
        return page

    async def _result(self, window: str, text: str) -> Mapping[str, Any]:
        """Run the replay; return the status and the page's context."""
        book = self._parts.book()
        rules = [*islice(book.rules(), MAX_RULES + 1)] if book is not None else []
        try:
            file = await asyncio.to_thread(_file_of, rules, text, self._parts.types)
        except RuleInvalidError as error:
            return {"status_code": 422, "wrong": str(error)}
        files = await asyncio.to_thread(_files, self._parts.record_dir)
        paths = _within(files, window, self._parts.now_s())
        if file is None:
            problem = f"There are more than {MAX_RULES} rules: use ratelimitd backtest."
        elif not paths:
            problem = "No checks were recorded in this time."
        else:
            report, problem = await _replayed(paths, file)
            return {"status_code": 200 if report else 500, "report": report, "problem": problem}
        return {"status_code": 409, "problem": problem}

    async def _page(
        self, request: Request, window: str, text: str, *, status_code: int = 200, **context: Any
    ) -> Response:
        given = {"wrong": "", "report": None, "is_running": False, **context}
        files = await asyncio.to_thread(_files, self._parts.record_dir)
        return self._frame.page(
            request,
            "backtest.html",
            status_code=status_code,
            is_on=self._parts.record_dir is not None,
            window=window,
            windows=[*WINDOWS, *map(_begin, files)],
            rules=text,
            longest_s=round(REPLAY_S),
            **given,
        )


class _Replay:
    """A replay with the content of its form. It outlives the request, and ends when its visitor has left."""

    def __init__(
        self, window: str, rules: str, work: Coroutine[Any, Any, Mapping[str, Any]]
    ) -> None:
        self.id = secrets.token_hex(8)
        self.window = window
        self.rules = rules
        self._task = asyncio.create_task(work)
        self._leaving: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        """Return whether the result is pending."""
        return not self._task.done()

    async def result(self, wait_s: float) -> Mapping[str, Any] | None:
        """Return the page's context; ``None`` if the replay is still running after ``wait_s``."""
        if self._leaving is not None:
            self._leaving.cancel()
        self._leaving = asyncio.get_running_loop().call_later(LEFT_S, self._task.cancel)
        await asyncio.wait([self._task], timeout=wait_s)
        if self.is_running:
            return None
        if self._task.cancelled():
            return {
                "status_code": 409,
                "problem": "The replay was stopped, because its page was left.",
            }
        return self._task.result()


def _file_of(rules: Iterable[Rule], text: str, types: Collection[str]) -> bytes | None:
    """Return a rules file in which those of ``text`` replace their counterparts; ``None`` if it has too many rules.

    Raises:
        RuleInvalidError: a rule of ``text`` is invalid.
    """
    drafts = [*map(_draft_of, rules), *parse_rules(text.encode(), types)]
    merged = {(one.endpoint, one.identifier_type): one for one in drafts}
    return dump_rules_json(merged.values()).encode() if len(merged) <= MAX_RULES else None


def _draft_of(rule: Rule) -> RuleDraft:
    """Return a rule in the form of a file, without its id."""
    row = RuleRow.of(rule)
    # The YAML writer does not accept enumeration members as text.
    return row._replace(algorithm=str(row.algorithm)).draft()


def _files(directory: Path | None) -> list[Path]:
    """Return the complete files, the newest first; none without a directory."""
    with suppress(OSError):
        paths = directory.iterdir() if directory is not None else ()
        files = [path for path in paths if FILE_NAME.fullmatch(path.name)]
        return sorted([path for path in files if path.suffix == WHOLE], reverse=True)[:MAX_WINDOWS]
    return []


def _begin(path: Path) -> str:
    """Return the approximate start time of a file."""
    return instant(int(path.name[:16]) // US_PER_S)


def _within(files: Sequence[Path], window: str, now_s: float) -> list[Path]:
    """Return the newest files of a window, in their order, up to the size limit of a replay."""
    if window in WINDOWS:
        since_us = (now_s - WINDOWS[window]) * US_PER_S
        files = [path for path in files if int(path.name[:16]) >= since_us]
    else:
        files = [path for path in files if _begin(path) == window]
    found: list[Path] = []
    size = 0
    for path in files:
        with suppress(FileNotFoundError):  # deleted meanwhile
            size += path.stat().st_size
            if found and size > MAX_WINDOW_BYTES:
                break
            found.append(path)
    return found[::-1]


async def _replayed(paths: Sequence[Path], rules: bytes) -> tuple[Mapping[str, Any] | None, str]:
    """Run the command; return its report, or the problem."""
    try:
        process = await asyncio.create_subprocess_exec(
            *COMMAND, str(os.getpid()), "backtest", *map(str, paths), "--rules", "-", "--json",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        return None, f"The replay cannot be started: {error.strerror or error}."
    try:
        async with asyncio.timeout(REPLAY_S):
            out, stderr = await process.communicate(rules)
    except TimeoutError:
        return None, f"The replay took more than {REPLAY_S:.0f} s: use ratelimitd backtest."
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode in _REPLAYED:
        with suppress(ValueError):
            report: Mapping[str, Any] = json.loads(out)
            return report, ""
    return None, _failure(process.returncode or 0, stderr.decode(errors="replace"))


def _failure(status: int, stderr: str) -> str:
    """Return why a command failed. Output that is not an error message of the command is only logged."""
    if status == -signal.SIGKILL:
        return "The replay was killed, as when memory runs out. Take a shorter window, or use ratelimitd backtest."
    if status < 0:
        return f"The replay was ended by signal {-status}: {signal.strsignal(-status)}."
    _, _, error = f"\n{stderr}".partition("\nError: ")
    if error:
        return error.strip()
    _log.error("a replay failed with status %d: %s", status, stderr[-MAX_LOGGED:])
    return f"The replay failed with status {status}. Its output is in the log of the node."
