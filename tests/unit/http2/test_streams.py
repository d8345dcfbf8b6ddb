import pytest

from ratelimitd.http2.errors import Cause, ConnectionFailureError, StreamFailureError
from ratelimitd.http2.streams import (
    TRANSITIONS,
    UNTOUCHED,
    Input,
    ReceiveWindow,
    Refusal,
    State,
    Stream,
    Streams,
    grown,
    transition,
)
from ratelimitd_wire.codes import ErrorCode

PRINTED = {
    State.IDLE: "open remote_closed !!PROTOCOL !!PROTOCOL !!PROTOCOL !!PROTOCOL idle",
    State.OPEN: "!PROTOCOL remote_closed open remote_closed closed open open",
    State.REMOTE_CLOSED: "!CLOSED !CLOSED !CLOSED !CLOSED closed remote_closed remote_closed",
    State.CLOSED: "!!CLOSED !!CLOSED !CLOSED !CLOSED closed closed closed",
    State.DISCARDED: "discarded " * 7,
}
CODES = {"PROTOCOL": ErrorCode.PROTOCOL_ERROR, "CLOSED": ErrorCode.STREAM_CLOSED}
CELLS = [
    (state, given, cell)
    for state, row in PRINTED.items()
    for given, cell in zip(Input, row.split(), strict=True)
]


def test_every_pair_of_state_and_input_is_in_the_table():
    assert set(TRANSITIONS) == {(state, given) for state in State for given in Input}


@pytest.mark.parametrize(("state", "given", "cell"), CELLS)
def test_each_transition_is_as_in_the_docstring(state, given, cell):
    if not cell.startswith("!"):
        assert transition(state, given) is State(cell)
        return
    error = ConnectionFailureError if cell.startswith("!!") else StreamFailureError
    with pytest.raises(error) as caught:
        transition(state, given)
    assert caught.value.code is CODES[cell.lstrip("!")]
    assert TRANSITIONS[state, given] == Refusal(caught.value.code, error is ConnectionFailureError)


def test_the_cause_follows_the_code():
    with pytest.raises(StreamFailureError) as closed:
        transition(State.REMOTE_CLOSED, Input.DATA)
    with pytest.raises(StreamFailureError) as broken:
        transition(State.OPEN, Input.HEADERS)
    assert (closed.value.cause, broken.value.cause) == (Cause.STREAM_CLOSED, Cause.PROTOCOL)


def test_beginning_an_idle_stream_closes_those_below_it():
    streams = Streams()
    assert streams.state_of(1) is State.IDLE
    streams.begin(5)
    assert streams.state_of(3) is State.CLOSED
    assert streams.state_of(5) is State.CLOSED
    assert streams.state_of(7) is State.IDLE


def test_even_identifiers_are_never_used():
    streams = Streams()
    streams.begin(5)
    assert streams.state_of(2) is State.IDLE
    assert not streams.may_begin(2)


def test_skipped_identifiers_cannot_be_used_later():
    streams = Streams()
    streams.begin(1)
    streams.begin(7)
    assert [streams.may_begin(stream_id) for stream_id in (1, 3, 5, 7, 9)] == [
        True,
        False,
        False,
        True,
        True,
    ]


def test_the_memory_of_skipped_identifiers_is_bounded():
    streams = Streams()
    for stream_id in range(5, 4_005, 4):
        streams.begin(stream_id)
    assert len(streams._gaps) == 64


def test_streams_in_order_use_no_memory_for_gaps():
    streams = Streams()
    for stream_id in range(1, 1_001, 2):
        streams.begin(stream_id)
    streams.begin(1_005)
    assert [streams.may_begin(stream_id) for stream_id in (1_001, 1_003)] == [False, False]


def test_a_live_stream_has_its_own_state():
    streams = Streams()
    streams.begin(1)
    streams.add(1, Stream(State.OPEN))
    assert streams.state_of(1) is State.OPEN


def test_an_untouched_stream_is_copied_before_a_change():
    streams = Streams()
    streams.add(1, UNTOUCHED)
    assert streams.state_of(1) is State.REMOTE_CLOSED
    own = streams.own(1)
    assert own is not UNTOUCHED
    assert own.state is State.REMOTE_CLOSED
    assert streams.own(1) is own


def test_a_reset_stream_is_closed_and_a_discarded_one_is_ignored():
    streams = Streams()
    streams.begin(3)
    streams.add(1, UNTOUCHED)
    streams.add(3, UNTOUCHED)
    assert streams.drop(1, discard=False) is UNTOUCHED
    assert streams.drop(3, discard=True) is UNTOUCHED
    assert streams.state_of(1) is State.CLOSED
    assert streams.state_of(3) is State.DISCARDED
    assert (streams.opened_total, streams.reset_total, streams.answered_total) == (2, 2, 0)


def test_a_stream_that_was_never_live_can_be_discarded():
    streams = Streams()
    streams.begin(1)
    assert streams.drop(1, discard=True) is None
    assert streams.state_of(1) is State.DISCARDED
    assert streams.reset_total == 0


def test_the_memory_of_discarded_streams_is_bounded_and_evicts_the_oldest():
    streams = Streams()
    for stream_id in range(1, 2 * 257, 2):
        streams.begin(stream_id)
        streams.drop(stream_id, discard=True)
    assert streams.state_of(1) is State.CLOSED
    assert streams.state_of(3) is State.DISCARDED
    assert streams.state_of(513) is State.DISCARDED


def test_streams_neither_reset_nor_live_count_as_answered():
    streams = Streams()
    for stream_id in (1, 3, 5):
        streams.begin(stream_id)
        streams.add(stream_id, UNTOUCHED)
    streams.drop(1, discard=False)
    del streams.live[3]
    assert streams.answered_total == 1


def test_after_the_last_goaway_higher_streams_are_ignored():
    streams = Streams()
    assert streams.last_id == 0
    streams.begin(5)
    assert streams.last_id == 5
    streams.final_id = 5
    streams.begin(9)
    assert streams.last_id == 5
    assert streams.state_of(5) is State.CLOSED
    assert streams.state_of(7) is State.DISCARDED


def test_a_window_grows_to_the_maximum_and_not_above():
    assert grown(65_535, 1) == 65_536
    assert grown(0, 2**31 - 1) == 2**31 - 1
    assert grown(1, 2**31 - 1) is None


def test_a_peer_may_use_its_whole_window_and_not_one_octet_more():
    window = ReceiveWindow(10)
    assert window.take(10)
    assert not window.take(1)
    assert window.left == 0


def test_refused_octets_are_not_counted():
    window = ReceiveWindow(10)
    assert not window.take(11)
    assert window.left == 10


def test_credit_is_granted_at_half_of_the_window():
    window = ReceiveWindow(10)
    window.take(10)
    assert window.give(4) == 0
    assert window.left == 0
    assert window.give(1) == 5
    assert window.left == 5


def test_credit_is_granted_once():
    window = ReceiveWindow(10)
    window.take(10)
    assert window.give(6) == 6
    assert window.give(4) == 0


def test_the_smallest_window_grants_each_octet_and_never_zero():
    window = ReceiveWindow(1)
    assert window.give(0) == 0
    window.take(1)
    assert window.give(1) == 1
