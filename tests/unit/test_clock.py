import time

from hypothesis import given
from hypothesis import strategies as st

from ratelimitd.clock import SKEW_ALARM_US, SLEW_DIVISOR, SystemClock

SECOND_US = 1_000_000
START_US = 1_700_006_400_000_000


class Machine:
    """The two clocks of a machine, set by hand."""

    def __init__(self):
        self.wall_us, self.monotonic_us = START_US, 5_000_000

    def advance(self, us):
        self.wall_us += us
        self.monotonic_us += us

    def clock(self):
        return SystemClock(lambda: self.wall_us * 1000, lambda: self.monotonic_us * 1000)


def test_a_new_clock_shows_the_wall_time():
    assert Machine().clock().now_us() == START_US


def test_by_itself_it_runs_with_the_machine():
    before_us = time.time_ns() // 1000
    clock = SystemClock()
    assert before_us <= clock.now_us() <= time.time_ns() // 1000 + SKEW_ALARM_US
    assert clock.monotonic_us() <= time.monotonic_ns() // 1000


def test_time_goes_on_with_the_monotonic_clock_whatever_the_wall_says():
    machine = Machine()
    clock = machine.clock()
    machine.advance(SECOND_US)
    machine.wall_us -= 3600 * SECOND_US
    assert clock.now_us() == START_US + SECOND_US
    assert clock.monotonic_us() == machine.monotonic_us


def test_measuring_again_tells_the_error_and_moves_nothing_at_once():
    machine = Machine()
    clock = machine.clock()
    machine.wall_us += 700
    assert clock.remeasure() == 700
    assert clock.now_us() == START_US
    machine.wall_us -= 1000
    assert clock.remeasure() == -300
    assert clock.now_us() == START_US


def test_a_wall_that_is_ahead_is_caught_up_with_at_10_ms_a_second_and_no_further():
    machine = Machine()
    clock = machine.clock()
    machine.wall_us += 15_000
    clock.remeasure()
    machine.advance(SECOND_US)
    assert clock.now_us() == START_US + SECOND_US + 10_000
    machine.advance(SECOND_US)
    assert clock.now_us() == machine.wall_us
    machine.advance(3600 * SECOND_US)
    assert clock.now_us() == machine.wall_us


def test_a_wall_that_is_behind_is_waited_for_at_10_ms_a_second_and_no_longer():
    machine = Machine()
    clock = machine.clock()
    machine.wall_us -= 15_000
    clock.remeasure()
    machine.advance(SECOND_US)
    assert clock.now_us() == START_US + SECOND_US - 10_000
    machine.advance(SECOND_US)
    assert clock.now_us() == machine.wall_us
    machine.advance(3600 * SECOND_US)
    assert clock.now_us() == machine.wall_us


def test_an_error_of_one_step_is_gone_after_a_hundred_times_its_size():
    machine = Machine()
    clock = machine.clock()
    machine.wall_us += 2 * SECOND_US
    for _ in range(2 * SLEW_DIVISOR):
        clock.remeasure()
        machine.advance(SECOND_US)
    assert clock.remeasure() == 0


def test_an_error_of_one_microsecond_is_gone_after_a_hundred():
    machine = Machine()
    clock = machine.clock()
    machine.wall_us += 1
    assert clock.remeasure() == 1
    for passed_us in (0, SLEW_DIVISOR - 1, SLEW_DIVISOR):
        machine.monotonic_us = 5_000_000 + passed_us
        assert clock.now_us() == START_US + passed_us + passed_us // SLEW_DIVISOR


steps = st.tuples(
    st.one_of(
        st.just(0), st.integers(-(10**13), 10**13), st.integers(-200, 200)
    ),  # the wall is set
    st.one_of(st.integers(0, 300), st.integers(0, 10**9)),  # µs pass
    st.booleans(),  # measure again
)


@given(st.lists(steps, max_size=40))
def test_whatever_is_done_to_the_wall_time_never_steps_back_and_is_never_more_than_slewed(course):
    """I8."""
    machine = Machine()
    clock = machine.clock()
    last_us = clock.now_us()
    for set_us, elapsed_us, measures in course:
        machine.wall_us += set_us
        if measures:
            error_us = clock.remeasure()
            assert error_us == machine.wall_us - clock.now_us()
        assert clock.now_us() == last_us
        machine.advance(elapsed_us)
        now_us = clock.now_us()
        slewed_us = now_us - last_us - elapsed_us
        assert now_us >= last_us
        assert abs(slewed_us) <= elapsed_us // SLEW_DIVISOR + 1
        last_us = now_us


def test_a_clock_can_take_over_the_walls_time_at_once_also_backwards():
    machine = Machine()
    clock = machine.clock()
    for step_us in (3600 * SECOND_US, -7200 * SECOND_US):
        machine.wall_us += step_us
        clock.remeasure()
        clock.anchor()
        machine.advance(SECOND_US)
        assert clock.now_us() == machine.wall_us
        assert clock.remeasure() == 0
