"""Plans: which steps lead from the rules that are to those that are wanted, and that carrying them out does."""

import dataclasses
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd.cli.apply import Create, Delete, Update, draft_of, make_plan
from ratelimitd.errors import RuleInvalidError
from ratelimitd.rules.store import RuleDraft
from ratelimiter.v1 import ratelimiter_pb2 as pb


def rule_id(number):
    return str(uuid.UUID(int=number))


def stored(number, endpoint, identifier_type="user", *, limit=10, enabled=True):
    return pb.RateLimit(
        id=rule_id(number),
        endpoint=endpoint,
        identifier_type=identifier_type,
        limit=limit,
        window_seconds=60,
        algorithm="token_bucket",
        enabled=enabled,
        etag=f"etag-{number}",
    )


def wanted(endpoint, number=None, *, limit=10, enabled=True):
    return RuleDraft(
        id="" if number is None else rule_id(number),
        endpoint=endpoint,
        identifier_type="user",
        limit=limit,
        window_seconds=60,
        algorithm="token_bucket",
        enabled=enabled,
    )


def steps(drafts, rules, *, prune=False):
    """A plan in short: what each step does, and to which endpoint."""
    names = {Create: "create", Update: "update", Delete: "delete"}
    return [
        (names[type(step)], (step.draft if isinstance(step, Create) else step.current).endpoint)
        for step in make_plan(drafts, rules, prune=prune)
    ]


def refusals(drafts, rules, *, prune=False):
    with pytest.raises(RuleInvalidError) as refused:
        make_plan(drafts, rules, prune=prune)
    return [violation.field for violation in refused.value.violations]


def test_nothing_is_planned_when_everything_is_as_wanted():
    rules = [stored(1, "/a"), stored(2, "/b")]
    assert make_plan([wanted("/b"), wanted("/a", 1)], rules, prune=True) == ()


def test_what_is_missing_is_created_in_the_order_of_the_file():
    assert steps([wanted("/b"), wanted("/a", 7)], []) == [("create", "/b"), ("create", "/a")]


def test_a_rule_is_found_by_its_endpoint_and_type_and_only_what_differs_is_changed():
    rule = stored(1, "/a", limit=5, enabled=False)
    draft = wanted("/a", limit=6)
    assert make_plan([draft], [rule], prune=False) == (Update(rule, draft, ("limit", "enabled")),)


def test_a_rule_of_another_type_is_another_rule():
    assert steps([wanted("/a")], [stored(1, "/a", "ip")]) == [("create", "/a")]


def test_a_rule_with_an_id_may_move():
    rule = stored(1, "/a")
    draft = wanted("/b", 1)
    assert make_plan([draft], [rule], prune=True) == (Update(rule, draft, ("endpoint",)),)


def test_a_rule_without_an_id_takes_the_place_of_one_that_moved_away():
    assert steps([wanted("/b", 1), wanted("/a")], [stored(1, "/a")]) == [
        ("update", "/a"),
        ("create", "/a"),
    ]


def test_rules_that_nobody_wants_stay_unless_they_are_pruned():
    rules = [stored(1, "/a"), stored(2, "/b")]
    assert steps([wanted("/a")], rules) == []
    assert steps([wanted("/a")], rules, prune=True) == [("delete", "/b")]


def test_deletions_come_last_unless_they_are_in_the_way():
    rules = [stored(1, "/a"), stored(2, "/b"), stored(3, "/c")]
    drafts = [wanted("/a", 9), wanted("/b", 3), wanted("/new")]
    rules.append(stored(4, "/d"))
    assert steps(drafts, rules, prune=True) == [
        ("delete", "/a"),
        ("delete", "/b"),
        ("update", "/c"),
        ("create", "/a"),
        ("create", "/new"),
        ("delete", "/d"),
    ]


def test_without_prune_a_rule_that_would_have_to_go_is_named():
    rules = [stored(1, "/a"), stored(2, "/b"), stored(3, "/c")]
    drafts = [wanted("/c"), wanted("/a", 9), wanted("/b", 3)]
    assert refusals(drafts[1:], [*rules[:2], stored(3, "/z")]) == ["rules[0].id", "rules[1].id"]
    assert refusals([wanted("/new"), wanted("/a", 9)], rules) == ["rules[1].id"]


def test_moves_are_made_in_an_order_in_which_each_finds_its_place_free():
    rules = [stored(1, "/a"), stored(2, "/b"), stored(3, "/c")]
    drafts = [wanted("/b", 1), wanted("/c", 2), wanted("/d", 3)]
    assert steps(drafts, rules) == [("update", "/c"), ("update", "/b"), ("update", "/a")]


def test_rules_that_swap_places_are_refused_by_their_index():
    rules = [stored(1, "/a"), stored(2, "/b"), stored(3, "/c")]
    drafts = [wanted("/c", 3, limit=1), wanted("/b", 1), wanted("/a", 2)]
    assert refusals(drafts, rules) == ["rules[1]", "rules[2]"]


def test_a_stored_rule_that_does_not_say_so_is_enabled():
    rule = stored(1, "/a")
    rule.ClearField("enabled")
    assert draft_of(rule).enabled
    assert make_plan([wanted("/a")], [rule], prune=False) == ()


books = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 3), max_size=6)


@given(books, books, st.booleans(), st.lists(st.booleans(), min_size=6, max_size=6))
def test_a_plan_never_gives_two_rules_one_place_and_ends_where_it_should(
    before, after, prune, with_id
):
    rules = [
        stored(number, endpoint, limit=before[endpoint]) for number, endpoint in enumerate(before)
    ]
    drafts = [
        wanted(endpoint, number if with_id[number] else None, limit=limit)
        for number, (endpoint, limit) in enumerate(after.items())
    ]
    try:
        plan = make_plan(drafts, rules, prune=prune)
    except RuleInvalidError:
        return
    book = {rule.id: draft_of(rule) for rule in rules}
    for step in plan:
        if isinstance(step, Delete):
            del book[step.current.id]
        else:
            key = step.current.id if isinstance(step, Update) else f"new {step.draft.endpoint}"
            book[key] = step.draft
        assert len({draft.endpoint for draft in book.values()}) == len(book)
    limits = {draft.endpoint: draft.limit for draft in book.values()}
    assert after.items() <= limits.items()
    assert not prune or limits == after
    again = [dataclasses.replace(draft, id="") for draft in drafts]
    now = [
        stored(number, endpoint, limit=limit)
        for number, (endpoint, limit) in enumerate(limits.items())
    ]
    assert make_plan(again, now, prune=prune) == ()
