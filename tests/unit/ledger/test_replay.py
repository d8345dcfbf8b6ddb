import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd.ledger import replay
from ratelimitd.ledger.replay import NEVER, Replay, both, changed

bounds = st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted)
changes = st.tuples(st.integers(-20, 20), bounds).map(lambda one: (one[0], *one[1]))


def charge(units):
    return units, 0, NEVER


def refill(units):
    return -units, 0, NEVER


def cap(units):
    return 0, 0, units


class Model:
    """Each hold with all that has come after it, one by one."""

    def __init__(self, before):
        self.before, self.steps = before, []

    def level(self):
        level = self.before
        for _, (add, least, most) in self.steps:
            level = min(max(level + add, least), most)
        return level

    def remove(self, number, more):
        place = [one for one, _ in self.steps].index(number)
        add, least, most = self.steps[place][1]
        self.steps[place] = None, (add + more, least, most)


@given(level=st.integers(0, 40), first=changes, second=changes)
def test_two_changes_are_one(level, first, second):
    assert changed(level, both(first, second)) == changed(changed(level, first), second)


def test_what_was_refilled_since_is_not_given_back():
    of = Replay(0)
    of.add(b"a", charge(10))
    of.then(refill(7))
    assert of.level() == 3
    of.remove(b"a", -6)
    assert of.level() == 0
    assert len(of) == 0


def test_what_a_full_bucket_was_not_refilled_since_is():
    of = Replay(0)
    of.add(b"a", charge(10))
    of.then(refill(7))
    of.then(charge(5))
    of.remove(b"a", -10)
    assert of.level() == 5


def test_more_is_charged_as_of_the_time_of_the_hold():
    of = Replay(4)
    of.add(b"a", charge(1))
    of.then(refill(9))
    of.remove(b"a", 6)
    assert of.level() == 2


def test_what_an_edit_has_cut_off_is_not_given_back():
    of = Replay(0)
    of.add(b"a", charge(10))
    of.then(charge(5))
    of.then(cap(8))
    of.remove(b"a", -4)
    assert of.level() == 8
    of = Replay(0)
    of.add(b"a", charge(10))
    of.then(cap(8))
    of.remove(b"a", -4)
    assert of.level() == 6


def test_holds_are_told_by_their_time():
    of = Replay(3)
    for number in (b"b", b"a", b"c"):
        of.add(number, charge(1))
    of.then(refill(1))
    of.remove(b"a", 0)
    assert (b"a" in of, b"b" in of, len(of), [*of]) == (False, True, 2, [b"b", b"c"])
    assert [*of.changes()] == [(2, 1, NEVER), (0, 0, NEVER - 1)]


@pytest.mark.parametrize("block", [1, 2, 4, 32])
def test_random_holds_come_to_what_they_come_to_one_by_one(block, monkeypatch):
    monkeypatch.setattr(replay, "BLOCK", block)
    rng = random.Random(block)
    for _ in range(60):
        of, model, left = Replay(start := rng.randint(0, 20)), Model(start), []
        for step in range(rng.choice([10, 120])):
            what = rng.random()
            if what < 0.4 or not left:
                number = step.to_bytes(16, "big")
                one = charge(rng.randint(1, 20))
                of.add(number, one)
                left.append(number)
                model.steps.append((number, one))
            elif what < 0.7:
                one = rng.choice([charge(3), refill(rng.randint(1, 30)), cap(15), (0, 12, NEVER)])
                of.then(one)
                model.steps.append((None, one))
            else:
                number = left.pop(rng.choice([0, -1, rng.randrange(len(left))]))
                more = rng.randint(-1, 1) * rng.randint(0, 9)
                held = next(one[0] for place, one in model.steps if place == number)
                of.remove(number, more := max(more, -held))
                model.remove(number, more)
            if left or not len(of):
                assert of.level() == model.level()
            assert (len(of), [*of], [one in of for one in left]) == (
                len(left), left if left == [*of] else sorted(left), [True] * len(left)
            )  # fmt: skip
