import pytest

from ratelimitd.tracing import is_sampled

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize(
    ("traceparent", "sampled"),
    [
        (None, False),
        ("", False),
        (f"00-{TRACE}-{PARENT}-01", True),
        (f"00-{TRACE}-{PARENT}-00", False),
        (f"00-{TRACE}-{PARENT}-03", True),
        (f"00-{TRACE}-{PARENT}-02", False),
        (f"00-{TRACE}-{PARENT}-1", False),
        (f"01-{TRACE}-{PARENT}-01-more-of-a-later-version", True),
        (f"00-{TRACE.upper()}-{PARENT}-01", False),
        ("01", False),
        (f"00-{TRACE}-{PARENT}-01\n", False),
        (f"00-{TRACE}-{PARENT}-01-more", False),
        (f"00-{TRACE}-{PARENT}-01-", False),
        (f"ff-{TRACE}-{PARENT}-01", False),
        (f"00-{'0' * 32}-{PARENT}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f"00-{'0' * 31}1-{'0' * 15}1-01", True),
    ],
)
def test_only_a_caller_who_says_so_records_its_trace(traceparent, sampled):
    assert is_sampled(traceparent) is sampled
