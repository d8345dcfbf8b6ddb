import pytest

from ratelimitd.web.pages.rendering import NONE, faded, milliseconds, percent, seconds, short, size


def plain(text):
    return text.replace("\u202f", " ")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0"),
        (0.004, "< 0.01"),
        (0.04, "0.04"),
        (0.5, "0.5"),
        (3.46, "3.5"),
        (9.96, "10"),
        (420.4, "420"),
        (12_345.6, "12 346"),
        (-2.0, "−2"),
    ],
)
def test_decimals_are_there_while_they_matter(value, expected):
    assert plain(short(value)) == expected


@pytest.mark.parametrize(
    ("value", "expected"), [(0.08, "< 1"), (0.99, "< 1"), (1.0, "1"), (3.46, "3.5")]
)
def test_what_little_is_left_of_a_count_is_not_told_to_the_hundredth(value, expected):
    assert plain(faded(value)) == expected


@pytest.mark.parametrize(
    ("value_ms", "expected"),
    [(None, NONE), (0.0354, "35 µs"), (1.52, "1.5 ms"), (250.0, "250 ms"), (4_530.0, "4.5 s")],
)
def test_a_latency_is_in_the_unit_that_suits_it(value_ms, expected):
    assert plain(milliseconds(value_ms)) == expected


@pytest.mark.parametrize(
    ("value_s", "expected"),
    [(0, "0 s"), (0.25, "250 ms"), (-0.25, "−250 ms"), (12.3, "12 s"), (-3.0, "−3 s")],
)
def test_a_duration_is_in_the_unit_that_suits_it(value_s, expected):
    assert plain(seconds(value_s)) == expected


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(None, NONE), (1.0, "100 %"), (0.9999, "99.9 %"), (0.97, "97 %"), (0.005, "0.5 %")],
)
def test_all_and_next_to_all_are_told_apart(ratio, expected):
    assert plain(percent(ratio)) == expected


@pytest.mark.parametrize(
    ("octets", "expected"),
    [(0, "0 B"), (1_536, "1.5 KiB"), (120 * 2**20, "120 MiB"), (2**50, "1 024 TiB")],
)
def test_memory_is_in_the_unit_that_suits_it(octets, expected):
    assert plain(size(octets)) == expected
