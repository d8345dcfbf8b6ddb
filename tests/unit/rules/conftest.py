"""Direct access to the file of a store, bypassing the service."""

import sqlite3
from contextlib import closing

import pytest


@pytest.fixture
def behind(tmp_path):
    """Run a statement on the file; return the rows."""

    def run(statement, *parameters):
        with closing(sqlite3.connect(tmp_path / "rules.db")) as connection, connection:
            connection.execute("PRAGMA ignore_check_constraints = 1")
            return connection.execute(statement, parameters).fetchall()

    return run


@pytest.fixture
def insert_many(behind):
    """Insert rules for ``/0000``, ``/0001`` and so on, with these numbers in their ids."""
    return lambda count, algorithm="fixed_window": behind(
        "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < ? - 1)"
        " INSERT INTO rules SELECT printf('00000000-0000-0000-0000-%012x', i), printf('/%04d', i),"
        " 'user', 1, 1, ?, 1, 1, '2026-01-01', '2026-01-01', NULL, NULL FROM n",
        count,
        algorithm,
    )
