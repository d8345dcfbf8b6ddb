"""The hold scripts, in a real server, against the pure model: the same traces end in the same states and answers.

A manual clock replaces the server's, in the text of the scripts.
"""

import os
from dataclasses import replace
from random import Random
from struct import unpack_from

import pytest

from ratelimitd.cluster.redis import codec, hold_codec
from ratelimitd.cluster.redis.codec import FORMAT_OF_HELD, JOINED, Script, bucket_key, holds_key
from ratelimitd.ledger.protocol import Batch
from ratelimitd.ledger.shared_holds import HoldCall, Step, StepCall
from ratelimitd.ledger.shared_state import OBSERVES, STORE_TIME, StoreCheck, Update
from ratelimitd.model import INT32_MAX, MAX_TIME_US, US_PER_S, Algorithm
from tests.shared_hold_model import PEEK, HoldStore
from tests.store_scripts import TAG, key_of, plain, rule_of, run

NAMES = [key_of(number) for number in range(4)]
SEEDS = int(os.environ.get("SIMULATION_SEEDS", "40"))
STEPS = 120
TIME = b"call('TIME')"


class Trace:
    """The same steps for the model and for the scripts."""

    def __init__(self, client, seed):
        self.client, self.chance = client, Random(seed)
        self.model = HoldStore(1_700_000_000 * US_PER_S + 123_456)
        self.rules = [self.rule() for _ in NAMES]
        self.holds = []
        self.batch = 0
        self.corrupt = set()

    def rule(self):
        pick = self.chance.choice
        algorithm = pick([*Algorithm])
        limit, window_s = pick([1, 3, 8, 100, INT32_MAX]), pick([1, 2, 60, 60, INT32_MAX])
        burst = pick([0, 0, 2, 150]) if algorithm is Algorithm.TOKEN_BUCKET else 0
        return rule_of(algorithm, limit, window_s, burst=burst)

    def script(self, script, request):
        second, microsecond = divmod(self.model.now_us, US_PER_S)
        now = b"{ '%d', '%d' }" % (second, microsecond)
        assert script.text.count(TIME) == 1
        return run(self.client, Script(script.text.replace(TIME, now)), request)

    def some(self, least=1):
        places = [place for place in range(len(NAMES)) if self.chance.random() < 0.5]
        return places if len(places) >= least else [self.chance.randrange(len(NAMES))]

    def at_us(self):
        late_us = self.chance.choice([0, 0, 100_000, US_PER_S, -50_000])
        return self.chance.choice([STORE_TIME, self.model.now_us - late_us])

    def cost(self):
        return self.chance.choice([1, 1, 2, 2, 3, 3, 9, INT32_MAX])

    # Steps

    def hold(self):
        chance = self.chance
        cost, at_us = self.cost(), self.at_us()
        checks = [
            StoreCheck(NAMES[place], self.rules[place], at_us, cost, self.flags())
            for place in self.some()
        ]
        number = chance.randbytes(16)
        digest = chance.choice([b"digest01", b"digest01", b"digest01", b"digest02"])
        if self.holds and chance.random() < 0.3:
            number = chance.choice(self.holds)[0]
        ttl_us = int(chance.choice([0.3, 2, 30]) * US_PER_S)
        attempt = chance.choice([b"attempt%d" % number for number in range(10)])
        record = self.model.record(number)
        if record is not None and record.attempts == (attempt,):  # the same call
            checks = [checks[0]._replace(name=name) for name in record.entries]
        longest_us = chance.choice([MAX_TIME_US, MAX_TIME_US, US_PER_S])
        most = chance.choice([1_000, 3])
        call = HoldCall(number, digest, attempt, checks, ttl_us, most, longest_us)
        reply = self.script(hold_codec.HOLD, hold_codec.hold_request(TAG, call))
        assert hold_codec.hold_reply(call, reply)[1] == self.model.hold(call), call
        self.holds.append((number, [check.name for check in checks], cost))

    def step(self):
        if not self.holds:
            return
        chance = self.chance
        number, names, cost = chance.choice(self.holds[-6:])
        if chance.random() < 0.2:
            names = chance.sample(NAMES, 2)
        step = chance.choice([Step.SETTLE, Step.SETTLE, Step.EXTEND, Step.WITHDRAW])
        amount = chance.choice([0, 1, cost, cost, cost + 1, cost + 5, 2 * cost])
        if step is Step.EXTEND:
            amount = int(chance.choice([0.1, 3, 40]) * US_PER_S)
        attempt = chance.choice([b"attempt%d" % number for number in range(10)])
        limits = {
            NAMES[place]: chance.choice([self.rules[place]] * 3 + [self.rule()])
            for place in self.some()
        }
        call = StepCall(step, number, names, amount, self.at_us(), attempt, limits)
        reply = self.script(hold_codec.HOLD_STEP, hold_codec.step_request(TAG, call))
        assert hold_codec.step_reply(call, reply) == self.model.step(call), call

    def settle_soon(self):
        """Settle the last hold, a short or long time later."""
        if self.holds:
            self.pass_time()
            self.holds.append(self.holds.pop())
            self.step()

    def check(self):
        places, at_us, cost = self.some(), self.at_us(), self.cost()
        peek = self.chance.choice([0, 0, PEEK])
        checks = [
            StoreCheck(NAMES[place], self.rules[place], at_us, cost, peek | self.flags())
            for place in places
        ]
        joined = [one._replace(peek=one.peek | JOINED) for one in checks[:-1]]
        reply = self.script(codec.DECIDE, codec.checks_request([*joined, checks[-1]]))
        assert codec.decided(checks, reply) == self.model.decide_all(checks)

    def flags(self):
        return self.chance.choice([0, 0, 0, OBSERVES])

    def spend_late(self):
        place = self.chance.randrange(len(NAMES))
        rule = self.rules[place]
        if rule.algorithm is Algorithm.CONCURRENCY:
            return
        runs = [(self.model.now_us - self.chance.choice([0, 500_000, 2 * US_PER_S]), self.cost())]
        self.batch += 1
        batch = Batch("node", self.batch, 0, {NAMES[place]: Update(rule, None, runs)})
        self.client.eval(*_eval(codec.SETTLE, codec.settle_request(TAG, batch)))
        self.model.charge_late(NAMES[place], rule, runs)

    def reset(self):
        place = self.chance.randrange(len(NAMES))
        request = codec.reset_request(NAMES[place], self.rules[place], 7)
        run(self.client, codec.RESET, request)
        self.model.reset(NAMES[place], self.rules[place], 7)

    def edit(self):
        place = self.chance.randrange(len(NAMES))
        rule, pick = self.rules[place], self.chance.choice
        burst = pick([rule.burst, 5]) if rule.burst else 0
        self.rules[place] = replace(
            rule, limit=pick([1, 3, 8, 100]), burst=burst, revision=rule.revision + 1
        )

    def lose(self):
        name = self.chance.choice(NAMES)
        what = self.chance.choice(["buckets", "slots", "records"])
        if what == "records" and self.holds:
            number = self.chance.choice(self.holds)[0]
            self.client.delete(codec.prefix(TAG) + b"hold:" + number)
            self.model.records.pop(number, None)
        elif what == "buckets" and self.rules[NAMES.index(name)].algorithm != "concurrency":
            self.client.delete(bucket_key(name))
            self.model.buckets.pop(name, None)
        elif what == "slots":
            self.client.delete(self.slots_key(name))
            self.model.slots.pop(name, None)

    def pass_time(self):
        self.model.now_us += int(self.chance.choice([0, 0.01, 0.2, 0.5, 1, 5, 100]) * US_PER_S)
        # The server expires keys by its own clock, which has not advanced.
        for number in [*self.model.records]:
            if self.model.record(number) is None:
                self.client.delete(codec.prefix(TAG) + b"hold:" + number)

    # Comparison

    def slots_key(self, name):
        is_bucket = self.rules[NAMES.index(name)].algorithm is Algorithm.CONCURRENCY
        return bucket_key(name) if is_bucket else holds_key(name)

    def compare(self):
        for name, rule in zip(NAMES, self.rules, strict=True):
            found = self.client.zrange(self.slots_key(name), 0, -1, withscores=True)
            slots = self.model.slots.get(name, {})
            if found:
                (first, count), *found = found
                assert (first, -count) == (b"", len(found))
            now_us = self.model.now_us
            ends = {number: int(end_us) for number, end_us in found if end_us > now_us}
            assert ends == {number: end_us for number, end_us in slots.items() if end_us > now_us}
            if rule.algorithm is Algorithm.CONCURRENCY:
                continue
            value = self.client.get(bucket_key(name))
            kept = self.model.buckets.get(name)
            assert plain(codec.state_of(value, rule)) == plain(kept and kept.shared)
            if kept is not None:
                is_held = value[0] == FORMAT_OF_HELD
                assert (unpack_from("<Q", value, 26)[0] if is_held else 0) == kept.mark


def _eval(script, request):
    keys, arguments = request
    return (script.text, len(keys), *keys, *arguments)


@pytest.mark.parametrize("seed", [pytest.param(0, marks=pytest.mark.slice), *range(1, SEEDS)])
def test_a_trace_of_holds_matches_the_model(store, seed):
    store.flushall()
    trace = Trace(store, seed)
    happen = [
        *[trace.hold] * 6,
        *[trace.step] * 5,
        *[trace.settle_soon] * 2,
        *[trace.check] * 3,
        *[trace.pass_time] * 3,
        trace.spend_late,
        trace.reset,
        trace.edit,
        trace.lose,
    ]
    for _ in range(STEPS):
        trace.chance.choice(happen)()
        trace.compare()
