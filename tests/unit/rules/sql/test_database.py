"""Which database a URL opens; the databases themselves: test_sqlite.py and test_postgresql.py."""

import pytest

from ratelimitd.errors import SettingsError
from ratelimitd.rules.sql.database import open_database
from ratelimitd.rules.sql.postgresql import PostgresqlDatabase
from ratelimitd.rules.sql.sqlite import SqliteDatabase


@pytest.mark.parametrize(
    ("url", "kind", "place"),
    [
        ("sqlite:///rules.db", SqliteDatabase, "rules.db"),
        ("postgresql://user:pw@127.0.0.1:5/rules", PostgresqlDatabase, "127.0.0.1:5/rules"),
    ],
)
async def test_a_url_opens_its_kind_of_database_without_connecting(url, kind, place):
    database = open_database(url)
    assert isinstance(database, kind)
    assert database.place == place
    await database.close()


def test_a_url_of_neither_kind_is_a_wrong_setting_and_is_not_repeated():
    with pytest.raises(SettingsError, match=r"^DATABASE_URL must be") as caught:
        open_database("mysql://user:secret@host/rules")
    assert "secret" not in str(caught.value)
