"""Cold spends: spends of idle buckets, settled like those of a view, without one."""

import random
from contextlib import suppress

import pytest

from ratelimitd.algorithms import DECIDE
from ratelimitd.cluster.cache import IDLE_US
from ratelimitd.cluster.packed import pack
from ratelimitd.cluster.redis.codec import NUMBERS, settle_reply, settle_request
from ratelimitd.errors import BreakerOpenError, StoreCorruptError
from ratelimitd.ledger import cold
from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.ledger.local_view import LocalView, TightView
from ratelimitd.ledger.protocol import MAX_UPDATES, Batch, ColdSpend, Reply
from ratelimitd.ledger.shared_state import SharedState, Update
from ratelimitd.model import Algorithm
from tests.ledger_model import reset
from tests.store_scripts import TAG, key_of, rule_of
from tests.unit.cluster.world import MS, RULE, SECOND, World, limited, name_of

LIMIT = RULE.limit


@pytest.fixture
async def world():
    """A node with an idle bucket, of which one token is spent."""
    world = World()
    world.check()
    return world


def views(world):
    return [name for tag in world.tags for name in tag.buckets]


def remaining(world):
    return world.peek(cost=LIMIT + 1)[1]


async def test_a_spend_is_settled_without_a_view(world):
    assert world.at_once(cost=2)[:2] == (True, LIMIT - 3)
    assert len(world.cache) == 1
    world.settle()
    assert (views(world), len(world.cache), world.store.spent(b"a")) == ([], 1, 3)
    assert world.at_once()[:2] == (True, LIMIT - 4)


async def test_the_next_check_includes_an_unsettled_cold_spend(world):
    world.at_once(cost=2)
    assert world.at_once(cost=3)[:2] == (True, LIMIT - 6)
    assert (views(world), len(world.cache)) == ([], 1)
    world.settle()
    assert world.store.spent(b"a") == 6
    assert world.at_once()[:2] == (True, LIMIT - 7)


async def test_a_frequently_checked_bucket_gets_a_view(world):
    for number in range(cold.MOST_CHECKS):
        assert world.at_once()[:2] == (True, LIMIT - 2 - number)
    assert views(world) == []
    assert world.at_once()[:2] == (True, LIMIT - 2 - cold.MOST_CHECKS)
    assert views(world) == [name_of(b"a")]
    world.settle()
    assert world.store.spent(b"a") == cold.MOST_CHECKS + 2


async def test_a_spend_in_another_window_creates_a_view(world):
    world.at_once(cost=2)
    world.clock.advance(us=RULE.window_us)
    assert world.at_once(cost=3)[:2] == (True, LIMIT - 3)
    assert views(world) == [name_of(b"a")]


async def test_a_spend_under_another_rule_creates_a_view(world):
    world.at_once(cost=2)
    assert world.at_once(rule=limited(LIMIT, revision=9))[:2] == (True, LIMIT - 4)
    assert views(world) == [name_of(b"a")]


async def test_unsettled_spends_that_are_due_at_once_create_a_view():
    world = World(members=10)
    world.check()
    for _ in range(2):
        assert world.at_once(cost=LIMIT // 50)[0]
    assert views(world) == []
    world.at_once(cost=LIMIT // 50)
    assert views(world) == [name_of(b"a")]


async def test_the_next_check_includes_a_cold_spend_in_flight(world):
    world.at_once(cost=2)
    world.store.mode = "held"
    world.sync()
    assert world.at_once(cost=3)[:2] == (True, LIMIT - 6)
    world.store.mode = "up"
    world.store.held_one().answer()
    world.settle()
    assert (world.store.spent(b"a"), remaining(world)) == (6, LIMIT - 6)


async def test_a_lost_reply_does_not_charge_it_twice(world):
    world.at_once(cost=2)
    world.store.mode = "deaf"
    world.sync()
    world.run(30 * MS)
    world.store.mode = "up"
    world.run(SECOND)
    world.settle()
    assert world.store.spent(b"a") == 3


async def test_many_cold_spends_take_several_batches(world):
    keys = [b"a%d" % number for number in range(MAX_UPDATES + 1)]
    for key in keys:
        world.check(key)
        world.at_once(key)
    assert len(world.cache) == len(keys) + 1
    world.settle()
    batches = [len(batch.cold) for batch in world.store.asked("settle")]
    assert (batches, views(world)) == ([MAX_UPDATES, 1], [])


async def test_buckets_beyond_the_limit_of_cold_spends_get_views():
    world = World(max_entries=50)
    keys = [b"a%d" % number for number in range(400)]
    for key in keys:
        world.check(key)
        world.at_once(key)
        world.refresh.step()
    assert (len(world.cache), len(views(world))) == (390, 10)
    world.settle()
    for _ in range(10):
        world.refresh.step()
    assert len(world.cache) <= 50


@pytest.mark.parametrize("is_sent", [False, True])
async def test_a_reset_by_another_node_drops_a_cold_spend(world, is_sent):
    world.at_once(cost=2)
    if is_sent:
        world.store.mode = "held"
        world.sync()
    shared = reset(world.store.ledger.buckets[name_of(b"a")], RULE)
    world.store.ledger.buckets[name_of(b"a")] = shared
    world.refresh.adopt_by_name(name_of(b"a"), shared)
    assert remaining(world) == LIMIT
    world.store.mode = "up"
    for request in world.store.held:
        request.answer()
    world.settle()
    assert (world.store.spent(b"a"), world.accuracy.forgiven_total) == (0, 2)


async def test_a_state_from_another_node_adds_to_a_cold_spend(world):
    world.at_once(cost=2)
    world.store.spend(b"a", RULE, 600, world.clock.now_us())
    world.refresh.adopt_by_name(name_of(b"a"), world.store.ledger.buckets[name_of(b"a")])
    assert remaining(world) == LIMIT - 603
    world.settle()
    assert world.store.spent(b"a") == 603


async def test_a_bucket_that_runs_low_is_published(world):
    world.at_once(cost=2)
    world.store.spend(b"a", RULE, 600, world.clock.now_us())
    world.settle()
    world.gossip.publish()
    [(tag, payload)] = world.bus.published
    assert (tag, payload[:1]) == (ord("a"), b"S")


async def test_a_dropped_cold_spend_counts_as_forgiven(world):
    world.at_once(cost=2)
    world.store.mode = "held"
    world.sync()
    world.store.held_one().done(None)
    assert world.accuracy.forgiven_total == 2
    assert (views(world), len(world.cache)) == ([], 1)


async def test_spends_refilled_during_an_outage_are_forgiven():
    rule = limited(100, window_seconds=1, algorithm=Algorithm.TOKEN_BUCKET)
    world = World(rule)
    for key in (b"a", b"a2"):
        world.check(key)
    world.run(2 * SECOND)
    world.store.mode = "held"
    world.at_once(b"a")
    world.sync()
    world.at_once(b"a2", cost=20)
    world.run(5 * SECOND)
    world.store.mode = "up"
    world.store.held_one().answer()
    world.settle()
    assert world.accuracy.forgiven_total == 20


async def test_the_end_of_an_outage_makes_no_more_views_than_a_batch_takes():
    rule = limited(100, window_seconds=1, algorithm=Algorithm.TOKEN_BUCKET)
    world, keys = World(rule), [b"a%d" % number for number in range(3 * MAX_UPDATES)]
    for key in keys:
        world.wait(key)
    world.run(2 * SECOND)
    tag = world.tags[name_of(b"a")[0]]
    world.store.mode = "held"
    world.at_once(keys[0])
    tag.sync()
    for key in keys[1:]:
        world.at_once(key, cost=20)
    world.run(5 * SECOND)
    for _ in range(4):
        world.store.held_one().answer()
        world.refresh.reread(name_of(keys[-1]))  # a message before its turn
        world.store.held.clear()
        world.run(10 * MS)
        tag.sync()
        assert len(views(world)) <= MAX_UPDATES
    assert tag.is_settled
    assert world.accuracy.forgiven_total == 20 * len(keys[1:])


async def test_views_that_wait_for_a_batch_precede_the_cold_spends_of_an_outage():
    rule = limited(100, window_seconds=1, algorithm=Algorithm.TOKEN_BUCKET)
    world = World(rule)
    hot, idle = ([b"a%s%d" % (kind, n) for n in range(MAX_UPDATES + 50)] for kind in (b"h", b"i"))
    for key in idle:
        world.wait(key)
    world.run(2 * SECOND)
    world.know(*hot)
    tag = world.tags[name_of(b"a")[0]]
    world.store.mode = "held"
    world.at_once(hot[0])
    tag.sync()
    for key in (*hot, *idle):
        assert world.at_once(key, cost=20)[0]
    world.run(5 * SECOND)
    before = len(views(world))
    for batch in range(3):
        world.store.held_one().answer()
        world.run(10 * MS)
        tag.sync()
        made = len(views(world)) - before
        assert made <= max(0, MAX_UPDATES * batch - 50)
    assert made
    world.store.mode = "up"
    world.store.held_one().answer()
    world.settle()
    assert world.accuracy.forgiven_total == 20 * len([*hot, *idle])


def reset_in_store(world):
    """Reset the bucket from another node."""
    name = name_of(b"a")
    shared = world.store.ledger.buckets[name] = reset(world.store.ledger.buckets.get(name), RULE)
    return name, shared


async def test_a_batch_contains_a_bucket_once(world):
    """After a reset its view has nothing to settle, but is still in the next batch."""
    world.know()
    world.store.mode = "held"
    world.at_once()
    world.sync()
    world.at_once()
    world.refresh.adopt_by_name(*reset_in_store(world))
    world.run(IDLE_US)
    world.refresh.step()
    world.refresh.step()
    world.at_once(cost=3)
    world.store.mode = "up"
    world.store.held_one().answer()
    world.settle()
    assert (world.store.spent(b"a"), remaining(world)) == (3, LIMIT - 3)
    batches = world.store.asked("settle")
    assert not any(batch.updates.keys() & batch.cold.keys() for batch in batches)


async def test_a_state_from_before_a_lost_reset_is_not_adopted(world):
    before = world.store.ledger.buckets[name_of(b"a")]
    world.know()
    world.refresh.adopt_by_name(*reset_in_store(world))
    world.pack()
    world.store.mode = "held"
    world.at_once(cost=2)
    world.sync()
    (batch,) = world.store.asked("settle")
    world.store.held_one().done(Reply(batch.number, {}, {name_of(b"a"): pack(before)}))
    world.store.mode = "up"
    assert remaining(world) == LIMIT


async def test_a_resync_reads_the_bucket_of_a_cold_spend_again(world):
    world.at_once(cost=2)
    world.store.mode = "held"
    world.sync()
    request = world.store.held_one()
    world.store.mode = "up"
    world.store.spend(b"a", RULE, 600, world.clock.now_us())
    world.refresh.resync()
    world.refresh.step()
    world.run(2 * MS)
    request.done(None)
    assert world.check()[:2] == (True, LIMIT - 602)


async def test_a_late_first_check_answer_finds_the_bucket_by_its_key():
    """Meanwhile the breaker was open, and the node decided alone."""
    world = World(decides_alone=True)
    world.store.mode = "held"
    answer, request = world.wait(), world.store.held_one()
    world.store.mode = "up"
    world.open_breaker()
    world.at_once()
    world.run(31 * SECOND)
    assert world.server.begins_probe()
    world.server.answered()
    world.settle()
    world.pack()
    world.at_once(cost=2)
    request.answer()
    assert world.at_once(cost=3)[:2] == (True, LIMIT - 7)
    assert (len(world.cache), answer.result()[0]) == (1, True)


async def test_a_waiting_check_of_a_dropped_view_is_charged_beside_a_cold_spend():
    world = World(max_entries=1)
    world.know()
    answer = world.wait(cost=600)
    world.store.mode = "held"
    world.run()
    world.store.held_one().done(None)
    world.store.mode = "up"
    world.know(b"b")
    world.refresh.step()
    world.check()
    world.at_once(cost=2)
    world.run(20 * MS)
    assert (answer.result()[:2], remaining(world)) == ((True, LIMIT - 603), LIMIT - 603)
    world.settle()
    assert (world.store.spent(b"a"), world.cache.cold) == (603, 0)


async def test_an_open_breaker_delays_a_cold_spend_and_decides_no_check(world):
    world.at_once(cost=2)
    world.open_breaker()
    with pytest.raises(BreakerOpenError):
        world.at_once()


async def test_a_node_that_decides_alone_includes_a_cold_spend():
    world = World(decides_alone=True)
    world.check()
    world.at_once(cost=2)
    world.open_breaker()
    assert world.at_once()[:2] == (True, LIMIT - 4)


@pytest.mark.parametrize("spent", [LIMIT // 2, LIMIT - 10])
async def test_a_check_near_the_limit_creates_a_view(spent):
    world = World(members=2)
    world.store.spend(b"a", RULE, spent, world.clock.now_us())
    world.wait(peek=True)
    world.run(2 * MS)
    world.at_once()
    assert views(world) == [name_of(b"a")]


async def test_a_cost_that_is_due_at_once_creates_a_view():
    world = World(members=10)
    world.check()
    assert world.at_once(cost=LIMIT // 20 - 1)[0]
    assert views(world) == []
    world.settle()
    world.at_once(cost=LIMIT // 20)
    assert views(world) == [name_of(b"a")]


async def test_a_new_limit_creates_a_view(world):
    world.at_once(rule=limited(LIMIT * 2, revision=9))
    assert views(world) == [name_of(b"a")]


async def test_a_cold_spend_under_an_older_limit_settles_like_a_view(world):
    world.at_once(cost=2)
    newer = limited(LIMIT // 2, revision=9)
    world.store.spend(b"a", newer, 1, world.clock.now_us())
    world.settle()
    assert world.store.spent(b"a") == 4
    assert world.at_once(rule=newer)[:2] == (True, LIMIT // 2 - 5)


@pytest.mark.parametrize("seed", range(60))
async def test_checks_are_answered_and_charged_as_with_views(seed, monkeypatch):
    def play():
        source = random.Random(seed)
        algorithm = source.choice([Algorithm.TOKEN_BUCKET, Algorithm.FIXED_WINDOW])
        rule = limited(
            source.choice([20, 1_000]), window_seconds=source.choice([1, 60]), algorithm=algorithm
        )
        world, answers = World(rule, members=source.choice([1, 3])), []
        keys = [b"%c%d" % (source.randrange(97, 100), number) for number in range(8)]
        for _ in range(150):
            world.run(source.choice([0, 1, 7, 50]) * MS)
            world.store.mode = source.choice(["up", "up", "up", "deaf"])
            if source.random() < 0.3:
                world.sync()
            key, cost = source.choice(keys), source.choice([1, 1, 2, 9])
            try:
                answer = world.check(key, cost)
            except BreakerOpenError as error:
                answer = error
            answers.append(answer[:5] if isinstance(answer, tuple) else type(answer))
        world.store.mode = "up"
        world.settle()
        return answers, world.store.ledger.buckets

    found = play()
    with monkeypatch.context() as patched:
        patched.setattr(cold, "spend", lambda *_: None)
        assert play() == found


SPENT = [Algorithm.TOKEN_BUCKET, Algorithm.FIXED_WINDOW]


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.parametrize("algorithm", SPENT)
def test_added_checks_are_decided_and_charged_like_single_ones(algorithm, seed):
    chance, rule, now_us = random.Random(seed), rule_of(algorithm, 1_000, 60), 10**9
    decide, account, share_of = DECIDE[algorithm], ACCOUNTS[algorithm], LocalView.share_of
    token = rule.window_us if algorithm is Algorithm.TOKEN_BUCKET else 1
    base = state = chance.choice((None, (0, now_us - 1), (chance.randint(1, 200) * token, now_us)))
    spent = None
    for _ in range(cold.MOST_CHECKS):
        now_us += chance.choice((-1, 0, 1, 1_000, SECOND))
        cost = chance.randint(1, 9)
        expected = decide(state, rule, now_us, cost)
        if spent is None:
            outcome = cold.spend(state, rule, decide, now_us, 1, cost, share_of)
            spent = ColdSpend(rule, base, outcome[5][1], cost)
        else:
            outcome, spent = cold.add(spent, base, decide, now_us, 1, cost, share_of)
        assert outcome == expected
        state = expected[5]
    view = LocalView(rule, SharedState(0, 1, rule.limit, base))
    view.resume(spent, in_flight=False)
    assert view.unsent.runs() == spent.runs()
    charged = account.charged(base, rule, spent.runs())
    # Up to one microsecond of refill, by which the earlier of two runs may be off.
    assert charged[1] == state[1]
    assert 0 <= charged[0] - state[0] <= (rule.limit if token > 1 else 0)


def test_a_cold_spend_of_a_log_takes_one_check_only():
    rule, decide = rule_of(Algorithm.SLIDING_WINDOW, 10, 60), DECIDE[Algorithm.SLIDING_WINDOW]
    spent = ColdSpend(rule, NEVER, 100, 1)
    assert cold.add(spent, None, decide, 200, 1, 1, LocalView.share_of) is None


# Encoding and replies

ONE = key_of(1)
NEVER = SharedState(0, 1, 10)


@pytest.mark.parametrize("algorithm", [Algorithm.TOKEN_BUCKET, Algorithm.FIXED_WINDOW])
def test_a_cold_spend_is_encoded_like_the_update_of_a_view(algorithm):
    rule, base = rule_of(algorithm, 10, 60, revision=3), SharedState(5, 2, 10, (7, 100))
    update = Batch("node", 7, 0, {ONE: Update(rule, 5, ((100, 2),))})
    spend = Batch("node", 7, 0, {}, {ONE: ColdSpend(rule, pack(base), 100, 2)})
    assert settle_request(TAG, spend) == settle_request(TAG, update)


def test_a_cold_spend_with_a_refill_in_between_is_encoded_like_the_update_of_a_view():
    rule, base = rule_of(Algorithm.TOKEN_BUCKET, 10, 60, revision=3), SharedState(5, 2, 10)
    runs = ((4 * SECOND, 1), (10 * SECOND, 2))
    update = Batch("node", 7, 0, {ONE: Update(rule, 5, runs)})
    several = ColdSpend(rule, pack(base), 10 * SECOND, 3, 60 * SECOND, 2)
    assert several.runs() == runs
    spend = Batch("node", 7, 0, {}, {ONE: several})
    assert settle_request(TAG, spend) == settle_request(TAG, update)


def values(algorithm):
    yield from (b"", b"x", b"\1\1" + bytes(40), bytes(42), None, 5)
    source = random.Random(42)
    for _ in range(300):
        number = source.choice([1, 2, 3, {"token_bucket": 1, "fixed_window": 2}.get(algorithm, 3)])
        head = bytes((source.choice([1, 1, 1, 2, 3]), number))
        numbers = [source.choice([0, 1, 10, 2**31 - 1, 2**31]) for _ in range(2)]
        numbers += [source.choice([0, 5, 59_999_999, 60_000_000, 2**53, 2**60]) for _ in range(4)]
        sizes = (4, 4, 8, 8, 8, 8)
        generation, limit, revision, *state = [
            n.to_bytes(8, "little")[:size] for n, size in zip(numbers, sizes, strict=True)
        ]
        yield head + generation + revision + limit + b"".join(state[: source.choice([0, 3, 3, 3])])


@pytest.mark.parametrize("algorithm", ACCOUNTS)
def test_the_reply_to_a_cold_spend_is_decoded_like_that_to_an_update(algorithm):
    rule = rule_of(algorithm, 10, 60, revision=3)
    update = Batch("node", 7, 0, {ONE: Update(rule, 0, ((100, 2),))})
    spend = Batch("node", 7, 0, {}, {ONE: ColdSpend(rule, pack(NEVER), 100, 2)})

    def read(batch, value):
        try:
            reply = settle_reply(batch, [b"", 0, value])
        except StoreCorruptError:
            return "corrupt"
        return reply.cold[ONE] if batch is spend else pack(reply.settled[ONE].shared)

    found = [(read(spend, value), read(update, value)) for value in values(algorithm)]
    assert [one for one, other in found if one != other] == []
    assert len({one for one, _ in found}) > 10


@pytest.mark.parametrize("algorithm", ACCOUNTS)
def test_a_state_is_decoded_the_same_alone_and_beside_another(algorithm):
    """Also one with the same head, and one of another algorithm or limit."""
    rules = [rule_of(algorithm, 10, 60, revision=3), *[rule_of(one, 10, 1) for one in ACCOUNTS]]
    chance, sound = random.Random(7), []
    for value in values(algorithm):
        number = chance.randrange(len(rules))
        spends = {ONE: ColdSpend(rules[number], pack(NEVER), 100, 2)}
        with suppress(StoreCorruptError):
            packed = settle_reply(Batch("node", 7, 0, {}, spends), [b"", 0, value]).cold[ONE]
            sound.append((rules[number], value, packed))
    assert len(sound) > 5
    for _ in range(300):
        some = chance.choices(sound, k=9)
        spends = {
            key_of(number): ColdSpend(rule, pack(NEVER), 100, 2)
            for number, (rule, _, _) in enumerate(some)
        }
        values_of = [value for _, value, _ in some]
        reply = settle_reply(Batch("node", 7, 0, {}, spends), [b"", 0, *values_of])
        assert [*reply.cold.values()] == [packed for _, _, packed in some]


@pytest.mark.parametrize("algorithm", SPENT)
def test_impossible_numbers_beside_a_valid_state_are_corrupt(algorithm):
    rule = rule_of(algorithm, 10, 60)
    keys = [key_of(1), key_of(2)]
    batch = Batch("node", 7, 0, {}, {key: ColdSpend(rule, pack(NEVER), 100, 2) for key in keys})
    head = b"\1" + bytes([NUMBERS[algorithm]]) + bytes(12) + (10).to_bytes(4, "little")
    for numbers in ((2**60, 0, 5), (1, 2**60, 5), (1, 0, 2**60)):
        broken = b"".join([number.to_bytes(8, "little") for number in numbers])
        with pytest.raises(StoreCorruptError):
            settle_reply(batch, [b"", 0, head + bytes(24), head + broken])


@pytest.mark.parametrize("algorithm", ACCOUNTS)
def test_a_spend_of_a_full_bucket_matches_the_algorithm(algorithm):
    rule, decide = rule_of(algorithm, 10, 60), DECIDE[algorithm]
    assert cold.spend(None, rule, decide, 100, 1, 2, LocalView.share_of) == decide(
        None, rule, 100, 2
    )
    assert cold.spend(None, rule, decide, 100, 1, 5, LocalView.share_of) is None
    assert cold.spend(None, rule, decide, 100, 1, 11, LocalView.share_of) is None
    assert cold.spend(None, rule, decide, 100, 1, 1, TightView.share_of) is None
