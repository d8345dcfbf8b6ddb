"""Invariants of any run, whatever faults it had."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ratelimitd.algorithms import DECIDE, sliding_window
from ratelimitd.ledger.accounts import ACCOUNTS
from ratelimitd.model import Algorithm
from tests.simulation.play import LATEST_EDIT_S, Played, settled
from tests.simulation.scenario import Scenario
from tests.simulation.world import MS, SECOND, START_US, level

Spend = tuple[int, int]
"""(time in µs, tokens)."""


def violations(played: Played) -> list[str]:
    """Return the violated invariants."""
    if played.world.is_endless:
        return ["does not come to an end"]  # no other invariant applies
    found = []
    for name, demand in DEMANDS.items():
        problem = demand(played)
        if problem:
            found.append(f"{name}: {problem}")
    return found


# Every token


def nothing_is_left(played: Played) -> str:
    """At the end everything is settled."""
    return "" if settled(played.world) else "spends or checks wait for ever"


def no_spend_is_lost_or_doubled(played: Played) -> str:
    """Each allowed token was charged once, or is accounted for."""
    books = played.world.books
    if books.paid_twice:
        return "a grant was paid for twice"
    allowed = sum(one.cost for some in books.admissions.values() for one in some)
    accounted = books.arrived - books.wasted + books.lost + books.unchecked + played.forgiven
    return "" if allowed == accounted else f"{allowed} allowed, {accounted} accounted for"


def the_store_has_all_charges(played: Played) -> str:
    """A bucket has the charges since its last reset; after an edit of its limit, at most those."""
    scenario, world = played.scenario, played.world
    account, rule = ACCOUNTS[scenario.algorithm], scenario.rule
    if scenario.edit_s:
        limit = min(scenario.limit, scenario.edited_limit)
        rule = replace(rule, limit=limit, burst=scenario.burst_of(limit))
    if world.is_flushed:
        return ""  # a batch whose number the store has lost may be applied again
    # A higher limit trims nothing, but the earlier debt of windows depends on the time of the edit.
    is_raised = scenario.edited_limit >= 4 * scenario.limit
    trims = scenario.edit_s and not (is_raised and scenario.algorithm is not Algorithm.FIXED_WINDOW)
    for key, charges in world.books.charges.items():
        shared = world.ledger.buckets.get(key)
        if shared is None:
            return f"{key!r} is not there, and was charged"
        at_us = account.standing(shared.state)[0]
        # Under a lower limit some spends were not charged, perhaps the latest.
        expected = level(charges, rule, at_us) if trims else level(charges, rule)
        if expected is None:
            continue
        held = _held(scenario, shared.state)
        if shared.generation > max(one.generation for one in charges):
            expected = -1, 0  # nothing was charged since the reset
        if held > expected[1] if trims else (at_us, held) != expected:
            return f"{key!r} holds {held} of {at_us}, and {expected} was charged"
    return ""


def _held(scenario: Scenario, state: Any) -> int:
    if state is None:
        return 0
    if scenario.algorithm is Algorithm.SLIDING_WINDOW:
        return sliding_window.latest(state)[1]
    count: int = state[0]
    return count


# Never too much


def slack(played: Played, limit: int) -> float:
    """Return the tokens that all nodes together may allow beyond a limit, in any interval."""
    scenario, books = played.scenario, played.world.books
    rate, capacity = limit / (scenario.window_seconds * SECOND), scenario.capacity_of(limit)
    apart_us = 2 * (scenario.skew_us + scenario.caller_times_us)
    late_us = min(books.longest_batch_us, SECOND) + apart_us + 10 * MS
    # Each node has a share by the number of members that it assumes.
    part: float = played.world.nodes[0].make_view.shares
    shares = books.most_held * part * capacity + scenario.nodes
    over = shares + scenario.nodes * rate * late_us + played.forgiven + books.lost
    if scenario.edit_s and scenario.first_node_misses_edits:
        # the share of the first node until it receives a state
        over += part * scenario.capacity_of(scenario.limit)
    if scenario.is_calm:
        # a tenth of the limit remains, as measured without faults
        over -= (part - 0.1) * capacity
    return over


def never_more_than_the_bound(played: Played) -> str:
    """No interval has more allowed tokens than the limit and the bound, except by nodes cut off from the store.

    A reset adds one limit, and so may an edit; before and after it the bound is the same.
    """
    scenario = played.scenario
    for limit, spends in _stretches(played):
        excess, most = excess_of(scenario, spends, limit), slack(played, limit)
        if excess > most:
            return f"{excess:.1f} over {limit}, {most:.1f} is the bound"
    limit = max(scenario.limit, scenario.edited_limit if scenario.edit_s else 0)
    together = [(one.at_us, one.cost) for one in played.admissions if not one.alone]
    freed = bool(scenario.edit_s) + bool(scenario.reset_s) + bool(scenario.flush_s)
    most = slack(played, limit) + 1.5 * scenario.capacity_of(limit) * freed
    excess = excess_of(scenario, together, limit)
    return "" if excess <= most else f"{excess:.1f} over all, {most:.1f} is the bound"


def _stretches(played: Played) -> Iterable[tuple[int, list[Spend]]]:
    """Yield each limit with the spends while all nodes knew it and the same generation."""
    scenario = played.scenario
    heard_s = 1.5 if scenario.loss or scenario.news_loss or scenario.outages else 0.1
    breaks = [
        (freed_s, freed_s + heard_s + _outage_after(scenario, freed_s))
        for freed_s in _freed_at(scenario)
    ]
    if scenario.edit_s:
        breaks.append((scenario.edit_s, scenario.edit_s + LATEST_EDIT_S + 0.1))
    begin_s = 0.0
    for end_s, next_s in [*sorted(breaks), (1e9, 1e9)]:
        limit = (
            scenario.edited_limit
            if scenario.edit_s and begin_s > scenario.edit_s
            else scenario.limit
        )
        begin_us, end_us = START_US + begin_s * SECOND, START_US + end_s * SECOND
        spends = [
            (one.at_us, one.cost)
            for one in played.admissions
            if begin_us <= one.at_us < end_us and not one.alone
        ]
        if spends:
            yield limit, spends
        begin_s = max(begin_s, next_s)


def _freed_at(scenario: Scenario) -> list[float]:
    """Return the times at which the bucket becomes full: its resets, and its loss by the store."""
    times = [scenario.reset_s] if scenario.reset_s else []
    return [*times, scenario.flush_s] if scenario.flush_s else times


def _outage_after(scenario: Scenario, at_s: float) -> float:
    """Return the seconds for which an outage hides an event at ``at_s``."""
    ends = [began + length for began, length in scenario.outages if began <= at_s + 0.1]
    return max(0.0, *(end - at_s for end in ends), 0.0)


def no_node_allows_more_than_one_may(played: Played) -> str:
    """A single node that knows the bucket stays within the limit, whatever happens to the store."""
    scenario = played.scenario
    if scenario.edit_s or _freed_at(scenario) or scenario.may_begin_afresh:
        return ""
    spends: dict[str, list[Spend]] = {}
    for one in played.checked:
        spends.setdefault(one.node, []).append((one.at_us, one.cost))
    # Grants of the store, while the node does not know yet that others have spent less.
    late_us = played.world.books.longest_batch_us + 2 * scenario.caller_times_us + 20 * MS
    most = scenario.nodes * (2 * scenario.cost - 1) + scenario.rate_per_us * late_us
    worst = max(
        (excess_of(scenario, some, scenario.limit) for some in spends.values()), default=0.0
    )
    return "" if worst <= most else f"{worst:.1f} over the limit by itself, {most:.1f} is the bound"


def what_was_spent_beside_each_other_is_paid_back(played: Played) -> str:
    """After any number of outages, a token bucket is overdrawn by the parallel spends of one, or forgiven ones."""
    scenario = played.scenario
    others = (scenario.edit_s, _freed_at(scenario), scenario.crash_s, scenario.may_begin_afresh)
    if scenario.algorithm is not Algorithm.TOKEN_BUCKET or any(others):
        return ""
    spends = [(one.at_us, one.cost) for one in played.checked]
    excess = excess_of(scenario, spends, scenario.limit)
    most = slack(played, scenario.limit) + (scenario.nodes - 1) * scenario.capacity_of(
        scenario.limit
    )
    return "" if excess <= most else f"{excess:.1f} over the limit, {most:.1f} is the bound"


def excess_of(scenario: Scenario, spends: Sequence[Spend], limit: int) -> float:
    """Return the excess of the worst interval over a limit; an answer may come 10 ms after the time of its charge.

    An answer by the view to a check that the store granted late comes another 20 ms later.
    """
    length_us = scenario.window_seconds * SECOND
    if scenario.algorithm is Algorithm.TOKEN_BUCKET:
        return _worst_level(spends, limit / length_us) - scenario.capacity_of(limit)
    # A fixed window may be used up at its end, and the next one at its beginning.
    windows = 2 if scenario.algorithm is Algorithm.FIXED_WINDOW else 1
    apart_us = (
        2 * (scenario.skew_us + scenario.caller_times_us) + (30 if scenario.loss else 10) * MS
    )
    return _most_in(spends, length_us - apart_us) - windows * limit


def _worst_level(spends: Sequence[Spend], rate: float) -> float:
    worst = now = 0.0
    before_us = 0
    for at_us, cost in spends:
        now = max(0.0, now - (at_us - before_us) * rate) + cost
        before_us = at_us
        worst = max(worst, now)
    return worst


def _most_in(spends: Sequence[Spend], length_us: int) -> int:
    most = first = now = 0
    for at_us, cost in spends:
        now += cost
        while spends[first][0] <= at_us - length_us:
            now -= spends[first][1]
            first += 1
        most = max(most, now)
    return most


def the_excess_does_not_grow(played: Played) -> str:
    """With any delays, a long run allows at most one limit more than a single node would."""
    scenario = played.scenario
    if not scenario.is_late:
        return ""
    allowed = sum(one.cost for one in played.admissions)
    capacity = scenario.capacity_of(scenario.limit)
    most = (
        _allowed_by_one_node(played)
        + capacity
        + 2 * scenario.nodes * scenario.cost
        + played.forgiven
    )
    return "" if allowed <= most else f"{allowed} allowed, {most} is the bound"


# Never too little


def _allowed_by_one_node(played: Played) -> int:
    scenario, state, ideal = played.scenario, None, 0
    decide = DECIDE[scenario.algorithm]
    for at_us, cost in played.offered:
        outcome = decide(state, scenario.rule, at_us, cost)
        state = outcome[5]
        ideal += cost if outcome[0] else 0
    return ideal


def no_less_than_one_node_alone(played: Played) -> str:
    """Without faults the nodes together allow 99 % of a single node's tokens, if the limit is large enough to share."""
    scenario = played.scenario
    if not scenario.is_calm or played.end_us - START_US < 5 * scenario.window_seconds * SECOND:
        return ""
    ideal = _allowed_by_one_node(played)
    allowed = sum(one.cost for one in played.admissions)
    # Checks that wait at the ends of the run, and a burst while the previous one is still in the window.
    edges = 2 * scenario.nodes * scenario.cost + 0.05 * scenario.capacity_of(scenario.limit)
    if scenario.bursts and scenario.algorithm is Algorithm.SLIDING_WINDOW:
        edges += ideal / 10
    least = 0.99 * ideal - edges
    return "" if allowed >= least else f"{allowed} allowed, one node would have allowed {ideal}"


def no_caller_is_locked_out(played: Played) -> str:
    """After an outage callers are denied for at most one window per node, at any load."""
    scenario = played.scenario
    if scenario.edit_s or scenario.bursts or scenario.limit < 10 or len(scenario.outages) != 1:
        return ""
    return _locked_out(played, sum(scenario.outages[-1]))


def an_edit_locks_no_caller_out(played: Played) -> str:
    """After a limit was lowered callers are denied no longer than that, whatever was in flight."""
    scenario = played.scenario
    faults = (scenario.outages, scenario.mute, scenario.deaf, scenario.bursts)
    if not scenario.edit_s or any(faults) or scenario.edited_limit < 4 * scenario.cost:
        return ""
    per_window = scenario.checks_per_us * scenario.window_seconds * SECOND
    return "" if per_window < 20 else _locked_out(played, scenario.edit_s + LATEST_EDIT_S)


def _locked_out(played: Played, from_s: float) -> str:
    scenario = played.scenario
    from_us = START_US + int(from_s * SECOND)
    times = [one.at_us for one in played.admissions if one.at_us > from_us]
    longest_us = max((b - a for a, b in pairwise([from_us, *times, played.end_us])), default=0)
    # Plus the time until their cost is refilled.
    windows = (
        scenario.nodes * scenario.capacity_of(scenario.limit) / scenario.limit
        + 2 * scenario.cost / scenario.limit
    )
    most_us = int(windows * scenario.window_seconds * SECOND) + SECOND // 2
    is_fixed = scenario.algorithm is Algorithm.FIXED_WINDOW
    if (
        scenario.caller_times_us or is_fixed
    ):  # debt, or callers with future times, fill the next window
        most_us += scenario.window_seconds * SECOND
    longest_s = longest_us / SECOND
    return "" if longest_us <= most_us else f"nothing was allowed for {longest_s:.1f} s"


def a_reset_frees(played: Played) -> str:
    """Half a second after a reset is known, half the limit was allowed, if the load was that high."""
    scenario = played.scenario
    others = (
        scenario.outages,
        scenario.edit_s,
        scenario.crash_s,
        scenario.mute,
        scenario.deaf,
        scenario.bursts,
    )
    if not scenario.reset_s or any(others) or scenario.loss > 0.1:
        return ""
    return next(filter(None, (_frees(played, reset_s) for reset_s in _freed_at(scenario))), "")


def _frees(played: Played, reset_s: float) -> str:
    scenario = played.scenario
    known_us = 0
    if scenario.news_loss or scenario.loss:  # nodes reread the bucket, and that may be lost, too
        known_us = 3 * SECOND if scenario.loss else SECOND
    from_us = START_US + int(reset_s * SECOND)
    until_us = from_us + known_us + SECOND // 2
    offered = sum(cost for at_us, cost in played.offered if from_us + known_us <= at_us < until_us)
    allowed = sum(one.cost for one in played.admissions if from_us <= one.at_us < until_us)
    capacity = scenario.capacity_of(scenario.limit)
    if offered < 2 * capacity or until_us > played.end_us:
        return ""
    return "" if allowed >= capacity / 2 else f"{allowed} of {capacity} after a reset"


def what_has_no_view_is_within_its_share(played: Played) -> str:
    """A bucket without a view has one unsettled spend, below the node's share."""
    beyond = played.world.books.cold_beyond_share
    return "more was spent without a view than a share" if beyond else ""


DEMANDS: dict[str, Callable[[Played], str]] = {
    "nothing is left": nothing_is_left,
    "no spend is lost or doubled": no_spend_is_lost_or_doubled,
    "the store has all charges": the_store_has_all_charges,
    "never more than the bound": never_more_than_the_bound,
    "no node allows more than one may": no_node_allows_more_than_one_may,
    "what was spent beside each other is paid back": what_was_spent_beside_each_other_is_paid_back,
    "the excess does not grow": the_excess_does_not_grow,
    "no less than one node alone": no_less_than_one_node_alone,
    "no caller is locked out": no_caller_is_locked_out,
    "an edit locks no caller out": an_edit_locks_no_caller_out,
    "a reset frees": a_reset_frees,
    "what has no view is within its share": what_has_no_view_is_within_its_share,
}
