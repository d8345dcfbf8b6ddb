from ratelimitd.http2.streams import ReceiveWindow, grown


def test_a_window_grows_to_the_maximum_and_not_one_octet_further():
    assert grown(65_535, 1) == 65_536
    assert grown(0, 2**31 - 1) == 2**31 - 1
    assert grown(1, 2**31 - 1) is None


def test_a_peer_may_use_its_window_to_the_last_octet_and_not_one_more():
    window = ReceiveWindow(10)
    assert window.take(10)
    assert not window.take(1)
    assert window.left == 0


def test_what_was_refused_is_not_counted():
    window = ReceiveWindow(10)
    assert not window.take(11)
    assert window.left == 10


def test_credit_is_told_when_it_is_half_of_the_window():
    window = ReceiveWindow(10)
    window.take(10)
    assert window.give(4) == 0
    assert window.left == 0
    assert window.give(1) == 5
    assert window.left == 5


def test_credit_is_told_once():
    window = ReceiveWindow(10)
    window.take(10)
    assert window.give(6) == 6
    assert window.give(4) == 0


def test_the_smallest_window_tells_each_octet_and_never_nothing():
    window = ReceiveWindow(1)
    assert window.give(0) == 0
    window.take(1)
    assert window.give(1) == 1
