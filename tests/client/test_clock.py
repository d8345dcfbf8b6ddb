"""The clocks of the machine, where no others are given."""

import time

from ratelimitd_client.clock import SystemClock


def test_the_clocks_are_those_of_the_machine():
    clock = SystemClock()
    before_s = time.monotonic(), time.time()
    told_s = clock.monotonic_s(), clock.now_s()
    after_s = time.monotonic(), time.time()
    assert before_s[0] <= told_s[0] <= after_s[0]
    assert before_s[1] <= told_s[1] <= after_s[1]
