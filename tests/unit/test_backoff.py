from ratelimitd.retry import Backoff


def test_pauses_double_up_to_the_longest():
    backoff = Backoff(0.05, 1.0, lambda: 0.0)
    pauses = [backoff.next_s() for _ in range(8)]
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]


def test_after_a_success_the_first_pause_comes_again():
    backoff = Backoff(0.25, 5.0, lambda: 0.0)
    backoff.next_s()
    backoff.next_s()
    backoff.reset()
    assert backoff.next_s() == 0.25


def test_pauses_are_shortened_at_random_so_that_nodes_do_not_move_in_step():
    assert Backoff(0.5, 5.0, lambda: 1.0).next_s() == 0.25
    backoffs = [Backoff(1.0, 1.0) for _ in range(20)]
    pauses = {backoff.next_s() for backoff in backoffs}
    assert len(pauses) > 1
    assert all(0.5 <= pause_s <= 1.0 for pause_s in pauses)
