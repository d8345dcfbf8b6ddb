from ratelimitd.cluster.redis.pubsub import MAX_SENDERS, Arrival, Numbering

A, B = b"sender-a", b"sender-b"


def test_consecutive_numbers_of_each_sender_are_next():
    numbering = Numbering()
    assert [numbering.judge(sender, n) for n in (5, 6, 7) for sender in (A, B)] == [
        Arrival.NEXT
    ] * 6


def test_a_missing_number_is_a_gap_once():
    numbering = Numbering()
    arrivals = [numbering.judge(A, number) for number in (1, 3, 4)]
    assert arrivals == [Arrival.NEXT, Arrival.GAP, Arrival.NEXT]


def test_repeated_and_reordered_numbers_are_old():
    numbering = Numbering()
    arrivals = [numbering.judge(A, number) for number in (1, 1, 3, 2, 3)]
    assert arrivals == [Arrival.NEXT, Arrival.OLD, Arrival.GAP, Arrival.OLD, Arrival.OLD]


def test_after_forget_each_senders_next_number_is_its_first():
    numbering = Numbering()
    numbering.judge(A, 7)
    numbering.forget()
    assert numbering.judge(A, 3) is Arrival.NEXT


def test_the_longest_silent_of_too_many_senders_is_dropped():
    numbering = Numbering()
    for number in range(MAX_SENDERS):
        numbering.judge(b"%d" % number, 1)
    numbering.judge(b"0", 2)
    numbering.judge(A, 1)
    assert numbering.judge(b"0", 4) is Arrival.GAP
    assert numbering.judge(b"1", 4) is Arrival.NEXT
