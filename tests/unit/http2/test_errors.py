from ratelimitd.http2.errors import Cause, ConnectionFailureError, StreamFailureError
from ratelimitd_wire.codes import ErrorCode


def test_codes_are_those_of_the_wire():
    assert [code.name for code in sorted(ErrorCode)] == [
        "NO_ERROR",
        "PROTOCOL_ERROR",
        "INTERNAL_ERROR",
        "FLOW_CONTROL_ERROR",
        "SETTINGS_TIMEOUT",
        "STREAM_CLOSED",
        "FRAME_SIZE_ERROR",
        "REFUSED_STREAM",
        "CANCEL",
        "COMPRESSION_ERROR",
        "CONNECT_ERROR",
        "ENHANCE_YOUR_CALM",
        "INADEQUATE_SECURITY",
        "HTTP_1_1_REQUIRED",
    ]
    assert [code.value for code in sorted(ErrorCode)] == list(range(14))


def test_causes_can_be_labels():
    assert all(cause.value.replace("_", "").isalnum() for cause in Cause)
    assert len({cause.value for cause in Cause}) == len(Cause)


def test_a_failure_says_what_it_means_on_the_wire_and_to_a_counter():
    failure = ConnectionFailureError(ErrorCode.PROTOCOL_ERROR, Cause.PROTOCOL, "why")
    assert (failure.code, failure.cause, failure.message) == (1, "protocol", "why")
    stream = StreamFailureError(ErrorCode.REFUSED_STREAM, Cause.TOO_MANY_STREAMS)
    assert (stream.code, stream.cause) == (7, "too_many_streams")
