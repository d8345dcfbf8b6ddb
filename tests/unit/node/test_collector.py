import gc

import pytest

from ratelimitd.node import jobs


@pytest.fixture(autouse=True)
def _as_it_was():
    thresholds = gc.get_threshold()
    yield
    gc.enable()
    gc.set_threshold(*thresholds)


def test_no_collection_takes_place_while_a_book_is_loaded_and_none_walks_it_afterwards():
    frozen = gc.get_freeze_count()
    with jobs.whole_load():
        assert not gc.isenabled()
        book = [{"rule": []} for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= frozen + 1000
    assert not any(each is book for each in gc.get_objects())


def test_a_load_that_fails_freezes_nothing_and_collections_go_on():
    frozen = gc.get_freeze_count()
    with pytest.raises(OSError), jobs.whole_load():
        raise OSError
    assert gc.isenabled()
    assert gc.get_freeze_count() <= frozen


def test_tidying_collects_what_is_garbage_before_it_freezes():
    class Node:
        ended = False

        def __del__(self):
            Node.ended = True

    gc.disable()
    cycle = Node()
    cycle.itself = cycle
    del cycle
    assert not Node.ended
    frozen = gc.get_freeze_count()
    jobs.tidy()
    assert Node.ended
    assert gc.get_freeze_count() > frozen


def test_a_full_collection_is_rare_in_a_node():
    gc.set_threshold(700, 10, 10)
    jobs.tidy()
    assert gc.get_threshold() == (1_000, 10, 200)
