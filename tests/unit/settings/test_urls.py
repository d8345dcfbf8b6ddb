from pathlib import Path
from unittest.mock import Mock

import pytest

from ratelimitd.settings import urls
from ratelimitd.settings.urls import (
    MAX_DATABASE,
    Login,
    PostgresqlServer,
    RedisUrl,
    Server,
    SqliteFile,
    TlsFiles,
    TopologyKind,
    parse_redis_url,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("redis://valkey", RedisUrl(TopologyKind.STANDALONE, (Server("valkey", 6379),))),
        ("redis://10.0.0.1:7000/", RedisUrl(TopologyKind.STANDALONE, (Server("10.0.0.1", 7000),))),
        ("redis://[::1]:7000", RedisUrl(TopologyKind.STANDALONE, (Server("::1", 7000),))),
        ("redis://[::1]", RedisUrl(TopologyKind.STANDALONE, (Server("::1", 6379),))),
        ("redis://h/15", RedisUrl(TopologyKind.STANDALONE, (Server("h", 6379),), database=15)),
        ("redis://h?db=2", RedisUrl(TopologyKind.STANDALONE, (Server("h", 6379),), database=2)),
        (
            "redis://:p%40ss%2F:%23@h",
            RedisUrl(TopologyKind.STANDALONE, (Server("h", 6379),), Login("", "p@ss/:#")),
        ),
        (
            "redis://n%C3%B6de:pw@h",
            RedisUrl(TopologyKind.STANDALONE, (Server("h", 6379),), Login("nöde", "pw")),
        ),
        ("rediss://h", RedisUrl(TopologyKind.STANDALONE, (Server("h", 6379),), tls=TlsFiles())),
        (
            "rediss://h?ssl_ca_certs=/ca&ssl_certfile=/c&ssl_keyfile=/k&ssl_check_hostname=false",
            RedisUrl(
                TopologyKind.STANDALONE,
                (Server("h", 6379),),
                tls=TlsFiles("/ca", "/c", "/k", False),
            ),
        ),
        (
            "unix:///run/valkey%20one.sock?db=1",
            RedisUrl(TopologyKind.STANDALONE, (Server("/run/valkey one.sock", 0),), database=1),
        ),
        (
            "unix://:pw@/run/valkey.sock",
            RedisUrl(TopologyKind.STANDALONE, (Server("/run/valkey.sock", 0),), Login("", "pw")),
        ),
        (
            "redis+sentinel://a,b:1/limits/4?sentinel_username=u&sentinel_password=p%26",
            RedisUrl(
                TopologyKind.SENTINEL,
                (Server("a", 26379), Server("b", 1)),
                database=4,
                service="limits",
                sentinel_login=Login("u", "p&"),
            ),
        ),
        (
            "rediss+sentinel://u:p@a/limits",
            RedisUrl(
                TopologyKind.SENTINEL,
                (Server("a", 26379),),
                Login("u", "p"),
                tls=TlsFiles(),
                service="limits",
            ),
        ),
        (
            "redis+cluster://a,[::1]:7",
            RedisUrl(TopologyKind.CLUSTER, (Server("a", 6379), Server("::1", 7))),
        ),
        (
            "rediss+cluster://a/0",
            RedisUrl(TopologyKind.CLUSTER, (Server("a", 6379),), tls=TlsFiles()),
        ),
    ],
)
def test_a_url_is_parsed_to_a_value(text, value):
    assert parse_redis_url(text) == value


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must be redis://"),
        ("valkey:6379", "must be redis://"),
        ("http://valkey", "must be redis://"),
        ("redis+unix:///s", "must be redis://"),
        ("redis://hunter2 x", "without spaces"),
        ("redis://hunter2\n", "without spaces"),
        ("redis://[::1", "IPv6"),
        ("redis://:hunter2#x@h", "written as %23"),
        ("redis://", "HOST or HOST:PORT"),
        ("redis://:hunter2@", "HOST or HOST:PORT"),
        ("redis://u:hunter2/x@h", "percent-encoded"),
        ("redis://h:0", "HOST or HOST:PORT"),
        ("redis://h:65536", "HOST or HOST:PORT"),
        ("redis://h:hunter2", "HOST or HOST:PORT"),
        ("redis://a,b", "must name one server"),
        ("redis+cluster://a,,b", "HOST or HOST:PORT"),
        ("redis://hunter2@h", "a password where there is a user"),
        ("redis://h/hunter2", "by a number"),
        ("redis://h/1/2", "at most one database"),
        ("redis://h/1?db=1", "at most one database"),
        (f"redis://h/{MAX_DATABASE + 1}", "by a number"),
        ("redis://h/-1", "by a number"),
        ("redis://h?hunter2=1", "no options but db, each once"),
        ("redis://h?db=1&db=2", "each once"),
        ("redis://h?ssl_ca_certs=/ca", "no options but db, each once"),
        ("redis://h?sentinel_password=hunter2", "no options but db"),
        ("rediss://h?ssl_check_hostname=hunter2", "ssl_check_hostname=true"),
        ("rediss://h?ssl_certfile=/hunter2", "both or none"),
        ("unix://hunter2/s", "absolute path"),
        ("unix:///", "absolute path"),
        ("unix:///a%00b", "absolute path"),
        ("redis+sentinel://hunter2", "must name the service"),
        ("redis+sentinel://h/s/x", "by a number"),
        ("redis+cluster://h/1", "no database with a cluster"),
    ],
)
def test_an_invalid_url_is_refused_without_quoting_it(text, problem):
    with pytest.raises(ValueError, match=problem) as refused:
        parse_redis_url(text)
    assert str(refused.value).startswith("must ")
    assert "hunter2" not in str(refused.value)


def test_the_largest_database_is_accepted():
    assert parse_redis_url(f"redis://h/{MAX_DATABASE}").database == MAX_DATABASE


def test_the_value_shows_no_password():
    url = parse_redis_url("redis+sentinel://u:hunter2@h/s?sentinel_password=hunter2")
    assert "hunter2" not in repr(url)
    assert repr(url.login) == "Login(user='u', password='********')"
    assert repr(Login()) == "Login(user='', password='')"


@pytest.mark.parametrize(
    ("server", "shown"),
    [
        (Server("valkey", 6379), "valkey:6379"),
        (Server("::1", 7), "[::1]:7"),
        (Server("/run/valkey.sock", 0), "/run/valkey.sock"),
    ],
)
def test_a_server_is_shown_as_an_address_or_a_path(server, shown):
    assert str(server) == shown
    assert server.is_path == shown.startswith("/")


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("sqlite:///rules.db", "rules.db"),
        ("sqlite:////var/lib/r%20.db", "/var/lib/r%20.db"),
    ],
)
def test_the_path_of_a_sqlite_file_is_literal(text, path):
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
    assert url.place == place
    assert repr(url) == f"PostgresqlServer({place!r})"


@pytest.mark.parametrize(
    ("text", "dsns", "kind"),
    [
        ("postgresql://u:p@h/d", ["postgresql://u:p@h/d"], None),
        ("postgresql://h/d?target_session_attrs=any",
         ["postgresql://h/d?target_session_attrs=any"], "any"),
        ("postgresql:///d?host=/run", ["postgresql:///d?host=/run"], None),
        ("postgresql://u:p@a:1,[::1]:2/d?sslmode=require",
         ["postgresql://u:p@a:1/d?sslmode=require", "postgresql://u:p@[::1]:2/d?sslmode=require"],
         "primary"),
        ("postgres://a,b/d?target_session_attrs=read-write",
         ["postgres://a/d?target_session_attrs=read-write",
          "postgres://b/d?target_session_attrs=read-write"], "read-write"),
    ],
)  # fmt: skip
def test_hosts_are_connected_to_in_turn_and_of_several_only_a_primary_by_default(text, dsns, kind):
    url = urls.parse_database_url(text)
    assert isinstance(url, PostgresqlServer)
    assert (list(url.dsns), url.target_session_attrs) == (dsns, kind)


@pytest.mark.parametrize(
    ("text", "beginning"),
    [
        ("", "must be sqlite:///PATH"),
        ("sqlite://", "must be sqlite:///PATH"),
        ("sqlite:///", "must be sqlite:///PATH"),
        ("sqlite:///:memory:", "must be sqlite:///PATH"),
        ("mysql://user:s3cret@h/d", "must be sqlite:///PATH"),
        ("rules.db", "must be sqlite:///PATH"),
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
        ("postgresql:///d?host=a,b", "must have several hosts before the database"),
        (
            "postgresql://h/d?sslmode=verify-full&sslrootcert=system",
            "must have a file as sslrootcert",
        ),
        ("postgresql://h/d?sslmode=require&sslrootcert=system", "must have a file as sslrootcert"),
        ("postgresql://h/d?sslmode=verify-ca", "must have with sslmode=verify-ca an sslrootcert"),
        (
            "postgresql://h/d?sslmode=verify-full",
            "must have with sslmode=verify-full an sslrootcert",
        ),
    ],
)
def test_an_unusable_url_is_refused_without_quoting_it(text, beginning, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("PGSSLROOTCERT", raising=False)
    with pytest.raises(ValueError) as caught:
        urls.parse_database_url(text)
    assert str(caught.value).startswith(beginning)
    assert "s3" not in str(caught.value)


VERIFIED = "postgresql://h/d?sslmode=verify-full"


def test_the_authorities_may_be_those_of_the_user_or_of_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PGSSLROOTCERT", "/etc/ca.pem")
    assert urls.parse_database_url(VERIFIED)
    monkeypatch.delenv("PGSSLROOTCERT")
    (tmp_path / ".postgresql").mkdir()
    (tmp_path / ".postgresql/root.crt").touch()
    assert urls.parse_database_url(VERIFIED)


@pytest.mark.parametrize("error", [PermissionError, RuntimeError])
def test_a_user_without_a_home_has_no_authorities(monkeypatch, error):
    monkeypatch.delenv("PGSSLROOTCERT", raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=error))
    with pytest.raises(ValueError, match="must have with sslmode=verify-full an sslrootcert"):
        urls.parse_database_url(VERIFIED)
