import inspect
import io
import json
import logging

import pytest
from google.rpc import error_details_pb2, status_pb2

from ratelimitd import errors
from ratelimitd.counters import CheckStats
from ratelimitd.errors import (
    CheckInvalidError,
    FieldViolation,
    InvalidInputError,
    RateLimitdError,
    RuleConflictError,
    RuleExistsError,
    RuleInvalidError,
    RuleNotFoundError,
    RulesFullError,
    StoreCorruptError,
    StoreMisconfiguredError,
    StoreOverloadedError,
    StoreUnavailableError,
)
from ratelimitd.observe import logs
from ratelimitd.observe.logs import LogContext
from ratelimitd.rpc.interface import RpcError, StatusCode
from ratelimitd.services.errors import ERROR_STATUS, ErrorEdge, rich_error, rpc_error

RULE_ID = "id"
SECRET = "user:alice"

NOT_IN_CALLS = {errors.SettingsError, errors.StartupError, errors.TraceInvalidError}


@pytest.fixture
def edge():
    return ErrorEdge(CheckStats())


def details_of(error):
    status = status_pb2.Status.FromString(error.details)
    assert (status.code, status.message) == (error.code, error.message)
    kinds = ("ErrorInfo", "BadRequest", "ResourceInfo", "RetryInfo")
    found = {}
    for packed in status.details:
        name = packed.type_url.rpartition(".")[2]
        assert name in kinds
        found[name] = getattr(error_details_pb2, name)()
        packed.Unpack(found[name])
    return found


def test_every_error_that_can_reach_a_caller_has_a_row():
    defined = {
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, RateLimitdError)
    }
    met = defined - NOT_IN_CALLS - {RateLimitdError}
    assert {
        kind for kind in met if not any(parent in ERROR_STATUS for parent in kind.__mro__)
    } == set()


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    [
        (InvalidInputError(), StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
        (CheckInvalidError(), StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
        (RuleInvalidError(), StatusCode.INVALID_ARGUMENT, "INVALID_FIELD"),
        (RuleNotFoundError("id"), StatusCode.NOT_FOUND, "RULE_NOT_FOUND"),
        (RuleExistsError("taken"), StatusCode.ALREADY_EXISTS, "RULE_EXISTS"),
        (RulesFullError("full"), StatusCode.RESOURCE_EXHAUSTED, "TOO_MANY_RULES"),
        (RuleConflictError("etag"), StatusCode.ABORTED, "ETAG_MISMATCH"),
        (StoreUnavailableError("dsn"), StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE"),
        (StoreMisconfiguredError("acl"), StatusCode.UNAVAILABLE, "STORE_UNAVAILABLE"),
        (StoreOverloadedError("full"), StatusCode.UNAVAILABLE, "STORE_OVERLOADED"),
        (StoreCorruptError("row"), StatusCode.INTERNAL, "STORE_CORRUPT"),
    ],
)
def test_an_error_has_its_status_and_a_stable_reason(edge, error, code, reason):
    translated = edge.translate(error, "/s/m")
    info = details_of(translated)["ErrorInfo"]
    assert (translated.code, info.reason, info.domain) == (code, reason, "ratelimitd")
    assert edge._stats.unexpected_total == 0


def test_every_violated_field_is_named():
    error = RuleInvalidError(FieldViolation("a", "must be"), FieldViolation("b.c", "must not"))
    translated = rpc_error(error)
    assert translated.message == "a: must be; b.c: must not"
    violations = details_of(translated)["BadRequest"].field_violations
    assert [(v.field, v.description) for v in violations] == [("a", "must be"), ("b.c", "must not")]


def test_an_error_about_thousands_of_fields_fits_into_trailers():
    error = RuleInvalidError(*[FieldViolation("f" * 500, "d" * 500)] * 1000)
    translated = rpc_error(error)
    assert len(translated.details) * 4 / 3 + len(translated.message) < 8192
    violations = details_of(translated)["BadRequest"].field_violations
    assert len(violations) == 16
    assert violations[0].field == "f" * 119 + "…"


def test_a_rule_is_named_as_the_resource():
    resource = details_of(rpc_error(RuleNotFoundError("id-1")))["ResourceInfo"]
    assert (resource.resource_type, resource.resource_name) == ("ratelimiter.v1.RateLimit", "id-1")
    assert resource.description == "no rule has the id 'id-1'"
    assert details_of(rpc_error(RuleExistsError("taken")))["ResourceInfo"].description == "taken"


def test_an_unavailable_store_has_a_reason_and_a_retry_delay():
    translated = rpc_error(StoreUnavailableError("the rule database is locked"))
    assert translated.message == "the rule database is locked"
    assert details_of(translated)["RetryInfo"].retry_delay.seconds == 1


def test_an_unavailable_store_is_logged(edge, caplog):
    edge.translate(StoreUnavailableError("the rule database is locked"), "/s/m")
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        "a call of /s/m was answered UNAVAILABLE: the rule database is locked"
    )
    assert edge._stats.unexpected_total == 0


def test_an_rpc_error_is_unchanged(edge):
    error = rich_error(StatusCode.NOT_FOUND, "X", "no")
    assert edge.translate(error, "/s/m") is error


@pytest.mark.parametrize("kind", [ZeroDivisionError, errors.StartupError])
def test_any_other_error_is_internal_counted_and_logged_without_its_text(edge, kind):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs._formatter(LogContext("n1"), console=False, colors=False))
    logger = logging.getLogger("ratelimitd.services.errors")
    logger.addHandler(handler)

    def fail():
        raise kind(SECRET)

    try:
        fail()
    except kind as error:
        translated = edge.translate(error, "/s/m")
    finally:
        logger.removeHandler(handler)
    assert (translated.code, translated.message) == (StatusCode.INTERNAL, "unexpected error")
    assert edge._stats.unexpected_total == 1
    line = json.loads(stream.getvalue())
    assert (line["event"], line["level"]) == ("unexpected error in /s/m", "error")
    assert line["exception"] == kind.__name__
    assert "test_status.py" in line["at"]
    assert SECRET not in stream.getvalue()


async def test_an_awaited_answer_passes_and_its_error_is_translated(edge):
    async def answer():
        return b"x"

    async def fail():
        raise RuleNotFoundError(RULE_ID)

    assert await edge.awaited(answer(), "/s/m") == b"x"
    with pytest.raises(RpcError) as caught:
        await edge.awaited(fail(), "/s/m")
    assert caught.value.code is StatusCode.NOT_FOUND


async def test_streamed_answers_pass_and_their_error_is_translated(edge):
    async def answers():
        yield b"x"
        raise RuleNotFoundError(RULE_ID)

    streamed = edge.streamed(answers(), "/s/m")
    assert await anext(streamed) == b"x"
    with pytest.raises(RpcError):
        await anext(streamed)

    async def one():
        yield b"x"

    assert [answer async for answer in edge.streamed(one(), "/s/m")] == [b"x"]
