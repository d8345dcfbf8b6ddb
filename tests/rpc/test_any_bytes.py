"""I9: no byte string causes fail-open. Each is answered with a decision or a status for a caller's error."""

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimitd.services.methods import ROLES
from tests.rpc.wire import field, varint

UNARY = [path for path in ROLES if not path.endswith(("/Watch", "/ServerReflectionInfo"))]

DOCUMENTED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS,
    grpc.StatusCode.ABORTED,
}

NUMBERS = st.integers(1, 10)
VALUES = st.one_of(
    st.binary(max_size=20),
    st.sampled_from([b"user", b"ip", b"api_key", b"/a", b"*", b"1.2.3.4", b"token_bucket"]),
)
FIELDS = st.one_of(
    st.builds(field, NUMBERS, VALUES),
    st.builds(lambda number, value: varint(number << 3) + varint(value), NUMBERS, st.integers(-(2**63), 2**64 - 1)),
)  # fmt: skip
MESSAGES = st.lists(FIELDS, max_size=6).map(b"".join)
NESTED = st.lists(st.builds(field, st.just(1), MESSAGES), max_size=3).map(b"".join)
ANY_BYTES = st.one_of(st.binary(max_size=60), MESSAGES, NESTED)


@pytest.mark.deep
@pytest.mark.parametrize("path", UNARY)
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=ANY_BYTES)
async def test_any_bytes_get_a_decision_or_a_callers_error(node, path, data):
    code, _ = await node.outcome(path, data)
    assert code in DOCUMENTED
    assert node.fail_opens() == (0, 0)
    assert node.stats.unexpected_total == 0
    assert "unexpected" not in node.stats.errors_by_transport
