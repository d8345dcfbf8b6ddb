import io
import json
import logging
import threading
import warnings

import pytest

from ratelimitd.buckets.keys import joined
from ratelimitd.model import IdentifierType
from ratelimitd.observe import logs
from ratelimitd.observe.logs import REPEAT_PAUSE_S, LogContext, OncePerPause, RulesLog, masked


@pytest.fixture(autouse=True)
def _logging_as_it_was(monkeypatch):
    root = logging.getLogger()
    handlers, level, raising = root.handlers[:], root.level, logging.raiseExceptions
    levels = {name: logging.getLogger(name).level for name in logs.QUIET}
    # uvicorn stops its access log from propagating when a server is created, as earlier tests may have done.
    monkeypatch.setattr(logging.getLogger("uvicorn.access"), "propagate", True)
    yield
    root.handlers[:], root.level, logging.raiseExceptions = handlers, level, raising
    for name, old in levels.items():
        logging.getLogger(name).setLevel(old)
    logging.captureWarnings(capture=False)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def context():
    return LogContext("n1")


def configured(context, *, level="info", log_format="json", stream=None):
    stream = stream or io.StringIO()
    logs.configure(level=level, log_format=log_format, context=context, stream=stream)
    return stream


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_line_is_json_with_node_and_rules_revision(context):
    stream = configured(context)
    context.rules_revision = 5
    logging.getLogger("ratelimitd.x").info("rules replaced: %d", 3, extra={"skipped": 1})
    (line,) = lines(stream)
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "rules replaced: 3",
        "level": "info",
        "node_id": "n1",
        "rules_revision": 5,
        "skipped": 1,
    }


def test_exception_is_logged_by_type_and_place_without_its_text(context):
    stream = configured(context)
    try:
        {}["user:alice"]
    except KeyError:
        logging.getLogger("x").exception("job crashed")
    (line,) = lines(stream)
    assert line["exception"] == "KeyError"
    assert "test_logs.py" in line["at"]
    assert "alice" not in stream.getvalue()


def test_exc_info_without_an_exception_logs_nothing(context):
    stream = configured(context)
    logging.getLogger("x").error("oops", exc_info=(None, None, None))
    (line,) = lines(stream)
    assert "at" not in line


def test_levels_below_the_setting_are_omitted(context):
    stream = configured(context, level="error")
    logging.getLogger("x").warning("no")
    logging.getLogger("x").error("yes")
    assert [line["event"] for line in lines(stream)] == ["yes"]


@pytest.mark.parametrize(("name", "least"), logs.QUIET.items())
def test_libraries_log_only_from_their_level(context, name, least):
    stream = configured(context, level="debug")
    logging.getLogger(name).log(least - 10, "statement with a secret")
    logging.getLogger(name).log(least, "broken")
    assert [line["event"] for line in lines(stream)] == ["broken"]


def test_path_of_the_collector_is_not_logged(context):
    stream = configured(context, level="debug")
    library = logging.getLogger("urllib3.connectionpool")
    library.debug("POST /tenant/secret HTTP/1.1")
    library.warning("Failed to parse headers (url=/tenant/secret)")
    assert stream.getvalue() == ""


def test_level_applies_to_libraries(context):
    stream = configured(context, level="error")
    logging.getLogger("sqlalchemy").warning("no")
    assert stream.getvalue() == ""


def test_warnings_are_logged(context):
    stream = configured(context)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=True)
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert [line["level"] for line in lines(stream)] == ["warning"]


@pytest.mark.parametrize(
    ("log_format", "stream", "is_json"),
    [
        ("auto", io.StringIO, True),
        ("auto", Terminal, False),
        ("json", Terminal, True),
        ("console", io.StringIO, False),
    ],
)
def test_format_follows_the_setting_and_the_terminal(context, log_format, stream, is_json):
    written = configured(context, log_format=log_format, stream=stream())
    logging.getLogger("x").info("hello")
    assert written.getvalue().startswith("{") is is_json
    assert "hello" in written.getvalue()


def test_colours_are_for_terminals_only(context):
    plain = configured(context, log_format="console")
    logging.getLogger("x").info("hello")
    assert "\x1b" not in plain.getvalue()


def test_closed_stderr_raises_nothing(context, capsys):
    stream = configured(context)
    stream.close()
    logging.getLogger("x").info("hello")
    assert capsys.readouterr().err == ""


def record(text="event %d", level=logging.INFO, name="x"):
    return logging.LogRecord(name, level, "f.py", 1, text, (1,), None)


def test_repeats_within_a_second_are_written_once_and_counted(context):
    now_s = [0.0]
    once = OncePerPause(lambda: now_s[0])
    assert [once.filter(record()) for _ in range(4)] == [True, False, False, False]
    now_s[0] = 1.0
    next_one = record()
    assert once.filter(next_one)
    assert next_one.left_out == 3
    stream = configured(context)
    logging.getLogger().handlers[0].filters.clear()
    logging.getLogger("x").handle(next_one)
    assert lines(stream)[0]["left_out"] == 3


def test_threads_are_filtered_one_after_another():
    together, met = threading.Barrier(2), []

    def time_s():
        try:
            together.wait(0.05)
        except threading.BrokenBarrierError:
            met.append(False)
        else:
            met.append(True)
        return 0.0

    once = OncePerPause(time_s)
    threads = [threading.Thread(target=once.filter, args=(record(),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == [False, False]


def test_other_events_are_written_meanwhile():
    once = OncePerPause(lambda: 0.0)
    records = [record(), record("other"), record(level=logging.ERROR), record(name="y")]
    assert all(map(once.filter, records))


def test_lines_that_differ_in_values_are_all_written(context):
    stream = configured(context)
    told = ["rules cannot be read: locked", "serving the last good rule book, revision 3"]
    for line in told:
        logging.getLogger("x").warning("%s", line)
    assert [line["event"] for line in lines(stream)] == told


def test_omitted_records_of_an_ended_event_are_reported_by_the_next_line(context):
    now_s = [0.0]
    once = OncePerPause(lambda: now_s[0])
    assert [once.filter(record("gone")) for _ in range(4)] == [True, False, False, False]
    early, late, later = record("early %d"), record("late %d"), record("later %d")
    assert once.filter(early)
    now_s[0] = 1.0 + REPEAT_PAUSE_S
    assert once.filter(late)
    assert once.filter(later)
    told = [(each.left_out, each.left_out_of_others) for each in (early, late, later)]
    assert told == [(0, 0), (0, 3), (0, 0)]
    stream = configured(context)
    logging.getLogger().handlers[0].filters.clear()
    logging.getLogger("x").handle(late)
    (line,) = lines(stream)
    assert line["left_out_of_others"] == 3
    assert "left_out" not in line


def written_at(once, now_s, moments):
    """Return at which of the ``moments`` an event is written, with the number omitted before."""
    written = []
    for now_s[0] in moments:
        each = record()
        if once.filter(each):
            written.append((now_s[0], each.left_out))
    return written


def test_lasting_event_is_written_less_often_but_at_least_once_a_minute():
    now_s = [0.0]
    once = OncePerPause(lambda: now_s[0])
    moments = [half / 2 for half in range(2 * 200)]
    assert written_at(once, now_s, moments) == [
        (0.0, 0), (1.0, 1), (3.0, 3), (7.0, 7), (15.0, 15), (31.0, 31), (63.0, 63), (123.0, 119), (183.0, 119),
    ]  # fmt: skip


def test_event_that_returns_after_a_while_starts_again():
    now_s = [0.0]
    once = OncePerPause(lambda: now_s[0])
    written_at(once, now_s, [0.0, 0.5, 1.0, 1.5, 2.0, 2.5])
    # The pause after the line at 1.0 was 2 s, and no record followed for another one.
    assert written_at(once, now_s, [4.0, 4.5, 5.0]) == [(4.0, 3), (5.0, 1)]


def test_text_with_mismatched_values_raises_nothing(context):
    stream = configured(context)
    logging.getLogger("x").info("%d rules", "many")
    logging.getLogger("x").info("next")
    assert [line["event"] for line in lines(stream)][-1] == "next"


def test_remembered_events_are_bounded():
    once = OncePerPause(lambda: 0.0)
    for number in range(logs.REMEMBERED_EVENTS + 10):
        once.filter(record(f"event {number}"))
    assert len(once._seen) == logs.REMEMBERED_EVENTS


@pytest.mark.parametrize(
    ("identifier", "identifier_type", "expected"),
    [
        ("ada.lovelace@example.com", "user", "ada.…"),
        ("ada", "user", "…"),
        ("ada-lov", "user", "a…"),
        ("Ünal Öztürk 12345", "user", "Ünal…"),
        ("sk_live_0123456789abcdef", "api_key", "sk_l…"),
        ("k3y", "api_key", "…"),
        ("203.0.113.77", "ip", "203.0.…"),
        ("2001:db8::1", "ip", "2001:db8:…"),
        ("::1", "ip", "::…"),
    ],
)
def test_only_the_start_of_an_identifier_is_shown(identifier, identifier_type, expected):
    assert masked(identifier.encode(), IdentifierType(identifier_type)) == expected


def test_invalid_text_is_masked():
    assert masked(b"\xff" * 8, IdentifierType.USER) == "\ufffd\ufffd…"


def test_each_identifier_of_a_combination_is_masked():
    assert masked(joined([b"203.0.113.77", b"ada.lovelace"]), "ip+user") == "203.0.…+ada…"


def test_everybody_has_no_identifier():
    assert masked(b"", "all") == "all"


def told(caplog):
    return [record.getMessage() for record in caplog.records]


def test_last_state_of_many_edits_is_logged_once(caplog):
    caplog.set_level(logging.INFO)
    log = RulesLog()
    log.take(1, 6)
    log.write()
    for revision, rules in ((2, 5), (3, 6), (4, 7)):
        log.take(revision, rules)
    log.write()
    log.write()
    assert told(caplog) == ["rules in force: 6", "rules in force: 7"]


def test_book_without_rules_is_warned_of(caplog):
    log = RulesLog()
    log.take(3, 0)
    log.write()
    assert told(caplog) == ["no rules: every check is allowed"]
    assert caplog.records[0].levelno == logging.WARNING


def test_nothing_is_logged_before_the_first_book(caplog):
    caplog.set_level(logging.INFO)
    RulesLog().write()
    assert told(caplog) == []
