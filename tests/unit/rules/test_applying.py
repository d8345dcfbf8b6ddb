"""Applying a whole set of rules: the change of each rule, and which sets are refused."""

import dataclasses
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimitd.errors import RuleBookConflictError, RuleInvalidError
from ratelimitd.rules.applying import MAX_NAMED, BookDiff
from ratelimitd.rules.store import RuleDraft
from ratelimitd.rules.validation import RuleRow, etag_of

TYPES = ("user", "ip")


def rule_id(number):
    return str(uuid.UUID(int=number))


def stored(number, endpoint, identifier_type="user", *, limit=10, enabled=True, revision=7):
    return RuleRow(
        rule_id(number), endpoint, identifier_type, limit, 60, "token_bucket", enabled, revision
    )


def wanted(endpoint, number=None, **fields):
    given = {"identifier_type": "user", "limit": 10, "window_seconds": 60, **fields}
    given.setdefault("id", "" if number is None else rule_id(number))
    return RuleDraft(endpoint=endpoint, algorithm="token_bucket", **given)


def diff_of(drafts, rows=(), *, prune=False, new_id=str):
    diff = BookDiff(TYPES, prune=prune, new_id=new_id)
    for draft in drafts:
        diff.want(draft)
    diff.refuse()
    for row in rows:
        diff.see(row)
    changes = [*diff.changes(8)]
    diff.refuse()
    return changes


def actions(drafts, rows=(), **options):
    """Return the change of each rule, with its endpoint."""
    return [
        (change.action, (change.before or change.after).endpoint)
        for change in diff_of(drafts, rows, **options)
    ]


def refusals(drafts, rows=(), **options):
    with pytest.raises(RuleInvalidError) as refused:
        diff_of(drafts, rows, **options)
    return [violation.field for violation in refused.value.violations]


def test_nothing_changes_when_all_rules_are_as_wanted():
    rows = [stored(1, "/a"), stored(2, "/b")]
    changes = diff_of([wanted("/b"), wanted("/a", 1)], rows, prune=True)
    assert [(change.action, change.before, change.after) for change in changes] == [
        ("", rows[1], rows[1]),
        ("", rows[0], rows[0]),
    ]


def test_missing_rules_are_created_in_order_with_their_ids_or_new_ones():
    changes = diff_of([wanted("/b"), wanted("/a", 7)], new_id=lambda: rule_id(9))
    assert [(one.action, one.after.endpoint, one.rule_id) for one in changes] == [
        ("create", "/b", rule_id(9)),
        ("create", "/a", rule_id(7)),
    ]
    assert {one.after.revision for one in changes} == {8}


def test_rule_is_matched_by_endpoint_and_type_and_keeps_its_id():
    row = stored(1, "/a", limit=5, enabled=False)
    [change] = diff_of([wanted("/a", limit=6)], [row])
    assert change == (row, row._replace(limit=6, enabled=True, revision=8))


def test_rule_of_another_type_is_another_rule():
    assert actions([wanted("/a")], [stored(1, "/a", "ip")]) == [("create", "/a")]


def test_rule_with_an_id_may_move():
    row = stored(1, "/a")
    assert diff_of([wanted("/b", 1)], [row], prune=True) == [
        (row, row._replace(endpoint="/b", revision=8))
    ]


def test_rule_without_an_id_takes_the_place_of_a_moved_rule():
    assert actions([wanted("/b", 1), wanted("/a")], [stored(1, "/a")]) == [
        ("update", "/a"),
        ("create", "/a"),
    ]


def test_rules_may_swap_places():
    rows = [stored(1, "/a"), stored(2, "/b")]
    changes = diff_of([wanted("/b", 1), wanted("/a", 2)], rows)
    assert [change.after.endpoint for change in changes] == ["/b", "/a"]


def test_unwanted_rules_stay_unless_pruned():
    rows = [stored(1, "/a"), stored(2, "/b")]
    assert actions([wanted("/a")], rows) == [("", "/a")]
    assert actions([wanted("/a")], rows, prune=True) == [("", "/a"), ("delete", "/b")]
    assert actions([], rows, prune=True) == [("delete", "/a"), ("delete", "/b")]


def test_without_prune_a_rule_in_a_wanted_place_is_refused():
    rows = [stored(1, "/a"), stored(2, "/b"), stored(3, "/z")]
    drafts = [wanted("/a", 9), wanted("/b", 3)]
    assert refusals(drafts, rows) == ["rate_limits[0].id", "rate_limits[1].id"]
    assert actions(drafts, rows, prune=True) == [
        ("create", "/a"),
        ("update", "/z"),
        ("delete", "/a"),
        ("delete", "/b"),
    ]


def test_two_rules_with_one_id_or_place_are_refused():
    assert refusals([wanted("/a", 1), wanted("/b", 1), wanted("/a")]) == [
        "rate_limits[1].id",
        "rate_limits[2].endpoint",
    ]
    assert refusals([wanted("/a", id=rule_id(1)), wanted("/b", id=rule_id(1).upper())]) == [
        "rate_limits[1].id"
    ]


def test_violations_are_named_up_to_fifteen_and_then_counted():
    drafts = [wanted("/a"), wanted("", limit=0), wanted("/b", id="no", window_seconds=-1)]
    named = ["[1].endpoint", "[1].limit", "[2].id", "[2].window_seconds"]
    assert refusals(drafts) == [f"rate_limits{place}" for place in named]
    assert refusals([wanted(f"/{n}", limit=0) for n in range(MAX_NAMED)])[-1] == (
        f"rate_limits[{MAX_NAMED - 1}].limit"
    )
    with pytest.raises(RuleInvalidError) as refused:
        diff_of([wanted(f"/{n}", limit=0) for n in range(MAX_NAMED + 3)])
    assert refused.value.violations[MAX_NAMED:] == (("rate_limits", "3 more fields are wrong"),)


def test_undeclared_type_is_refused_unless_the_stored_rule_has_it():
    row = stored(1, "/a", "tenant")
    assert refusals([wanted("/b", identifier_type="tenant")], [row]) == [
        "rate_limits[0].identifier_type"
    ]
    assert actions([wanted("/a", identifier_type="tenant", limit=9)], [row]) == [("update", "/a")]


def test_undeclared_types_are_named_with_the_other_violations():
    drafts = [wanted("/a", identifier_type="tenant", limit=0), wanted("/b", identifier_type="org")]
    assert sorted(refusals([*drafts, wanted("/c", identifier_type="O")])) == [
        "rate_limits[0].identifier_type",
        "rate_limits[0].limit",
        "rate_limits[1].identifier_type",
        "rate_limits[2].identifier_type",
    ]
    assert refusals([wanted("/b", identifier_type="org")], [stored(1, "/b")]) == [
        "rate_limits[0].identifier_type"
    ]


def test_given_etag_must_match_the_rule():
    row = stored(1, "/a")
    assert actions([wanted("/a", etag=etag_of(row))], [row]) == [("", "/a")]
    for draft in (wanted("/a", etag="stale"), wanted("/new", etag=etag_of(row))):
        with pytest.raises(RuleBookConflictError, match=r"rate_limits\[0\]\.etag"):
            diff_of([draft], [row])


def test_invalid_row_is_repaired_or_pruned_and_one_without_an_id_is_ignored():
    bad = stored(1, "/a", limit="many")
    assert actions([wanted("/a")], [bad]) == [("update", "/a")]
    assert actions([], [bad, bad._replace(id="none"), bad._replace(id=b"\xff")], prune=True) == [
        ("delete", "/a")
    ]


books = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 3), max_size=6)


places = st.tuples(st.permutations(range(6)), st.lists(st.booleans(), min_size=6))


@given(books, books, st.booleans(), places)
def test_apply_leaves_one_rule_per_place_and_is_idempotent(before, after, prune, ids_of_wanted):
    rows = [
        stored(number, endpoint, limit=before[endpoint]) for number, endpoint in enumerate(before)
    ]
    drafts = [
        wanted(endpoint, number if given else None, limit=after[endpoint])
        for endpoint, number, given in zip(after, *ids_of_wanted, strict=False)
    ]
    ids = iter(range(100, 200))
    try:
        changes = diff_of(drafts, rows, prune=prune, new_id=lambda: rule_id(next(ids)))
    except RuleInvalidError:
        assert not prune
        return
    book = {row.id: row for row in rows}
    for change in changes:
        book.pop(change.rule_id, None)
    book |= {change.rule_id: change.after for change in changes if change.after}
    limits = {row.endpoint: row.limit for row in book.values()}
    assert len(limits) == len(book)
    assert after.items() <= limits.items()
    assert not prune or limits == after
    for again in (drafts, [dataclasses.replace(draft, id="") for draft in drafts]):
        assert {one.action for one in diff_of(again, book.values(), prune=prune)} <= {""}
