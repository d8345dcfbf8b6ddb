import gc

import pytest

from ratelimitd.cluster.packed import pack, unpack
from ratelimitd.ledger.shared_state import SharedState

STATES = [
    SharedState(0, 7, 100),
    SharedState(1, 2**53, 2**31 - 1, (2**81, 2**53 - 1)),
    SharedState(2, 3, 4, b"a log"),
    SharedState(1, 2**53, 2**31 - 1, (2**81, 2**53 - 1), 2**31 - 1),
    SharedState(0, 7, 100, None, 5),
]


@pytest.mark.parametrize("shared", STATES, ids=["full", "numbers", "log", "burst", "full burst"])
def test_a_packed_state_comes_out_as_it_went_in(shared):
    unpacked = unpack(pack(shared))
    assert unpacked == shared
    assert type(unpacked) is SharedState


@pytest.mark.parametrize("shared", STATES, ids=["full", "numbers", "log", "burst", "full burst"])
def test_the_garbage_collector_does_not_look_at_what_is_packed(shared):
    packed = pack(shared)
    gc.collect()
    assert not gc.is_tracked(packed)
