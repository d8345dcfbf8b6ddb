"""Invariants of holds under any faults."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ratelimitd.ledger.accounts import ACCOUNTS, Account
from ratelimitd.ledger.shared_state import SharedState
from ratelimitd.model import Algorithm, Enforcement, Limit
from tests import ledger_model
from tests.shared_hold_model import HoldStore, Kept
from tests.simulation.holds import CallerHold, Event, Server, World


def violations(world: World) -> list[str]:
    """Return the violated invariants."""
    found = []
    for name, demand in DEMANDS.items():
        problem = demand(world)
        if problem:
            found.append(f"{name}: {problem}")
    return found


CHARGES = {"hold": 1, "take": 0}
"""Index of a hold's number in the events that charge it."""

OF_SLOTS = {"take", "free", "extend", "over", "denied", "withdraw", "lost slots"}
"""Events that change no bucket of tokens."""

# Of buckets


def _lives(events: Sequence[Event]) -> list[list[Event]]:
    """Return the events of a bucket, split by its lives."""
    lives: list[list[Event]] = [[]]
    for event in events:
        if event.kind in {"reset", "lost buckets"}:
            lives.append([])
        else:
            lives[-1].append(event)
    return lives


def _buckets(world: World) -> list[tuple[Limit, list[Event]]]:
    """Return the limit of each bucket of tokens, with the events of each of its lives."""
    found = []
    for place, name in enumerate(world.names):
        limit = world.limits[place]
        if limit.algorithm is not Algorithm.CONCURRENCY:
            events = world.server_of(name).journal.get(name, [])
            found += [(limit, events) for events in _lives(events)]
    return found


def _settled(events: Sequence[Event]) -> dict[int, int]:
    """Return {index of a hold's charge: its settled amount}."""
    places: dict[bytes, int] = {}
    actual: dict[int, int] = {}
    for place, (kind, _, what, _) in enumerate(events):
        if kind == "hold":
            places[what[1]] = place
        elif kind == "settle" and what[1] in places:
            actual[places.pop(what[1])] = what[2]
    return actual


def _replayed(events: Sequence[Event], actual: Mapping[int, int]) -> SharedState | None:
    """Return the bucket after events, as if each settled hold had charged its actual amount at first."""
    shared: SharedState | None = None
    for place, (kind, _, what, _) in enumerate(events):
        if kind in OF_SLOTS:
            continue
        rule, *rest = what
        shared = HoldStore.opened(shared and Kept(shared), rule).shared
        ruling = ledger_model.ruling_of(shared, rule)
        account = ACCOUNTS[rule.algorithm]
        runs: Sequence[tuple[int, int]] = ()
        if kind == "hold":
            _, at_us, cost = rest
            runs = [(at_us, actual.get(place, cost))]
        elif kind == "charge":
            runs = [tuple(rest)]
        elif kind == "late":
            runs = rest[0]
        if runs:
            shared = shared._replace(state=account.charged(shared.state, ruling, runs))
    return shared


def a_refund_never_mints(world: World) -> str:
    """After a settle, at least as much is missing at any time as if the actual tokens had been charged at first."""
    for limit, events in _buckets(world):
        account = ACCOUNTS[limit.algorithm]
        for place, (kind, _, what, shared) in enumerate(events):
            if kind != "settle":
                continue
            rule, until_then = what[0], events[: place + 1]
            made = _replayed(until_then, _settled(until_then))
            if made is None or shared is None or made.generation != shared.generation:
                continue
            ruling = ledger_model.ruling_of(shared, rule)
            problem = _lacks_less(account, ruling, shared.state, made.state)
            if problem:
                return f"{limit}: {problem} after {until_then}"
    return ""


def _lacks_less(account: Account, rule: Limit, state: Any, least: Any) -> str:
    latest_us, _ = account.standing(state)
    for part in range(9):
        at_us = latest_us + part * rule.window_us // 4
        if account.used(state, rule, at_us) < account.used(least, rule, at_us):
            return f"{state!r} lacks less than {least!r}"
    if rule.algorithm is not Algorithm.TOKEN_BUCKET or None in {state, least}:
        return ""
    is_less = state[1] == least[1] and state[0] < least[0]
    return f"{state} lacks less than {least}" if is_less else ""


def no_more_is_spent_than_the_limit_and_what_is_owed(world: World) -> str:
    """The used tokens in a bucket never exceed its capacity plus the debt beyond holds."""
    for place, name in enumerate(world.names):
        limit = world.limits[place]
        if limit.algorithm is Algorithm.CONCURRENCY or place in world.edited:
            continue
        for events in _lives(world.server_of(name).journal.get(name, [])):
            problem = _overspent(limit, events)
            if problem:
                return problem
    return ""


def _overspent(limit: Limit, events: Sequence[Event]) -> str:
    actual = _settled(events)
    allowance, account = limit.capacity, ACCOUNTS[limit.algorithm]
    for place, (kind, _, what, _) in enumerate(events):
        if kind == "hold":
            allowance += max(0, actual.get(place, what[3]) - what[3])
        elif kind == "late":
            allowance += sum(tokens for _, tokens in what[1])
        if kind in {"hold", "charge"}:
            shared = _replayed(events[: place + 1], actual)
            latest_us, _ = account.standing(shared and shared.state)
            used = account.used(shared and shared.state, limit, latest_us)
            if used > allowance:
                return f"{limit}: {used} are used, {allowance} may be"
    return ""


def a_hold_counts_once_in_each_bucket(world: World) -> str:
    """A bucket is charged for a hold once, and gives it back once, at most what was held."""
    was_lost = any(server.losses for server in world.servers)
    for limit, events in _buckets(world):
        open_holds: dict[bytes, int] = {}
        for kind, _, what, _ in events:
            if kind == "hold":
                _, number, _, cost = what
                if number in open_holds and not was_lost:
                    return f"{limit}: {number!r} is charged twice"
                open_holds[number] = cost
            elif kind == "settle":
                _, number, tokens, change = what
                if change < 0 and number not in open_holds:
                    return f"{limit}: {number!r} was settled without being held"
                held = open_holds.pop(number, tokens - max(0, change))
                if not min(0, tokens - held) <= change <= max(0, tokens - held):
                    return f"{limit}: {change} for {tokens} of {held}"
    return ""


# Of slots


def no_more_slots_than_there_are(world: World) -> str:
    """Slots of holds in flight never exceed the limit, and no hold is denied wrongly."""
    for place, name in enumerate(world.names):
        if world.limits[place].algorithm is Algorithm.CONCURRENCY:
            live: dict[bytes, tuple[int, int]] = {}
            for event in world.server_of(name).journal.get(name, []):
                problem = _slots_after(live, event)
                if problem:
                    return problem
    return ""


def _slots_after(live: dict[bytes, tuple[int, int]], event: Event) -> str:
    """Track the slots of a bucket: the end of each hold's slot, and its latest possible end."""
    kind, now_us, what, _ = event
    used = sum(end_us > now_us for end_us, _ in live.values())
    if kind == "denied" and used < what[0]:
        return f"a slot is denied, {used} of {what[0]} are in use"
    if kind in {"reset", "lost slots"}:
        live.clear()
    elif kind == "take":
        number, end_us, rule = what
        live[number] = end_us, now_us + rule.window_us
        if used >= rule.limit:
            return f"one more than {used} slots of {rule.limit} is in use"
    elif kind == "extend" and what[0] not in live:
        return f"{what[0]!r} has a slot again"
    elif kind in {"free", "extend", "over"} and what[0] in live:
        end_us, last_us = live.pop(what[0])
        if kind == "over" and end_us > now_us:
            return f"the slot of {what[0]!r} is freed too early"
        if kind == "extend":
            live[what[0]] = max(end_us, what[1]), last_us
    problem = [number for number, (end_us, last_us) in live.items() if end_us > last_us]
    return f"{problem} have a slot for longer than a window" if problem else ""


def in_the_end_nothing_is_held(world: World) -> str:
    """After the longest life of a hold, no slot is taken and no record is left."""
    for server in world.servers:
        for name in world.names:
            if server.slots_of(name):
                return f"{len(server.slots_of(name))} slots of {name!r} are in use"
        for number in [*server.records]:
            if server.record(number) is not None:
                return f"{number!r} is remembered"
    return ""


# Of callers


def _is_lost(server: Server, hold: CallerHold) -> bool:
    return any(at_us >= hold.begun_us for at_us in server.losses)


def a_reported_hold_is_charged(world: World) -> str:
    """Each bucket of a reported hold was charged for it, and has it until it is settled or ends."""
    for hold in world.caller_holds:
        if not hold.allowed_us:
            continue
        for name in hold.names:
            server = world.server_of(name)
            if _is_lost(server, hold):
                continue
            is_held = False
            for kind, _, what, _ in server.journal.get(name, []):
                if kind in CHARGES and what[CHARGES[kind]] == hold.number:
                    is_held = True
                elif kind == "withdraw" and what[0] == hold.number:
                    is_held = False
            if not is_held:
                return f"{hold} is not charged to {name!r}"
    return ""


def one_settle_counts(world: World) -> str:
    """No hold is reported as settled with two amounts, unless one settle was lost."""
    for hold in world.caller_holds:
        servers = {world.server_of(name) for name in hold.names}
        if len(hold.settled) > 1 and not any(_is_lost(server, hold) for server in servers):
            return f"{hold} was settled twice"
    return ""


def a_hold_is_known(world: World) -> str:
    """No hold is reported as unknown before its end, unless it was lost."""
    for hold in world.caller_holds:
        servers = {world.server_of(name) for name in hold.names}
        if hold.unknown and not any(_is_lost(server, hold) for server in servers):
            return f"{hold} was not known"
    return ""


def where_nothing_fails_a_denied_hold_changes_nothing(world: World) -> str:
    """Buckets contain only holds that were reported as made."""
    if not world.scenario.is_calm:
        return ""
    allowed = {hold.number for hold in world.caller_holds if hold.allowed_us}
    for server in world.servers:
        for name, events in server.journal.items():
            held: set[bytes] = set()
            for kind, _, what, _ in events:
                if kind in CHARGES:
                    held.add(what[CHARGES[kind]])
                elif kind == "free":
                    held.discard(what[0])
                elif kind == "settle":
                    held.discard(what[1])
            if held - allowed:
                return f"{name!r} holds {held - allowed} for nobody"
    return ""


def an_enforced_limit_denies(world: World) -> str:
    """A hold that was made passed all enforced limits."""
    for hold in world.caller_holds:
        if hold.allowed_us:
            enforced = {
                world.names[place]
                for place, limit in hold.charges
                if limit.enforcement is Enforcement.ENFORCE
            }
            if not enforced <= set(hold.names):
                return f"{hold} is made without {enforced - set(hold.names)}"
    return ""


DEMANDS: Mapping[str, Callable[[World], str]] = {
    "a refund never mints": a_refund_never_mints,
    "no more is spent than the limit and what is owed": no_more_is_spent_than_the_limit_and_what_is_owed,
    "a hold counts once in each bucket": a_hold_counts_once_in_each_bucket,
    "no more slots than there are": no_more_slots_than_there_are,
    "in the end nothing is held": in_the_end_nothing_is_held,
    "a reported hold is charged": a_reported_hold_is_charged,
    "one settle counts": one_settle_counts,
    "a hold is known": a_hold_is_known,
    "where nothing fails a denied hold changes nothing": where_nothing_fails_a_denied_hold_changes_nothing,
    "an enforced limit denies": an_enforced_limit_denies,
}


def seen(world: World) -> dict[str, Any]:
    """Return the events that have occurred."""
    events = [event for server in world.servers for of in server.journal.values() for event in of]
    return {
        "given back": any(event.kind == "settle" and event.what[3] < 0 for event in events),
        "owed": any(event.kind == "settle" and event.what[3] > 0 for event in events),
        "slots": any(event.kind == "take" for event in events),
        "freed": any(event.kind == "free" for event in events),
        "extended": any(event.kind == "extend" for event in events),
        "denied": any(hold.denied for hold in world.caller_holds),
        "settled": any(hold.settled for hold in world.caller_holds),
        "reset": any(event.kind == "reset" for event in events),
        "lost": any(server.losses for server in world.servers),
        "in parts": any(
            len({world.server_of(name) for name in hold.names}) > 1 for hold in world.caller_holds
        ),
        "edited": bool(world.edited),
    }
