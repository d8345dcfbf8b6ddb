"""Warnings: one a second at most, with what is needed to find the fault, and nothing of what a caller sent."""

from ratelimitd_client.middleware.complaints import Complaints
from ratelimitd_client.testing import ManualClock


def test_one_warning_a_second_counts_those_that_were_left_out(caplog):
    clock = ManualClock()
    complaints = Complaints(clock)
    for _ in range(3):
        complaints.complain("broken")
    clock.advance(1)
    complaints.complain("broken")
    assert [record.getMessage() for record in caplog.records] == [
        "broken; 1 such requests since the last warning",
        "broken; 3 such requests since the last warning",
    ]
    assert {record.name for record in caplog.records} == {"ratelimitd_client.middleware"}


def test_an_exception_is_told_by_its_type_and_place_but_not_by_what_it_says(caplog):
    try:
        {}["alice"]
    except KeyError as error:
        Complaints(ManualClock()).complain("broken", error)
    [record] = caplog.records
    assert f"(KeyError, {__file__}:" in record.getMessage()
    assert "alice" not in caplog.text


def test_an_exception_that_was_never_raised_has_no_place(caplog):
    Complaints(ManualClock()).complain("broken", KeyError("alice"))
    assert caplog.records[0].getMessage().startswith("broken (KeyError); ")
