"""The tables of the rule database as the code uses them; how they come to be is the business of ``migrations/``.

Portable between SQLite and PostgreSQL. The constraints repeat what :mod:`ratelimitd.rules.validation` asks, because
not everybody who writes to a database asks the service first.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa

metadata = sa.MetaData()

# Rules are ordered by the bytes of these: SQLite does so anyway, PostgreSQL by a language's rules unless told.
_ENDPOINT: Final = sa.String(255).with_variant(sa.String(255, collation="C"), "postgresql")
_TYPE: Final = sa.String(50).with_variant(sa.String(50, collation="C"), "postgresql")

rules = sa.Table(
    "rules",
    metadata,
    sa.Column("id", sa.String(36), primary_key=True),
    sa.Column("endpoint", _ENDPOINT, nullable=False),
    sa.Column("identifier_type", _TYPE, nullable=False),
    sa.Column("limit", sa.Integer, nullable=False),
    sa.Column("window_seconds", sa.Integer, nullable=False),
    sa.Column("algorithm", sa.String(50), nullable=False),
    sa.Column("enabled", sa.Boolean, nullable=False),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
    sa.Column("updated_at", sa.DateTime(timezone=True), nullable=False),
    sa.UniqueConstraint("endpoint", "identifier_type", name="rules_pair_unique"),
    sa.CheckConstraint("length(endpoint) BETWEEN 1 AND 255", name="rules_endpoint_length"),
    sa.CheckConstraint(
        "identifier_type IN ('user', 'ip', 'api_key')", name="rules_identifier_type"
    ),
    sa.CheckConstraint('"limit" BETWEEN 1 AND 2147483647', name="rules_limit"),
    sa.CheckConstraint("window_seconds BETWEEN 1 AND 2147483647", name="rules_window_seconds"),
    sa.CheckConstraint(
        "algorithm IN ('token_bucket', 'sliding_window', 'fixed_window')", name="rules_algorithm"
    ),
    sa.Index("rules_revision", "revision"),
)
"""The rules. ``revision`` is the store's at the rule's last change; times are UTC."""

rule_revision = sa.Table(
    "rule_revision",
    metadata,
    sa.Column("only", sa.Integer, primary_key=True),
    sa.Column("revision", sa.BigInteger, nullable=False),
    sa.CheckConstraint('"only" = 1', name="rule_revision_one_row"),
)
"""One row: the revision of the last change. A writer locks it first, so changes get their numbers in commit order."""

rule_audit = sa.Table(
    "rule_audit",
    metadata,
    sa.Column("revision", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("at", sa.DateTime(timezone=True), nullable=False),
    sa.Column("actor", sa.String(255), nullable=False),
    sa.Column("action", sa.String(10), nullable=False),
    sa.Column("rule_id", sa.String(36), nullable=False),
    sa.Column("before", sa.Text, nullable=True),
    sa.Column("after", sa.Text, nullable=True),
    sa.CheckConstraint("action IN ('create', 'update', 'delete')", name="rule_audit_action"),
    sa.Index("rule_audit_rule", "rule_id", "revision"),
)
"""Who changed what and when, one row for each revision; ``before`` and ``after`` are JSON, absent where no rule was."""

secrets = sa.Table(
    "secrets",
    metadata,
    sa.Column("name", sa.String(50), primary_key=True),
    sa.Column("value", sa.LargeBinary, nullable=False),
    sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
)
"""Random values that every node of a cluster shares, such as the key of the bucket keys' hash."""
