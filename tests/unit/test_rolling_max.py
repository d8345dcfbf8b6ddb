from ratelimitd.counters import RollingMax


def test_a_peak_is_shown_for_one_to_two_stretches():
    worst = RollingMax(10)
    assert worst.note(0, 5.0) == 5.0
    assert worst.note(9, 1.0) == 5.0
    assert worst.note(10, 2.0) == 5.0
    assert worst.note(19, 0.0) == 5.0
    assert worst.note(20, 0.0) == 2.0
    assert worst.note(30, 0.0) == 0.0


def test_a_gap_without_measurements_forgets():
    worst = RollingMax(10)
    worst.note(0, 5.0)
    assert worst.note(25, 1.0) == 1.0
