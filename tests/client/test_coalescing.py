"""Checks of one turn travel together: what goes into a batch, and what each caller gets back."""

import asyncio

import pytest

from ratelimitd_client import Check, Reason
from ratelimitd_client.coalescing import MAX_UNDER_WAY, Coalescer
from ratelimitd_client.decision import let_through
from ratelimiter.v1 import ratelimiter_pb2 as pb


class Asked:
    """Answers each check with its own endpoint as the error text, and keeps the batches."""

    def __init__(self):
        self.batches = []
        self.sent = asyncio.Queue()
        self.answers_at_once = True
        self.unanswered = []

    def __call__(self, requests, timeout_s, told):
        endpoints = [pb.RateLimitRequest.FromString(request).endpoint for request in requests]
        self.batches.append((endpoints, timeout_s))
        self.sent.put_nowait(None)
        decisions = [let_through(Reason.NO_ANSWER, endpoint, 0.0) for endpoint in endpoints]
        if self.answers_at_once:
            asyncio.get_running_loop().call_soon(told, decisions)
        else:
            self.unanswered.append((told, decisions))

    def answer(self):
        """Answer the batch that waits longest."""
        told, decisions = self.unanswered.pop(0)
        told(decisions)

    def answer_all(self):
        """Answer what was asked and what will be."""
        self.answers_at_once = True
        while self.unanswered:
            self.answer()


def request(endpoint):
    return Check("alice", "user", endpoint).message()


@pytest.fixture
async def asked():
    return Asked()


@pytest.fixture
async def coalescer(asked):
    return Coalescer(asked, linger_s=0, loop=asyncio.get_running_loop())


async def test_checks_of_one_turn_travel_together_and_each_gets_its_own_answer(asked, coalescer):
    futures = [coalescer.add(request(name), 1.0) for name in ("/a", "/b", "/c")]
    assert [(await future).error for future in futures] == ["/a", "/b", "/c"]
    assert [batch for batch, _ in asked.batches] == [["/a", "/b", "/c"]]


async def test_checks_of_two_turns_travel_apart(asked, coalescer):
    asked.answers_at_once = False
    first = coalescer.add(request("/a"), 1.0)
    await asyncio.sleep(0)
    second = coalescer.add(request("/b"), 1.0)
    asked.answer_all()
    await asyncio.gather(first, second)
    assert [batch for batch, _ in asked.batches] == [["/a"], ["/b"]]


async def test_a_check_leaves_at_once_if_the_one_before_it_was_alone(asked, coalescer):
    await coalescer.add(request("/a"), 1.0)
    answer = coalescer.add(request("/b"), 1.0)
    assert [batch for batch, _ in asked.batches] == [["/a"], ["/b"]]
    assert (await answer).error == "/b"


async def test_a_check_waits_for_its_turn_to_end_if_there_were_others_beside_the_one_before(
    asked, coalescer
):
    await coalescer.add(request("/a"), 1.0)
    for _ in range(2):
        await asyncio.gather(*(coalescer.add(request(name), 1.0) for name in ("/b", "/c")))
    await coalescer.add(request("/d"), 1.0)
    # The first of two leaves alone once: what came before had been alone.
    batches = [["/a"], ["/b"], ["/c"], ["/b", "/c"], ["/d"]]
    assert [batch for batch, _ in asked.batches] == batches


async def test_checks_of_one_turn_travel_together_though_calls_end_at_once():
    sizes = []

    def ask(requests, _timeout_s, told):
        sizes.append(len(requests))
        told([let_through(Reason.NO_ANSWER, "", 0.0) for _ in requests])

    coalescer = Coalescer(ask, linger_s=0, loop=asyncio.get_running_loop())
    await coalescer.add(request("/a"), 1.0)
    await asyncio.gather(*(coalescer.add(request("/b"), 1.0) for _ in range(4)))
    assert sizes == [1, 1, 3]


async def under_way(coalescer, asked):
    """As many batches as may be, none of which is answered before the test says so."""
    asked.answers_at_once = False
    for number in range(MAX_UNDER_WAY):
        coalescer.add(request(f"/{number}"), 1.0)
        await asked.sent.get()


async def test_checks_wait_for_an_answer_while_two_batches_are_under_way(
    asked, coalescer, monkeypatch
):
    monkeypatch.setattr("ratelimitd_client.coalescing.MAX_WAIT_S", 60)
    await under_way(coalescer, asked)
    waiting = []
    for name in ("/a", "/b"):
        waiting.append(coalescer.add(request(name), 1.0))
        await asyncio.sleep(0)
    later = coalescer.add(request("/c"), 2.0)
    assert len(asked.batches) == MAX_UNDER_WAY
    asked.answer()
    await asked.sent.get()
    assert asked.batches[-1][0] == ["/a", "/b"]
    asked.answer_all()
    assert [(await future).error for future in (*waiting, later)] == ["/a", "/b", "/c"]
    assert [batch for batch, _ in asked.batches[MAX_UNDER_WAY:]] == [["/a", "/b"], ["/c"]]


async def test_those_who_have_an_answer_may_ask_again_before_those_leave_who_waited_for_it(
    asked, coalescer, monkeypatch
):
    monkeypatch.setattr("ratelimitd_client.coalescing.MAX_WAIT_S", 60)
    asked.answers_at_once = False

    async def ask(*names):
        for name in names:
            await coalescer.add(request(name), 1.0)

    callers = []
    for names in (("/a", "/b"), ("/c",), ("/d",)):
        callers.append(asyncio.ensure_future(ask(*names)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    asked.answer()
    await asked.sent.get()
    while len(asked.batches) <= MAX_UNDER_WAY:
        await asked.sent.get()
    assert asked.batches[-1][0] == ["/d", "/b"]
    asked.answer_all()
    await asyncio.gather(*callers)


async def test_a_batch_that_is_never_answered_holds_nobody_up(asked, coalescer):
    await under_way(coalescer, asked)
    coalescer.add(request("/a"), 1.0)
    await asked.sent.get()
    batch, left_s = asked.batches[-1]
    assert batch == ["/a"]
    assert left_s < 1.0  # the pause counts against the deadline
    asked.answer_all()
    await coalescer.finish()


async def test_checks_that_linger_leave_at_their_time_whatever_is_under_way(asked):
    coalescer = Coalescer(asked, linger_s=0.001, loop=asyncio.get_running_loop())
    asked.answers_at_once = False
    for number in range(MAX_UNDER_WAY + 1):
        coalescer.add(request(f"/{number}"), 1.0)
        await asked.sent.get()
    asked.answer_all()
    await coalescer.finish()
    assert len(asked.batches) == MAX_UNDER_WAY + 1


async def test_checks_with_different_deadlines_travel_apart(asked, coalescer):
    await asyncio.gather(*(coalescer.add(request("/a"), timeout_s) for timeout_s in (1.0, 2.0)))
    (_, first_s), (_, second_s) = asked.batches
    assert first_s <= 1.0 < second_s <= 2.0


async def test_no_batch_is_larger_than_a_node_takes(asked, coalescer):
    futures = [coalescer.add(request(f"/{number}"), 1.0) for number in range(2_500)]
    answers = [decision.error for decision in await asyncio.gather(*futures)]
    assert answers == [f"/{number}" for number in range(2_500)]
    assert [len(batch) for batch, _ in asked.batches] == [1_000, 1_000, 500]


async def test_a_check_that_is_given_up_before_its_batch_leaves_is_not_sent(asked, coalescer):
    given_up, kept = coalescer.add(request("/a"), 1.0), coalescer.add(request("/b"), 1.0)
    given_up.cancel()
    await kept
    coalescer.add(request("/c"), 1.0).cancel()
    await coalescer.finish()
    assert [batch for batch, _ in asked.batches] == [["/b"]]


async def test_a_check_that_is_given_up_on_its_way_does_not_hurt_its_neighbours(asked, coalescer):
    asked.answers_at_once = False
    given_up, kept = coalescer.add(request("/a"), 1.0), coalescer.add(request("/b"), 1.0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    given_up.cancel()
    asked.answer_all()
    assert (await kept).error == "/b"


async def test_a_pause_gathers_the_checks_of_many_turns_and_counts_against_the_deadline(asked):
    coalescer = Coalescer(asked, linger_s=0.005, loop=asyncio.get_running_loop())
    futures = []
    for name in ("/a", "/b"):
        futures.append(coalescer.add(request(name), 1.0))
        await asyncio.sleep(0)
    assert not asked.batches
    await asyncio.gather(*futures)
    [(batch, left_s)] = asked.batches
    assert batch == ["/a", "/b"]
    assert left_s <= 1.0 - 0.004  # the event loop rounds its timers to a millisecond


async def test_a_pause_never_takes_more_than_half_of_the_deadline(asked):
    coalescer = Coalescer(asked, linger_s=60, loop=asyncio.get_running_loop())
    await coalescer.add(request("/a"), 0.02)
    [(_, left_s)] = asked.batches
    assert left_s <= 0.011


async def test_finishing_sends_what_waits_and_waits_for_what_is_under_way(asked):
    coalescer = Coalescer(asked, linger_s=60, loop=asyncio.get_running_loop())
    waiting = coalescer.add(request("/a"), 60.0)
    await coalescer.finish()
    assert waiting.done()
    await coalescer.finish()
