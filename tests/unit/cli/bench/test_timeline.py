"""Answers over time, in a bounded number of slots."""

from ratelimitd.cli.bench.workload import SLOTS, Slot, Timeline


def test_answers_and_errors_are_counted_in_the_slot_they_came_in():
    timeline = Timeline(100.0)
    timeline.answered(0.0, 7)
    timeline.answered(0.999, 5)
    timeline.answered(2.0, 9)
    timeline.failed(2.5)
    assert timeline.slots(3.0) == [
        Slot(0.0, 1.0, 2, 0, 7),
        Slot(1.0, 2.0, 0, 0, 0),
        Slot(2.0, 3.0, 1, 1, 9),
    ]
    assert timeline.slots(3.0)[0].rate == 2.0


def test_what_remains_behind_the_last_whole_slot_is_part_of_it():
    timeline = Timeline(100.0)
    for at_s in (0.5, 1.5, 2.01):
        timeline.answered(at_s, 1)
    assert timeline.slots(2.02) == [Slot(0.0, 1.0, 1, 0, 1), Slot(1.0, 2.02, 2, 0, 1)]


def test_a_load_that_ends_within_the_first_slot_has_one():
    timeline = Timeline(100.0)
    timeline.answered(0.1, 3)
    assert timeline.slots(0.5) == [Slot(0.0, 0.5, 1, 0, 3)]


def test_a_load_that_took_no_time_has_none():
    assert Timeline(100.0).slots(0.0) == []


def test_there_are_no_more_slots_however_late_answers_are():
    timeline = Timeline(1.0)
    timeline.answered(0.5, 1)
    timeline.answered(500.0, 2)
    slots = timeline.slots(500.0)
    assert len(slots) < 2 * SLOTS
    assert slots[-1].to_s == 500.0
    assert sum(slot.answers for slot in slots) == 2
