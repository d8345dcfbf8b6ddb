"""Resets of buckets in memory, with a journal that may fail."""

import asyncio
import random
from dataclasses import replace

import pytest

from ratelimitd.buckets.table import BucketTable
from ratelimitd.errors import StoreUnavailableError
from ratelimitd.model import Check
from ratelimitd.rules.book import RuleBook
from tests.unit.limiter.nodes import EVERYWHERE, ORDERS, USER, Node, limiter_of


class TestReset:
    async def test_a_reset_bucket_starts_afresh_and_others_do_not(self, node):
        for name, endpoint in ((b"ada", "/orders"), (b"ada", "/carts"), (b"bob", "/orders")):
            node.check(name, endpoint, cost=2)
        await node.reset()
        assert node.remaining() == 10
        assert (node.remaining(b"bob"), node.remaining(endpoint="/carts")) == (8, 1)

    async def test_a_missing_bucket_counts_as_reset(self, node):
        await node.reset(b"nobody")
        assert len(node.table) == 0
        assert len(node.journal.resets) == 1

    async def test_buckets_of_a_disabled_rule_and_of_the_global_one_are_reset_too(self, node):
        everywhere = replace(EVERYWHERE, window_seconds=7)
        node.put(ORDERS, everywhere)
        node.check(cost=10)
        node.put(everywhere)
        node.check(cost=3)
        node.put(replace(ORDERS, enabled=False), everywhere)
        await node.reset()
        assert node.remaining() == 3
        node.put(ORDERS)
        assert node.remaining() == 10

    async def test_the_journal_receives_the_keys_of_the_buckets(self, node):
        node.check()
        keys = node.table.keys(0)
        await node.reset()
        (written,) = node.journal.resets
        assert len(keys) == 1
        assert keys[0] in written

    async def test_without_a_rule_nothing_is_reset_or_written(self):
        node = Node()
        await node.reset()
        assert node.journal.resets == []

    async def test_a_limiter_without_a_journal_resets_in_memory(self):
        table = BucketTable(10)
        limiter = limiter_of(buckets=table)
        limiter.replace_book(RuleBook.of([ORDERS], 1))
        limiter.check(Check(b"ada", USER, "/orders"))
        await limiter.reset(b"ada", USER, "/orders")
        assert len(table) == 0

    async def test_without_a_book_a_reset_is_refused(self):
        with pytest.raises(StoreUnavailableError, match="no rules"):
            await Node(book=False).reset()

    async def test_a_reset_that_cannot_be_written_restores_the_bucket(self, node):
        node.check(cost=7)
        node.journal.fails = True
        with pytest.raises(StoreUnavailableError):
            await node.reset()
        assert node.remaining() == 3
        with pytest.raises(StoreUnavailableError):
            await node.reset(b"nobody")
        assert len(node.table) == 1

    async def test_a_failed_reset_does_not_undo_a_later_one(self, node):
        gate, fails = asyncio.Event(), iter([True, False])

        async def reset(keys):
            failing = next(fails)
            await gate.wait()
            if failing:
                message = "the disk is full"
                raise StoreUnavailableError(message)

        node.journal.reset = reset
        node.check(cost=7)
        resets = [asyncio.create_task(node.reset()) for _ in range(2)]
        await asyncio.sleep(0)
        gate.set()
        refused, answered = await asyncio.gather(*resets, return_exceptions=True)
        assert (type(refused), answered) == (StoreUnavailableError, None)
        assert node.remaining() == 10

    async def test_a_reset_is_written_even_if_its_caller_is_cancelled(self, node):
        may_write, written = asyncio.Event(), asyncio.Event()

        async def reset(_keys):
            await may_write.wait()
            written.set()

        node.journal.reset = reset
        node.check()
        caller = asyncio.create_task(node.reset())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.wait([caller])
        assert caller.cancelled()
        may_write.set()
        await written.wait()

    async def test_a_queued_reset_uses_the_rules_in_force_when_it_starts(self, node):
        begun, first_may_end, written = asyncio.Event(), asyncio.Event(), []

        async def reset(keys):
            written.append(keys)
            begun.set()
            await first_may_end.wait()

        node.journal.reset = reset
        resets = [asyncio.create_task(node.reset()) for _ in range(2)]
        await begun.wait()
        node.put(replace(ORDERS, window_seconds=120))
        first_may_end.set()
        await asyncio.gather(*resets)
        first, second = written
        assert first != second

    async def test_checks_during_a_failed_reset_gain_no_tokens(self, node):
        node.check(cost=7)
        node.journal.fails, node.journal.meanwhile = True, node.check
        with pytest.raises(StoreUnavailableError):
            await node.reset()
        assert node.remaining() == 3

    async def test_failed_resets_keep_the_bound_of_the_table(self):
        node = Node(ORDERS, max_entries=2)
        node.journal.fails = True

        def flood():
            for _ in range(3):
                node.check(b"%d" % random.randrange(10**9))

        node.journal.meanwhile = flood
        for number in range(20):
            node.check(b"ada %d" % number)
            with pytest.raises(StoreUnavailableError):
                await node.reset(b"ada %d" % number)
            assert len(node.table) <= 2
