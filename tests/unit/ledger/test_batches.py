"""Batches are sent until they are acknowledged, and applied once; first checks are sent once."""

from dataclasses import replace

from ratelimitd.ledger.protocol import Batch, Reply, Sender
from ratelimitd.ledger.shared_state import SharedState, StoreCheck, Update
from ratelimitd.model import Algorithm
from tests.ledger_model import Ledger
from tests.outcomes import rule_of

NOW = 1_700_000_000_000_000
RULE = rule_of(Algorithm.FIXED_WINDOW)


def updates(tokens=1):
    return [(b"key", Update(RULE, 0, ((NOW, tokens),)))]


def count(ledger):
    return ledger.buckets[b"key"].state[0]


def test_a_batch_is_outstanding_until_its_own_reply():
    sender = Sender("a/0")
    batch = sender.freeze(updates(), NOW)
    assert batch == Batch("a/0", 1, NOW, dict(updates()))
    assert sender.outstanding is batch
    assert sender.acknowledged(Reply(0, {})) is None
    assert sender.outstanding is batch
    assert sender.acknowledged(Reply(1, {})) is batch
    assert sender.outstanding is None
    assert sender.acknowledged(Reply(1, {})) is None
    assert sender.freeze(updates(), NOW).number == 2


def test_batches_of_a_sender_are_at_least_an_interval_apart():
    sender = Sender("a/0")
    assert sender.wait_us(NOW) == 0
    sender.freeze(updates(), NOW)
    assert sender.wait_us(NOW + 60_000) is None
    sender.acknowledged(Reply(1, {}))
    waits = [sender.wait_us(NOW + after_us) for after_us in (-60_000, 0, 9_999, 10_000, 60_000)]
    assert waits == [10_000, 10_000, 1, 0, 0]


def test_a_repeated_batch_is_answered_but_not_applied_again():
    ledger, sender = Ledger(), Sender("a/0")
    batch = sender.freeze(updates(3), NOW)
    reply = ledger.apply(batch)
    assert ledger.apply(batch) is reply
    assert count(ledger) == 3
    assert reply.number == 1
    assert reply.settled[b"key"].shared == ledger.buckets[b"key"]


def test_a_batch_older_than_the_latest_is_refused():
    ledger, sender = Ledger(), Sender("a/0")
    first = sender.freeze(updates(), NOW)
    ledger.apply(first)
    ledger.apply(sender.freeze(updates(), NOW))
    assert ledger.apply(first) is None
    assert count(ledger) == 2


def test_a_batch_after_a_lost_one_is_applied():
    ledger, sender = Ledger(), Sender("a/0")
    ledger.apply(sender.freeze(updates(), NOW))
    sender.freeze(updates(), NOW)
    assert ledger.apply(sender.freeze(updates(), NOW)).number == 3


def test_senders_are_distinguished():
    ledger = Ledger()
    for name in ("a/0", "a/1", "b/0"):
        ledger.apply(Sender(name).freeze(updates(), NOW))
    assert count(ledger) == 3


def first_checked(ledger, cost, *, rule=RULE, peek=False):
    outcome, shared = ledger.first_check(StoreCheck(b"key", rule, NOW, cost, peek))
    return outcome[0], shared


def test_a_charged_first_check_creates_the_bucket():
    ledger = Ledger()
    assert first_checked(ledger, 4, peek=True)[0]
    assert not first_checked(ledger, 11)[0]
    assert ledger.buckets == {}
    assert first_checked(ledger, 4) == (True, ledger.buckets[b"key"])
    assert count(ledger) == 4


def test_a_denied_first_check_stores_a_newer_limit_and_a_peek_does_not():
    ledger, lower = Ledger(), replace(RULE, limit=5, revision=1)
    first_checked(ledger, 8)
    before = ledger.buckets[b"key"]
    assert first_checked(ledger, 1, rule=lower, peek=True) == (False, before)
    assert ledger.buckets[b"key"] is before
    assert first_checked(ledger, 1, rule=lower) == (False, SharedState(0, 1, 5, (5, NOW)))
    assert ledger.buckets[b"key"].limit == 5
