"""Latency of an application's requests under load while its rate limiter is unavailable, vs. before.

One asyncio application and one with blocking threads, each behind the middleware in a real server, with the client's
default deadline. Load, application and node share the machine.
"""

import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from bench.report import Row, percentile
from ratelimitd_client.sessions import DEFAULT_TIMEOUT_S
from tests.client.app_at_load import SERVERS, Answer, Load, running_app
from tests.client.outages import OUTAGES

BEFORE_S, DURING_S = 2.0, 4.0
MS = 1000


def measure() -> list[Row]:
    """Measure latencies in the outage, the longest wait for the limiter, and the time until it is used again."""
    rows = []
    for server in SERVERS:
        for outage in OUTAGES:
            before, during, back_s = _measure(server, outage)
            name = f"{server}, {outage}"
            took_ms = [answer.took_s * MS for answer in during]
            usual_ms = [answer.took_s * MS for answer in before]
            for what, part in (("p50", 0.5), ("p99", 0.99), ("longest", 1.0)):
                baseline = percentile(usual_ms, part)
                rows.append(
                    Row(f"{name}: {what}", percentile(took_ms, part), "ms", "before", baseline)
                )
            waited_ms = max(answer.waited_s for answer in during) * MS
            rows.append(
                Row(
                    f"{name}: longest wait for the limiter",
                    waited_ms,
                    "ms",
                    "its deadline",
                    DEFAULT_TIMEOUT_S * MS,
                )
            )
            rows.append(Row(f"{name}: limited again after", back_s, "s", "promised", 1.0))
    return rows


def _measure(server: str, outage: str) -> tuple[list[Answer], list[Answer], float]:
    """Return the answers before and in the outage, and the time from its end to the first checked request."""
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        address, begin, end = OUTAGES[outage](Path(directory), stack)
        url = stack.enter_context(running_app(server, address, timeout_s=DEFAULT_TIMEOUT_S))
        load: Load = stack.enter_context(Load(url))
        load.wait_for({"WITHIN_LIMIT"})
        usual = load.mark()
        time.sleep(BEFORE_S)
        away = load.mark()
        begin()
        time.sleep(DURING_S)
        end()
        back = load.mark()
        load.wait_for({"WITHIN_LIMIT"})
        answers: list[Answer] = load.stop()
    assert len(answers) == load.asked, "a request was lost"
    assert {answer.status for answer in answers} == {200}
    before = [answer for answer in answers if usual < answer.began_s < away]
    during = [answer for answer in answers if away < answer.began_s < back]
    checked = [one for one in answers if one.began_s > back and one.reason == "WITHIN_LIMIT"]
    return before, during, min(one.began_s for one in checked) - back
