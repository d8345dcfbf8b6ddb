"""The level after settles with other amounts, against a list of all changes."""

from random import Random

import pytest

from ratelimitd.ledger import replay as module
from ratelimitd.ledger.replay import BLOCK, NEVER, Replay, both, changed


class Everything:
    """Computes the level from all changes in order, each hold with its current charge."""

    def __init__(self, before):
        self.before, self.events = before, []

    def hold(self, number, change):
        self.events.append([number, change])

    def then(self, change):
        self.events.append([None, change])

    def settle(self, number, more):
        [event] = [event for event in self.events if event[0] == number]
        add, least, most = event[1]
        event[1] = add + more, least, most

    def level(self):
        level = self.before
        for _, (add, least, most) in self.events:
            level = min(max(level + add, least), most)
        return level


def change_of(random):
    """Return a charge, a refill or an edit."""
    return random.choice(
        (
            (random.randrange(50), 0, NEVER),
            (-random.randrange(80), 0, NEVER),
            (0, 0, random.randrange(100, 400)),
            (-random.randrange(30), random.randrange(5), random.randrange(5, 300)),
        )
    )


@pytest.mark.parametrize("seed", range(30))
def test_another_amount_is_charged_as_of_the_time_of_the_hold(seed, monkeypatch):
    random = Random(seed)
    monkeypatch.setattr(module, "BLOCK", random.choice([1, 2, 4, 8, BLOCK]))
    before = random.randrange(100)
    replay, everything, held = Replay(before), Everything(before), {}
    for step in range(300):
        kind = random.random()
        if kind < 0.45 or not held:
            number, amount = step.to_bytes(16, "big"), random.randrange(1, 50)
            held[number] = amount
            for one in (replay.add, everything.hold):
                one(number, (amount, 0, NEVER))
        elif kind < 0.75:
            change = change_of(random)
            replay.then(change)
            everything.then(change)
        elif kind < 0.95:
            number = random.choice([*held])
            more = random.choice((-held.pop(number), 0, random.randrange(100)))
            replay.remove(number, more)
            everything.settle(number, more)
        else:
            replay = Replay(*replay.parts())
        assert replay.level() == everything.level()
        assert replay.numbers == [*held]
        assert len(replay) == len(held)
        if not held:
            replay, everything = Replay(before), Everything(before)


def test_settled_holds_leave_no_state():
    replay = Replay(0)
    replay.add(b"first", (1, 0, NEVER))
    for step in range(20 * BLOCK):
        number = step.to_bytes(16, "big")
        replay.add(number, (3, 0, NEVER))
        replay.remove(number, -2)
    assert b"first" in replay
    assert replay.level() == 1 + 20 * BLOCK
    _, numbers, [change] = replay.parts()
    assert (numbers, change[0]) == ([b"first"], 1 + 20 * BLOCK)


def test_the_level_is_kept_when_the_last_hold_is_settled():
    replay = Replay(5)
    for number in (b"a", b"b"):
        replay.add(number, (2, 0, NEVER))
        replay.then((-1, 0, NEVER))
    for number in (b"a", b"b"):
        replay.remove(number, 0)
    assert replay.level() == 7
    assert replay.parts() == (7, [], [])


def test_two_changes_compose_into_one():
    for level in range(0, 60, 7):
        first, second = (10, 3, 40), (-25, 2, 30)
        assert changed(level, both(first, second)) == changed(changed(level, first), second)


def test_refill_since_the_hold_is_not_given_back():
    replay = Replay(0)
    replay.add(b"a", (10, 0, NEVER))
    replay.then((-7, 0, NEVER))
    assert replay.level() == 3
    replay.remove(b"a", -6)
    assert replay.level() == 0


def test_a_settle_recomputes_refill_lost_by_a_full_bucket():
    replay = Replay(0)
    replay.add(b"a", (10, 0, NEVER))
    replay.then((-7, 0, NEVER))
    replay.then((5, 0, NEVER))
    replay.remove(b"a", -10)
    assert replay.level() == 5


def test_a_debt_capped_by_an_edit_is_not_given_back():
    for amount, left in ((20, 8), (10, 6)):
        replay = Replay(0)
        replay.add(b"a", (amount, 0, NEVER))
        replay.then((0, 0, 8))
        replay.remove(b"a", -4)
        assert replay.level() == left
