from hypothesis import given
from hypothesis import strategies as st

from tests.conflict_rule import StoredState, merge

numbers = st.integers(0, 3)
states = st.builds(StoredState, numbers, numbers, numbers, numbers)


def test_the_later_last_refill_wins():
    late, early = StoredState(0, 0, 2, 1), StoredState(0, 0, 1, 9)
    assert merge(late, early) == late


def test_of_two_refills_at_one_time_the_lower_token_count_wins():
    poor, rich = StoredState(0, 0, 1, 9), StoredState(0, 0, 1, 2)
    assert merge(rich, poor) == poor


def test_a_reset_precedes_a_later_refill():
    reset, used = StoredState(1, 0, 1, 0), StoredState(0, 0, 9, 9)
    assert merge(used, reset) == reset


def test_an_edit_precedes_a_later_refill_but_not_a_reset():
    edited, used, reset = StoredState(0, 1, 1, 0), StoredState(0, 0, 9, 9), StoredState(1, 0, 0, 0)
    assert merge(used, edited) == edited
    assert merge(edited, reset) == reset


@given(states, states, states)
def test_the_order_of_received_states_does_not_matter(one, two, three):
    """I5: commutative, associative, idempotent, and one of the two."""
    assert merge(one, two) == merge(two, one)
    assert merge(merge(one, two), three) == merge(one, merge(two, three))
    assert merge(one, one) == one
    assert merge(one, two) in {one, two}
