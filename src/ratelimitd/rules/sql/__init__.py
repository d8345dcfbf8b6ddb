"""The rule store in SQLite and PostgreSQL."""
