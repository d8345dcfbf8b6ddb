import pytest

from ratelimitd.errors import SettingsError, StoreUnavailableError
from ratelimitd.rules.sql.database import open_database
from ratelimitd.rules.sql.inspection import Contents, inspect
from ratelimitd.rules.sql.migrations import upgrade
from ratelimitd.rules.sql.postgresql import PostgresqlDatabase
from ratelimitd.rules.sql.sqlite import SqliteDatabase
from ratelimitd.rules.store import RuleDraft
from tests.rule_stores import store_at


@pytest.mark.parametrize(
    ("url", "kind", "place"),
    [
        ("sqlite:///rules.db", SqliteDatabase, "rules.db"),
        ("postgresql://user:pw@127.0.0.1:5/rules", PostgresqlDatabase, "127.0.0.1:5/rules"),
    ],
)
async def test_url_opens_its_kind_of_database_without_connecting(url, kind, place):
    database = open_database(url)
    assert isinstance(database, kind)
    assert database.place == place
    await database.aclose()


def test_unknown_url_scheme_is_refused_without_repeating_the_url():
    with pytest.raises(SettingsError, match=r"^DATABASE_URL must be") as caught:
        open_database("mysql://user:secret@host/rules")
    assert "secret" not in str(caught.value)


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path):
    if request.param == "postgresql":
        return request.getfixturevalue("postgresql_url")
    return f"sqlite:///{tmp_path}/rules.db"


async def test_inspection_counts_rules_and_changes_nothing(url):
    await upgrade(url)
    assert await inspect(url) == Contents(rules=0, revision=0, types=[])
    async with store_at(url) as store:
        for endpoint in ("/a", "/b"):
            rule = await store.create(RuleDraft(endpoint, "user", 1, 60, "token_bucket"), "test")
        await store.delete(rule.id, "", "test")
        secret = await store.secret("kept")
        assert await inspect(url) == Contents(rules=1, revision=3, types=["user"])
        assert await store.revision() == 3
        assert await store.secret("kept") == secret
        assert len((await store.changes_since(None)).changed) == 1


async def test_inspection_of_an_unusable_database_raises(tmp_path):
    with pytest.raises(StoreUnavailableError):
        await inspect(f"sqlite:///{tmp_path}/none/rules.db")
