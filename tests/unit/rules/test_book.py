from dataclasses import replace

import pytest

from ratelimitd.model import Algorithm, IdentifierType, Plan, Rule
from ratelimitd.rules.book import RULES_PER_STEP, SHARDS, BookEditor, RuleBook
from tests.rule_stores import successor

USER, IP = IdentifierType.USER, IdentifierType.IP


def rule(rule_id, endpoint="/orders", identifier_type=USER, *, enabled=True, limit=10):
    return Rule(
        rule_id,
        endpoint,
        identifier_type,
        limit=limit,
        window_seconds=60,
        algorithm=Algorithm.TOKEN_BUCKET,
        enabled=enabled,
    )


def matched(book, endpoint, identifier_type=USER):
    """Return the id of the deciding rule."""
    found = book.match(endpoint, identifier_type)
    return None if found is None else found.id


def limit_of(book, rule_id):
    return next(found.limit for found in book.rules() if found.id == rule_id)


def test_rule_of_the_endpoint_precedes_the_global_one():
    own, everywhere = rule("a"), rule("b", "*")
    book = RuleBook.of([everywhere, own], 1)
    assert book.match("/orders", USER) is own
    assert book.match("/other", USER) is everywhere


def test_global_rule_replaces_a_disabled_rule():
    book = RuleBook.of([rule("a", enabled=False), rule("b", "*")], 1)
    assert matched(book, "/orders") == "b"


def test_nothing_matches_without_an_enabled_rule():
    assert RuleBook.empty().match("/orders", USER) is None
    book = RuleBook.of([rule("a", enabled=False), rule("b", "*", enabled=False)], 1)
    assert book.match("/orders", USER) is None


def test_rule_applies_to_its_own_identifier_type_only():
    book = RuleBook.of([rule("a"), rule("b", "*")], 1)
    assert book.match("/orders", IP) is None


def test_endpoints_are_compared_byte_for_byte():
    book = RuleBook.of([rule("a", "/orders")], 1)
    for near in ("/Orders", "/orders/", "/orders?", "/orde%72s", " /orders"):
        assert book.match(near, USER) is None


def test_candidates_are_listed_by_precedence_including_disabled_ones():
    own, everywhere = rule("a", enabled=False), rule("b", "*", enabled=False)
    book = RuleBook.of([everywhere, own], 1)
    assert book.candidates("/orders", USER) == (own, everywhere)
    assert book.candidates("/other", USER) == (everywhere,)
    assert book.candidates("/other", IP) == ()


def test_global_rule_is_its_own_only_candidate():
    everywhere = rule("b", "*")
    assert RuleBook.of([everywhere], 1).candidates("*", USER) == (everywhere,)


def test_rules_are_found_by_id_and_listed():
    first, second = rule("a"), rule("b", "/carts")
    book = RuleBook.of([first, second], 7)
    assert book.get("a") is first
    assert book.get("c") is None
    assert {found.id for found in book.rules()} == {"a", "b"}
    assert (len(book), book.revision) == (2, 7)


def test_change_leaves_the_original_book_unchanged():
    before = RuleBook.of([rule("a"), rule("b", "/carts")], 1)
    after = successor(before, [rule("a", limit=99)], ["b"], 2)
    assert (limit_of(before, "a"), len(before), before.revision) == (10, 2, 1)
    assert (limit_of(after, "a"), len(after), after.revision) == (99, 1, 2)
    assert before.match("/carts", USER) is not None
    assert after.match("/carts", USER) is None


def test_rule_that_moves_leaves_its_old_endpoint():
    before = RuleBook.of([rule("a", "/old")], 1)
    after = successor(before, [rule("a", "/new")], [], 2)
    assert after.match("/old", USER) is None
    assert matched(after, "/new") == "a"


def test_two_rules_may_swap_endpoints_in_one_change():
    before = RuleBook.of([rule("a", "/1"), rule("b", "/2")], 1)
    after = successor(before, [rule("a", "/2"), rule("b", "/1")], [], 2)
    assert matched(after, "/1") == "b"
    assert matched(after, "/2") == "a"
    assert len(after) == 2


def test_later_of_two_rules_with_one_pair_replaces_the_earlier():
    book = RuleBook.of([rule("a"), rule("b")], 1)
    assert matched(book, "/orders") == "b"
    assert book.get("a") is None
    assert len(book) == 1


def test_later_of_two_rules_with_one_id_wins():
    book = RuleBook.of([rule("a", "/1"), rule("a", "/2")], 1)
    assert book.match("/1", USER) is None
    assert len(book) == 1


def test_rule_removed_and_recreated_in_one_change_stays():
    before = RuleBook.of([rule("a")], 1)
    after = successor(before, [rule("a", limit=5)], ["a"], 2)
    assert limit_of(after, "a") == 5


def test_removing_an_unknown_id_changes_nothing():
    before = RuleBook.of([rule("a")], 1)
    after = successor(before, [], ["nobody"], 2)
    assert list(after.rules()) == list(before.rules())
    assert list(map(id, after.parts())) == list(map(id, before.parts()))


def test_change_copies_only_the_shards_it_touches():
    before = RuleBook.of([rule(str(n), f"/{n}") for n in range(2_000)], 1)
    after = successor(before, [rule("77", "/77", limit=99)], [], 2)
    old, new = list(before.parts()), list(after.parts())
    assert len(old) == 2 * SHARDS
    assert sum(a is not b for a, b in zip(old, new, strict=True)) == 2


def test_editor_never_writes_to_its_original_book():
    before = RuleBook.of([rule(str(n), f"/{n}") for n in range(300)], 1)
    editor = BookEditor(before)
    for n in range(300):
        editor.remove(str(n))
    assert len(before) == 300
    assert len(list(before.rules())) == 300
    assert len(editor.finish(2)) == 0


def test_many_changes_are_applied_in_steps():
    before = RuleBook.of([rule(str(n), f"/{n}") for n in range(RULES_PER_STEP)], 1)
    editor = BookEditor(before)
    changed = [rule(str(n), f"/new/{n}") for n in range(RULES_PER_STEP + 1)]
    steps = [len(editor.finish(2)) for _ in editor.apply(changed, ["0"])]
    assert len(steps) == 2
    assert len(editor.finish(2)) == len(changed)


@pytest.mark.parametrize("endpoint", ["/", "*", "é" * 255, "/a b"])
def test_any_text_can_be_the_endpoint_of_a_rule(endpoint):
    assert matched(RuleBook.of([rule("a", endpoint)], 1), endpoint) == "a"


def test_book_lists_the_plans_that_rules_name():
    pro, free = (Plan(name, (rule("a"),)) for name in ("pro", "free"))
    named = [replace(rule("a"), plans=(free, pro)), replace(rule("b", "/b"), plans=(pro,))]
    book = RuleBook.of(named, 1)
    assert {*book.plans} == {"free", "pro"}
    editor = BookEditor(book)
    editor.remove("a")
    assert {*editor.finish(2).plans} == {"pro"}
    assert {*book.plans} == {"free", "pro"}
