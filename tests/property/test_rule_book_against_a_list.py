"""The sharded rule book against a plain list of rules, through any sequence of changes."""

from hypothesis import given
from hypothesis import strategies as st

from ratelimitd.model import GLOBAL_ENDPOINT, Algorithm, IdentifierType, Rule
from ratelimitd.rules.book import RuleBook
from tests.rule_stores import successor

IDS = [f"id-{n}" for n in range(6)]
ENDPOINTS = ["/a", "/b", "/c", GLOBAL_ENDPOINT]

rules = st.builds(
    Rule,
    id=st.sampled_from(IDS),
    endpoint=st.sampled_from(ENDPOINTS),
    identifier_type=st.sampled_from([IdentifierType.USER, IdentifierType.IP]),
    limit=st.integers(1, 9),
    window_seconds=st.just(60),
    algorithm=st.sampled_from(Algorithm),
    enabled=st.booleans(),
)
changes = st.tuples(st.lists(rules, max_size=4), st.lists(st.sampled_from(IDS), max_size=3))


def changed_model(model, changed, removed_ids):
    """Apply the same change to a list: removals first, then all changed rules leave their old places for new ones."""
    gone = {*removed_ids, *(rule.id for rule in changed)}
    model = [rule for rule in model if rule.id not in gone]
    for new in changed:
        model = [rule for rule in model if rule.id != new.id and pair(rule) != pair(new)]
        model.append(new)
    return model


def pair(rule):
    return rule.endpoint, rule.identifier_type


def expected_match(model, endpoint, identifier_type):
    for name in (endpoint, GLOBAL_ENDPOINT):
        for rule in model:
            if pair(rule) == (name, identifier_type) and rule.enabled:
                return rule
    return None


def assert_same(book, model):
    assert len(book) == len(model)
    assert sorted(book.rules(), key=lambda rule: rule.id) == sorted(model, key=lambda rule: rule.id)
    for rule_id in IDS:
        assert book.get(rule_id) == next((rule for rule in model if rule.id == rule_id), None)
    for endpoint in [*ENDPOINTS, "/unknown"]:
        for identifier_type in IdentifierType:
            found = book.match(endpoint, identifier_type)
            assert found == expected_match(model, endpoint, identifier_type)


@given(st.lists(changes, max_size=8))
def test_any_sequence_of_changes_gives_the_same_book_as_a_plain_list(sequence):
    book = RuleBook.empty()
    model: list[Rule] = []
    history = []
    for revision, (changed, removed_ids) in enumerate(sequence, 1):
        book = successor(book, changed, removed_ids, revision)
        model = changed_model(model, changed, removed_ids)
        history.append((book, model, revision))
    for old_book, old_model, revision in history:  # no change affected older books
        assert old_book.revision == revision
        assert_same(old_book, old_model)


@given(st.lists(rules, max_size=12))
def test_a_book_made_at_once_equals_one_made_in_steps(given_rules):
    at_once, step_by_step = RuleBook.of(given_rules, 1), RuleBook.empty()
    for rule in given_rules:
        step_by_step = successor(step_by_step, [rule], [], 1)
    assert_same(at_once, list(step_by_step.rules()))
