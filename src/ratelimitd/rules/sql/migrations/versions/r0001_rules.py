"""The first schema: rules, their revision, the audit trail, the node's secrets.

Written out instead of taken from ``rules.sql.database``, which changes with later revisions.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def by_bytes(length: int) -> sa.String:
    # SQLite orders text by its bytes anyway, PostgreSQL by the rules of a language by default.
    return sa.String(length).with_variant(sa.String(length, collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "rules",
        sa.Column("id", sa.String(36), primary_key=True),
        sa.Column("endpoint", by_bytes(255), nullable=False),
        sa.Column("identifier_type", by_bytes(50), nullable=False),
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
            "algorithm IN ('token_bucket', 'sliding_window', 'fixed_window')",
            name="rules_algorithm",
        ),
    )
    op.create_index("rules_revision", "rules", ["revision"])
    revision_table = op.create_table(
        "rule_revision",
        sa.Column("only", sa.Integer, primary_key=True),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.CheckConstraint('"only" = 1', name="rule_revision_one_row"),
    )
    op.bulk_insert(revision_table, [{"only": 1, "revision": 0}])
    op.create_table(
        "rule_audit",
        sa.Column("revision", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.String(255), nullable=False),
        sa.Column("action", sa.String(10), nullable=False),
        sa.Column("rule_id", sa.String(36), nullable=False),
        sa.Column("before", sa.Text, nullable=True),
        sa.Column("after", sa.Text, nullable=True),
        sa.CheckConstraint("action IN ('create', 'update', 'delete')", name="rule_audit_action"),
    )
    op.create_table(
        "secrets",
        sa.Column("name", sa.String(50), primary_key=True),
        sa.Column("value", sa.LargeBinary, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
    )
