"""An application at load whose rate limiter is killed, paused or cut off, and returns.

Every request is answered all the while, and none waits for a limiter that does not answer; those of a view that fails
closed are denied meanwhile. How long they take is measured (`python -m bench outage`) and not asserted: the deadline of
each check is gRPC's to keep, and the breaker sees to it that few are spent in vain. Both are seen here in what the
limiter told each request.
"""

from contextlib import ExitStack

import pytest

from tests.client.app_at_load import SERVERS, Load, running_app
from tests.client.outages import OUTAGES

pytestmark = [pytest.mark.system, pytest.mark.timeout(180)]

TIMEOUT_S = 0.2
"""More than the 20 ms of the client: on a machine full of tests a living node is to be in time."""

SENT = {"WITHIN_LIMIT"}
NOT_SENT = {"NOT_ASKED"}


@pytest.mark.parametrize("server", SERVERS)
@pytest.mark.parametrize("outage", OUTAGES)
def test_no_request_waits_for_a_limiter_that_is_away_and_none_is_lost(server, outage, tmp_path):
    with ExitStack() as stack:
        address, begin, end = OUTAGES[outage](tmp_path, stack)
        url = stack.enter_context(running_app(server, address, timeout_s=TIMEOUT_S))
        load = stack.enter_context(Load(url))
        load.wait_for(SENT)
        load.wait_until_limited("/once")

        begin()
        load.wait_for(NOT_SENT)
        opened = load.mark()
        assert load.ask("/once").status_code == 200
        closed = load.ask("/closed")
        assert (closed.status_code, closed.headers["Retry-After"]) == (503, "1")
        load.wait_for(NOT_SENT)
        during = load.since(opened)
        end()

        load.wait_for(SENT)
        load.wait_until_limited("/once")
        assert load.ask("/closed").status_code == 200
        answers = load.stop()

    assert {answer.status for answer in answers} == {200}
    assert len(answers) == load.asked
    # While the breaker is open, nobody waits: not even who asks for the probe.
    assert {answer.reason for answer in during} == NOT_SENT
    # Who did wait before it opened was told so by gRPC, at the deadline or when the connection broke.
    in_vain = {answer.error for answer in answers if answer.reason == "NO_ANSWER"}
    assert in_vain
    assert in_vain <= {"DEADLINE_EXCEEDED", "UNAVAILABLE"}
