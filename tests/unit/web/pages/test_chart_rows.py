from ratelimitd.observe.history import Sample
from ratelimitd.web.pages.overview_view import HIT_RATIO, P99, row


def test_a_row_is_what_the_charts_take():
    counts = (0, 0, 0, 0, 0, 0, 4, *[0] * 8)
    sample = Sample(5, 1.23456, 2.0, 3.0, 8.0, 2.0, counts, buckets=9)
    assert row(sample) == [5, 1.235, 2.0, 3.0, 1.5, 1.95, 1.99, 0.25, 9]
    assert row(Sample(6)) == [6, 0.0, 0.0, 0.0, None, None, None, None, 0]
    assert (row(sample)[P99], row(sample)[HIT_RATIO]) == (1.99, 0.25)
