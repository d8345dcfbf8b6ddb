from pathlib import Path

import pytest

from ratelimitd.settings import urls
from ratelimitd.settings.urls import PostgresqlServer, SqliteFile


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("sqlite:///rules.db", "rules.db"),
        ("sqlite:////var/lib/r%20.db", "/var/lib/r%20.db"),
    ],
)
def test_the_path_of_a_sqlite_file_is_taken_as_it_stands(text, path):
    url = urls.parse_database_url(text)
    assert url == SqliteFile(Path(path))
    assert url.place == path


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("postgresql://user:pw@db.internal:6432/rules", "db.internal:6432/rules"),
        ("postgres://h/d", "h/d"),
        ("postgresql://user@h/my%20rules", "h/my rules"),
        ("postgresql://user:p%40%2Fw@[::1]:5432/d", "[::1]:5432/d"),
        ("postgresql://a:1,b,[::1]:2/d?target_session_attrs=primary", "a:1,b,[::1]:2/d"),
        ("postgresql://h/d?sslmode=verify-full&sslrootcert=/etc/ca%20.pem", "h/d"),
        ("postgresql:///d", "localhost/d"),
        ("postgresql:///d?host=/run/postgresql&port=5433", "/run/postgresql/d"),
    ],
)
def test_a_server_is_named_without_user_and_password(text, place):
    url = urls.parse_database_url(text)
    assert isinstance(url, PostgresqlServer)
    assert (url.dsn, url.place) == (text, place)
    assert repr(url) == f"PostgresqlServer({place!r})"


@pytest.mark.parametrize(
    ("text", "beginning"),
    [
        ("", "must be sqlite:///PATH"),
        ("sqlite://", "must be sqlite:///PATH"),
        ("sqlite:///", "must be sqlite:///PATH"),
        ("sqlite:///:memory:", "must be sqlite:///PATH"),
        ("mysql://user:s3cret@h/d", "must be sqlite:///PATH"),
        ("postgresql+asyncpg://h/d", "must be postgresql://"),
        ("postgresql://h", "must be postgresql://"),
        ("postgresql://h/", "must be postgresql://"),
        ("postgresql://u:s3cret@x@h/d", "must be postgresql://"),
        ("postgresql://u:s3cret/x@h/d", "must be postgresql://"),
        ("postgresql://u:s3cret#x@h/d", "must be postgresql://"),
        ("postgresql://u:s3cret%@h/d", "must be postgresql://"),
        ("postgresql://u:s3 cret@h/d", "must be postgresql://"),
        ("postgresql://u@h:port/d", "must be postgresql://"),
        ("postgresql://u@h:65536/d", "must be postgresql://"),
        ("postgresql://u@a,,b/d", "must be postgresql://"),
        ("postgresql://h/d#x", "must be postgresql://"),
        ("postgresql://h/d?sslmode=on", "must have as sslmode one of"),
        ("postgresql://h/d?sslmode", "must have a value for each option"),
        ("postgresql://h/d?sslmode=allow&sslmode=prefer", "must have no options but"),
        ("postgresql://h/d?password=s3cret", "must have no options but host"),
        ("postgresql:///d?host=/run&port=x", "must have a number as port"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_without_repeating_it(text, beginning):
    with pytest.raises(ValueError) as caught:
        urls.parse_database_url(text)
    assert str(caught.value).startswith(beginning)
    assert "s3" not in str(caught.value)
