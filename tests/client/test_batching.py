"""Checks of one turn travel together: what goes into a batch, and what each caller gets back."""

import asyncio

import pytest

from ratelimitd_client import Check, Reason
from ratelimitd_client.batching import MAX_IN_FLIGHT, Batcher
from ratelimitd_client.decision import unchecked
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
        decisions = [unchecked(Reason.NO_ANSWER, endpoint, 0.0) for endpoint in endpoints]
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
async def batcher(asked):
    return Batcher(asked, linger_s=0, loop=asyncio.get_running_loop())


async def test_checks_of_one_turn_travel_together_and_each_gets_its_own_answer(asked, batcher):
    futures = [batcher.add(request(name), 1.0) for name in ("/a", "/b", "/c")]
    assert [(await future).error for future in futures] == ["/a", "/b", "/c"]
    assert [batch for batch, _ in asked.batches] == [["/a", "/b", "/c"]]


async def test_checks_of_two_turns_travel_apart(asked, batcher):
    asked.answers_at_once = False
    first = batcher.add(request("/a"), 1.0)
    await asyncio.sleep(0)
    second = batcher.add(request("/b"), 1.0)
    asked.answer_all()
    await asyncio.gather(first, second)
    assert [batch for batch, _ in asked.batches] == [["/a"], ["/b"]]


async def test_a_check_leaves_at_once_if_the_one_before_it_was_alone(asked, batcher):
    await batcher.add(request("/a"), 1.0)
    answer = batcher.add(request("/b"), 1.0)
    assert [batch for batch, _ in asked.batches] == [["/a"], ["/b"]]
    assert (await answer).error == "/b"


async def test_a_check_waits_for_its_turn_to_end_if_there_were_others_beside_the_one_before(
    asked, batcher
):
    await batcher.add(request("/a"), 1.0)
    for _ in range(2):
        await asyncio.gather(*(batcher.add(request(name), 1.0) for name in ("/b", "/c")))
    await batcher.add(request("/d"), 1.0)
    # The first of two leaves alone once: what came before had been alone.
    batches = [["/a"], ["/b"], ["/c"], ["/b", "/c"], ["/d"]]
    assert [batch for batch, _ in asked.batches] == batches


async def test_checks_of_one_turn_travel_together_though_calls_end_at_once():
    sizes = []

    def ask(requests, _timeout_s, told):
        sizes.append(len(requests))
        told([unchecked(Reason.NO_ANSWER, "", 0.0) for _ in requests])

    batcher = Batcher(ask, linger_s=0, loop=asyncio.get_running_loop())
    await batcher.add(request("/a"), 1.0)
    await asyncio.gather(*(batcher.add(request("/b"), 1.0) for _ in range(4)))
    assert sizes == [1, 1, 3]


async def under_way(batcher, asked):
    """As many batches as may be, none of which is answered before the test says so."""
    asked.answers_at_once = False
    for number in range(MAX_IN_FLIGHT):
        batcher.add(request(f"/{number}"), 100.0)
        await asked.sent.get()


async def test_checks_wait_for_an_answer_while_two_batches_are_under_way(
    asked, batcher, monkeypatch
):
    monkeypatch.setattr("ratelimitd_client.batching.MAX_WAIT_S", 60)
    await under_way(batcher, asked)
    waiting = []
    for name in ("/a", "/b"):
        waiting.append(batcher.add(request(name), 100.0))
        await asyncio.sleep(0)
    later = batcher.add(request("/c"), 200.0)
    assert len(asked.batches) == MAX_IN_FLIGHT
    asked.answer()
    await asked.sent.get()
    assert asked.batches[-1][0] == ["/a", "/b"]
    asked.answer_all()
    assert [(await future).error for future in (*waiting, later)] == ["/a", "/b", "/c"]
    assert [batch for batch, _ in asked.batches[MAX_IN_FLIGHT:]] == [["/a", "/b"], ["/c"]]


async def test_two_answers_at_once_send_what_waits_once(asked, batcher):
    problems = []
    asyncio.get_running_loop().set_exception_handler(lambda _, problem: problems.append(problem))
    await under_way(batcher, asked)
    waiting = batcher.add(request("/a"), 100.0)
    asked.answer()
    asked.answer()
    await asked.sent.get()
    asked.answer_all()
    assert (await waiting).error == "/a"
    assert problems == []


async def test_those_who_have_an_answer_may_ask_again_before_those_leave_who_waited_for_it(
    asked, batcher, monkeypatch
):
    monkeypatch.setattr("ratelimitd_client.batching.MAX_WAIT_S", 60)
    asked.answers_at_once = False

    async def ask(*names):
        for name in names:
            await batcher.add(request(name), 100.0)

    callers = []
    for names in (("/a", "/b"), ("/c",), ("/d",)):
        callers.append(asyncio.ensure_future(ask(*names)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    asked.answer()
    await asked.sent.get()
    while len(asked.batches) <= MAX_IN_FLIGHT:
        await asked.sent.get()
    assert asked.batches[-1][0] == ["/d", "/b"]
    asked.answer_all()
    await asyncio.gather(*callers)


async def test_a_batch_that_is_never_answered_holds_nobody_up(asked, batcher):
    await under_way(batcher, asked)
    batcher.add(request("/a"), 1.0)
    await asked.sent.get()
    batch, left_s = asked.batches[-1]
    assert batch == ["/a"]
    assert left_s < 1.0  # the pause counts against the deadline
    asked.answer_all()
    await batcher.finish()


async def test_checks_that_linger_leave_at_their_time_whatever_is_under_way(asked):
    batcher = Batcher(asked, linger_s=0.001, loop=asyncio.get_running_loop())
    asked.answers_at_once = False
    for number in range(MAX_IN_FLIGHT + 1):
        batcher.add(request(f"/{number}"), 1.0)
        await asked.sent.get()
    asked.answer_all()
    await batcher.finish()
    assert len(asked.batches) == MAX_IN_FLIGHT + 1


async def test_checks_with_different_deadlines_travel_apart(asked, batcher):
    await asyncio.gather(*(batcher.add(request("/a"), timeout_s) for timeout_s in (1.0, 2.0)))
    (_, first_s), (_, second_s) = asked.batches
    assert first_s <= 1.0 < second_s <= 2.0


async def test_no_batch_is_larger_than_a_node_takes(asked, batcher):
    futures = [batcher.add(request(f"/{number}"), 1.0) for number in range(2_500)]
    answers = [decision.error for decision in await asyncio.gather(*futures)]
    assert answers == [f"/{number}" for number in range(2_500)]
    assert [len(batch) for batch, _ in asked.batches] == [1_000, 1_000, 500]


async def test_a_check_that_is_given_up_before_its_batch_leaves_is_not_sent(asked, batcher):
    given_up, kept = batcher.add(request("/a"), 1.0), batcher.add(request("/b"), 1.0)
    given_up.cancel()
    await kept
    batcher.add(request("/c"), 1.0).cancel()
    await batcher.finish()
    assert [batch for batch, _ in asked.batches] == [["/b"]]


async def test_a_check_that_is_given_up_on_its_way_does_not_hurt_its_neighbours(asked, batcher):
    asked.answers_at_once = False
    given_up, kept = batcher.add(request("/a"), 1.0), batcher.add(request("/b"), 1.0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    given_up.cancel()
    asked.answer_all()
    assert (await kept).error == "/b"


async def test_a_pause_gathers_the_checks_of_many_turns_and_counts_against_the_deadline(asked):
    batcher = Batcher(asked, linger_s=0.005, loop=asyncio.get_running_loop())
    futures = []
    for name in ("/a", "/b"):
        futures.append(batcher.add(request(name), 1.0))
        await asyncio.sleep(0)
    assert not asked.batches
    await asyncio.gather(*futures)
    [(batch, left_s)] = asked.batches
    assert batch == ["/a", "/b"]
    assert left_s <= 1.0 - 0.004  # the event loop rounds its timers to a millisecond


async def test_a_pause_never_takes_more_than_half_of_the_deadline(asked):
    batcher = Batcher(asked, linger_s=60, loop=asyncio.get_running_loop())
    await batcher.add(request("/a"), 0.2)
    [(_, left_s)] = asked.batches
    assert left_s <= 0.11


async def test_finishing_sends_what_waits_and_waits_for_what_is_under_way(asked):
    batcher = Batcher(asked, linger_s=60, loop=asyncio.get_running_loop())
    waiting = batcher.add(request("/a"), 60.0)
    await batcher.finish()
    assert waiting.done()
    await batcher.finish()
