import asyncio
import os
import select
import subprocess
import sys
import threading

import pytest
import pytest_asyncio
from starlette.applications import Starlette

from ratelimitd.backtest.trace import Block, End, Kind, encode_block, encode_end, header
from ratelimitd.errors import MAX_VIOLATIONS
from ratelimitd.model import US_PER_S, Algorithm, Rule
from ratelimitd.rules.book import RuleBook
from ratelimitd.testing import ManualClock, running_node
from ratelimitd.web.pages import backtest as module
from ratelimitd.web.pages.sessions import Sessions
from tests.named_tokens import entry, token_of, write
from tests.page_visitor import PageVisitor, frame_of, text_of, token_in

TIGHT = "rules: [{endpoint: /orders, identifier_type: user, limit: 1, window: 1m, algorithm: fixed_window}]"
NOW_US = ManualClock().now_us()
WIDE = Rule("id-1", "/orders", "user", limit=9, window_seconds=60, algorithm=Algorithm.FIXED_WINDOW)


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Wait longer for results: the machine may be slow."""
    monkeypatch.setattr(module, "ANSWER_S", 60.0)
    monkeypatch.setattr(module, "LEFT_S", 120.0)


@pytest.fixture
def trace(tmp_path):
    directory = tmp_path / "trace"
    directory.mkdir()
    for begun_us, checks in ((NOW_US - 7_200_000_000, 1), (NOW_US - 600_000_000, 3)):
        block = Block(
            kinds=[Kind(("user",), "/orders")],
            times=[begun_us + number for number in range(checks)],
            identities=[b"\xaa" * 8] * checks,
            costs=[1] * checks,
            numbers=[0] * checks,
            allowed=[1] * checks,
        )
        octets = header(b"T" * 16, b"W" * 8) + encode_block(block)
        file = directory / f"{begun_us:016d}-{0:016x}.trace"
        file.write_bytes(octets + encode_end(End(checks, 2, 0.5)))
    (directory / f"{NOW_US:016d}-{0:016x}.part").write_bytes(b"")
    (directory / "trace-id").write_bytes(b"T" * 16)
    return directory


@pytest_asyncio.fixture
async def visitor(trace):
    """A visitor of the page alone, on a node that records and has one rule."""
    frame = frame_of(
        Sessions("", lambda: 0.0),
        book=lambda: RuleBook.of([WIDE], 1),
        types=("user",),
        now_s=lambda: NOW_US / US_PER_S,
        record_dir=trace,
        may_administer=lambda call: None,
    )
    app = Starlette(routes=module.BacktestPage(frame).routes())
    async with PageVisitor(app=app) as found:
        yield found


async def posted(visitor, window="the last hour", rules=TIGHT):
    token = token_in((await visitor.get("/backtest")).text)
    return await visitor.post("/backtest", {"window": window, "rules": rules}, token=token)


async def replay(visitor, window="the last hour", rules=TIGHT):
    answer = await posted(visitor, window, rules)
    return answer.status_code, text_of(answer)


async def test_edited_rules_are_replayed_before_they_are_saved(clock, tmp_path, trace):
    rules = tmp_path / "rules.yaml"
    rules.write_text(TIGHT.replace("limit: 1", "limit: 9"))
    async with (
        running_node(clock=clock, rules_file=rules, record_dir=trace) as node,
        PageVisitor(node.http_address) as visitor,
    ):
        status, text = await replay(visitor)
        [rule] = node._limiter.book.rules()
    assert (status, rule.limit) == (200, 9)
    assert "2 newly denied of 3 checks" in text
    assert "Denied 2, was 0" in text
    assert "default: 1 in 1 min 2 1 of 1 3" in text
    assert "aaaaaaaaaaaaaaaa user 0 2" in text
    assert "50.0 % of the identities" in text
    assert "0 checks, 2 holds" in text


async def test_rules_of_the_node_are_replayed_without_an_edit(visitor):
    text = (await replay(visitor, "the last day", "rules: []"))[1]
    assert "nothing newly denied of 4 checks" in text
    assert "default: 9 in 1 min" in text


@pytest.fixture
def replayed(monkeypatch, trace):
    """The numbers of the files of replays, which do nothing."""
    found = []

    async def replayed(paths, _rules):
        files = sorted(trace.glob("*.trace"))
        found.append([files.index(path) for path in paths])
        return None, ""

    monkeypatch.setattr(module, "_replayed", replayed)
    return found


async def test_window_may_be_one_file(visitor, replayed):
    page = await visitor.get("/backtest")
    assert "2023-11-14 22:00:00 UTC" in page.text
    for window in ("2023-11-14 22:00:00 UTC", "the last hour", "the last day"):
        await replay(visitor, window)
    assert replayed == [[0], [1], [0, 1]]


async def test_form_contains_the_rule_to_edit(visitor):
    text = text_of(await visitor.get(f"/backtest?rule={WIDE.id}"))
    assert "endpoint: /orders" in text
    assert "rules: []" in text_of(await visitor.get("/backtest?rule=none"))


async def test_invalid_rule_is_reported_at_its_place(visitor):
    status, text = await replay(visitor, rules=TIGHT.replace("limit: 1", "limit: 0"))
    assert status == 422
    assert "rules[0].limit: " in text


async def test_first_of_many_invalid_rules_are_reported(visitor):
    _, text = await replay(visitor, rules="rules:\n" + "- {}\n" * 1_000)
    assert text.count("is missing") == MAX_VIOLATIONS
    assert f"{4 * 1_000 - MAX_VIOLATIONS} more" in text


@pytest.mark.parametrize("step", ["parse_rules", "_draft_of", "dump_rules_json"])
async def test_event_loop_is_not_blocked_while_rules_are_read_and_written(
    visitor, monkeypatch, step
):
    loop, real = asyncio.get_running_loop(), getattr(module, step)

    def work(*arguments):
        went_on = threading.Event()
        loop.call_soon_threadsafe(went_on.set)
        assert went_on.wait(5)
        return real(*arguments)

    async def replayed(_paths, _rules):
        return None, "All was read and written."

    monkeypatch.setattr(module, step, work)
    monkeypatch.setattr(module, "_replayed", replayed)
    assert "All was read and written." in (await replay(visitor))[1]


@pytest.mark.parametrize("window", ["", "2020-01-01 00:00:00 UTC"])
async def test_window_without_checks_is_reported(visitor, window):
    status, text = await replay(visitor, window)
    assert status == 409
    assert "No checks were recorded in this time." in text


async def test_large_book_is_left_to_the_command(visitor, monkeypatch):
    monkeypatch.setattr(module, "MAX_RULES", 0)
    status, text = await replay(visitor)
    assert status == 409
    assert "more than 0 rules: use ratelimitd backtest" in text


async def test_newest_files_of_a_long_window_are_replayed(visitor, replayed, monkeypatch):
    monkeypatch.setattr(module, "MAX_WINDOW_BYTES", 200)
    await replay(visitor, "the last day")
    assert replayed == [[1]]


async def test_damaged_trace_is_reported(visitor, trace):
    file = sorted(trace.glob("*.trace"))[1]
    file.write_bytes(file.read_bytes()[:-1])
    status, text = await replay(visitor)
    assert status == 500
    assert ".trace is truncated: the block at byte" in text


@pytest_asyncio.fixture
async def slow(monkeypatch):
    """A replay that takes longer than the answer to its form; the future ends it."""
    end = asyncio.get_running_loop().create_future()

    async def replayed(_paths, _rules):
        return await end

    monkeypatch.setattr(module, "_replayed", replayed)
    monkeypatch.setattr(module, "ANSWER_S", 0.0)
    return end


async def begun(visitor):
    """Start a slow replay; return the address of its page."""
    answer = await posted(visitor)
    assert answer.status_code == 303
    return answer.headers["Location"]


async def ended(visitor, page):
    """Wait for the end of a replay; return its result."""
    while "Refresh" in (answer := await visitor.get(page)).headers:
        pass
    return answer


async def test_one_replay_runs_at_a_time(visitor, slow):
    page = await begun(visitor)
    status, text = await replay(visitor)
    assert status == 409
    assert "Another replay is running" in text
    slow.set_result((None, "It was slow."))
    assert "It was slow." in text_of(await ended(visitor, page))
    assert "Another replay is running" not in (await replay(visitor))[1]


async def test_slow_replay_has_a_page_that_reloads_until_the_result(visitor, slow):
    page = await begun(visitor)
    answer = await visitor.get(page)
    assert answer.status_code == 200
    assert answer.headers["Refresh"] == "2"
    assert "The replay is running" in text_of(answer)
    assert "<textarea" not in answer.text  # the next page would overwrite typed text
    slow.set_result((None, "It was slow."))
    answer = await ended(visitor, page)
    assert answer.status_code == 500
    assert "It was slow." in text_of(answer)
    assert "limit: 1, window: 1m" in text_of(answer)
    assert "It was slow." in text_of(await visitor.get(page))


@pytest.mark.usefixtures("slow")
async def test_replay_ends_after_its_page_is_left(visitor, monkeypatch):
    page = await begun(visitor)
    monkeypatch.setattr(module, "LEFT_S", 0.0)
    answer = await ended(visitor, page)
    assert answer.status_code == 409
    assert "The replay was stopped, because its page was left." in text_of(answer)


async def test_request_for_the_result_postpones_the_end_of_a_replay(visitor, slow, monkeypatch):
    loop, ends = asyncio.get_running_loop(), []
    real = loop.call_later

    def call_later(delay_s, *arguments, **options):
        timer = real(delay_s, *arguments, **options)
        if delay_s == module.LEFT_S:
            ends.append(timer)
        return timer

    monkeypatch.setattr(module, "LEFT_S", 12_345.0)
    monkeypatch.setattr(loop, "call_later", call_later)
    await visitor.get(await begun(visitor))
    assert [timer.cancelled() for timer in ends] == [True, False]
    slow.set_result((None, ""))


async def test_former_replay_is_not_found(visitor):
    answer = await visitor.get("/backtest?replay=former")
    assert answer.status_code == 404
    assert "not kept any more" in text_of(answer)


async def test_replay_is_ended_at_its_time_limit(visitor, monkeypatch):
    monkeypatch.setattr(module, "REPLAY_S", 0.0)
    assert "took more than 0 s: use ratelimitd backtest" in (await replay(visitor))[1]


@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("import os; os.kill(os.getpid(), 9)", "The replay was killed, as when memory runs out."),
        ("import os; os.kill(os.getpid(), 15)", "The replay was ended by signal 15: Terminated."),
        ("import os; os.kill(os.getpid(), 64)", "The replay was ended by signal 64: "),
        ("raise KeyError", "The replay failed with status 1. Its output"),
        ("print('no report')", "The replay failed with status 0. Its output"),
        ("raise SystemExit('Warning: of no matter\\nError: one\\n  two')", "one two"),
    ],
)
async def test_failed_replay_reports_the_reason(visitor, monkeypatch, program, told):
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-c", program))
    status, text = await replay(visitor)
    assert status == 500
    assert f"recorded checks {told}" in text
    assert "Traceback" not in text
    assert "Warning" not in text


async def test_output_of_a_failed_replay_is_logged(visitor, monkeypatch, caplog):
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-c", "raise KeyError"))
    await replay(visitor)
    assert "a replay failed with status 1: Traceback" in caplog.text


async def test_replay_that_cannot_start_reports_the_reason(visitor, monkeypatch):
    monkeypatch.setattr(module, "COMMAND", ("/there/is/none",))
    status, text = await replay(visitor)
    assert status == 500
    assert "The replay cannot be started: No such file or directory." in text


NODE = """
import asyncio, pathlib, sys
from ratelimitd.web.pages import backtest
asyncio.run(backtest._replayed([pathlib.Path(sys.argv[1])], b"rules: []"))
"""


def test_replay_ends_when_its_node_is_killed(tmp_path):
    trace = tmp_path / "trace"
    os.mkfifo(trace)
    node = subprocess.Popen([sys.executable, "-c", NODE, trace])
    with trace.open("wb") as file:  # opens when the replay reads it
        node.kill()
        node.wait()
        readers = select.poll()
        readers.register(file, 0)
        [(_, event)] = readers.poll(30_000)
        assert event & select.POLLERR


async def test_nothing_can_be_selected_without_recording():
    async with running_node() as node, PageVisitor(node.http_address) as visitor:
        assert "This node records no checks" in text_of(await visitor.get("/backtest"))
        answer = await visitor.post("/backtest", {"window": "the last hour", "rules": TIGHT})
        assert answer.status_code == 409
        assert "No checks were recorded in this time." in text_of(answer)


async def test_missing_directory_counts_as_empty(visitor, trace):
    trace.rename(trace.with_name("gone"))
    assert (await visitor.get("/backtest")).status_code == 200


async def test_results_require_the_admin_role(tmp_path):
    tokens = write(tmp_path / "tokens.yaml", entry("wallboard", role="read"))
    options = {"admin_token": "t" * 16, "tokens_file": tokens}
    async with running_node(**options) as node, PageVisitor(node.http_address) as visitor:
        await visitor.log_in(token_of("wallboard"))
        assert (await visitor.get("/backtest")).status_code == 200
        assert (await visitor.get("/backtest?replay=x")).status_code == 403
