"""`db upgrade`: a current schema afterwards, or one line with the reason."""

import sqlite3


def test_upgrade_creates_a_database_and_is_idempotent(run, tmp_path):
    url = f"sqlite:///{tmp_path / 'rules.db'}"
    for _ in range(2):
        ended = run("db", "upgrade", "--database-url", url)
        assert ended == (0, "the rule database is up to date\n", "")
    connection = sqlite3.connect(tmp_path / "rules.db")
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
    connection.close()
    assert "rules" in tables


def test_database_may_come_from_the_environment(run, tmp_path, monkeypatch):
    monkeypatch.setenv("RATELIMITD_DATABASE_URL", f"sqlite:///{tmp_path / 'rules.db'}")
    assert run("db", "upgrade").status == 0
    assert (tmp_path / "rules.db").exists()


def test_file_of_another_program_is_status_1_and_unchanged(run, tmp_path):
    file = tmp_path / "notes.db"
    file.write_bytes(b"not a database, but somebody's notes" * 100)
    ended = run("db", "upgrade", "--database-url", f"sqlite:///{file}")
    assert (ended.status, ended.out, ended.err.count("\n")) == (1, "", 1)
    assert file.read_bytes().startswith(b"not a database")


def test_database_on_a_server_is_upgraded(run, postgres):
    url = postgres.new_database("template0")
    for _ in range(2):
        ended = run("db", "upgrade", "--database-url", url)
        assert ended == (0, "the rule database is up to date\n", "")


def test_refusing_server_is_one_line_without_the_password(run, postgres):
    ended = run("db", "upgrade", "--database-url", postgres.url("migrated", user="guarded:s3cret"))
    place = f"127.0.0.1:{postgres.port}/migrated"
    line = f"Error: the rule database refuses the user or the password of DATABASE_URL: {place}\n"
    assert ended == (1, "", line)
