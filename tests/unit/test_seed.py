import pytest

from ratelimitd.clock import SystemClock
from ratelimitd.errors import RuleExistsError, StartupError
from ratelimitd.rules import migrations
from ratelimitd.rules.sql import SqlRuleStore
from ratelimitd.seed import ACTOR, seed_new_book

RULES = """
rules:
  - {endpoint: /a, identifier_type: user, limit: 1, window_seconds: 60, algorithm: token_bucket}
  - {endpoint: /b, identifier_type: user, limit: 2, window_seconds: 60, algorithm: fixed_window}
"""


@pytest.fixture
async def store(tmp_path):
    url = f"sqlite:///{tmp_path / 'rules.db'}"
    await migrations.upgrade(url)
    store = SqlRuleStore(url, clock=SystemClock())
    yield store
    await store.close()


@pytest.fixture
def rules_file(tmp_path):
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    return path


async def endpoints(store):
    return [rule.endpoint for rule in await store.page("", "", None, 10)]


async def test_a_new_book_is_filled(store, rules_file):
    assert await seed_new_book(store, rules_file) == 2
    assert await endpoints(store) == ["/a", "/b"]


async def test_a_filled_book_is_never_touched_and_the_file_not_even_read(
    store, rules_file, tmp_path
):
    await seed_new_book(store, rules_file)
    for rule in await store.page("/a", "", None, 1):
        await store.delete(rule.id, "", "test")
    assert await seed_new_book(store, rules_file) == 0
    assert await seed_new_book(store, tmp_path / "absent.yaml") == 0
    assert await endpoints(store) == ["/b"]


async def test_a_book_that_was_emptied_on_purpose_stays_empty(store, rules_file):
    await seed_new_book(store, rules_file)
    for rule in await store.page("", "", None, 10):
        await store.delete(rule.id, "", "test")
    assert await seed_new_book(store, rules_file) == 0
    assert await endpoints(store) == []


async def test_rules_that_moved_no_revision_count_as_well(store, rules_file):
    await seed_new_book(store, rules_file)

    class BehindTheBack:
        async def revision(self):
            return 0

        page = staticmethod(store.page)

    assert await seed_new_book(BehindTheBack(), rules_file) == 0


async def test_a_rule_that_another_node_seeds_meanwhile_is_not_counted(store, rules_file):
    class Racing:
        async def revision(self):
            return 0

        async def page(self, *_):
            return []

        async def create(self, draft, actor):
            assert actor == ACTOR
            if draft.endpoint == "/a":
                raise RuleExistsError
            return await store.create(draft, actor)

    assert await seed_new_book(Racing(), rules_file) == 1


async def test_a_wrong_rule_is_named_by_file_index_and_field_and_nothing_is_written(
    store, rules_file
):
    rules_file.write_text(RULES.replace("limit: 2", "limit: 0"))
    with pytest.raises(StartupError, match=r"RULES_FILE .*rules\.yaml: rules\[1\]\.limit: "):
        await seed_new_book(store, rules_file)
    assert await endpoints(store) == []


async def test_a_file_that_cannot_be_read_is_named_with_the_reason(store, tmp_path):
    with pytest.raises(StartupError, match=r"RULES_FILE .*absent\.yaml cannot be read: No such"):
        await seed_new_book(store, tmp_path / "absent.yaml")
