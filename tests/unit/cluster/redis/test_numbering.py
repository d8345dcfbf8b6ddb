from ratelimitd.cluster.redis.pubsub import MAX_SENDERS, Arrival, Numbering

A, B = b"sender-a", b"sender-b"


def test_numbers_that_follow_each_other_are_next_for_each_sender():
    numbering = Numbering()
    assert [numbering.judge(sender, n) for n in (5, 6, 7) for sender in (A, B)] == [
        Arrival.NEXT
    ] * 6


def test_a_number_that_is_left_out_is_a_gap_once():
    numbering = Numbering()
    arrivals = [numbering.judge(A, number) for number in (1, 3, 4)]
    assert arrivals == [Arrival.NEXT, Arrival.GAP, Arrival.NEXT]


def test_what_comes_twice_or_after_its_successor_is_old():
    numbering = Numbering()
    arrivals = [numbering.judge(A, number) for number in (1, 1, 3, 2, 3)]
    assert arrivals == [Arrival.NEXT, Arrival.OLD, Arrival.GAP, Arrival.OLD, Arrival.OLD]


def test_after_silence_each_sender_begins_anew():
    numbering = Numbering()
    numbering.judge(A, 7)
    numbering.forget()
    assert numbering.judge(A, 3) is Arrival.NEXT


def test_of_too_many_senders_the_longest_silent_is_forgotten():
    numbering = Numbering()
    for number in range(MAX_SENDERS):
        numbering.judge(b"%d" % number, 1)
    numbering.judge(b"0", 2)
    numbering.judge(A, 1)
    assert numbering.judge(b"0", 4) is Arrival.GAP
    assert numbering.judge(b"1", 4) is Arrival.NEXT
