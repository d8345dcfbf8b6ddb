"""Identities are assigned to plans; the audit trail names the identities of such changes."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    by_bytes = sa.String(32).with_variant(sa.String(32, collation="C"), "postgresql")
    op.create_table(
        "assignments",
        sa.Column("identifier_type", by_bytes, primary_key=True),
        sa.Column("identifier", sa.LargeBinary, primary_key=True),
        sa.Column("plan", by_bytes, nullable=False),
        sa.Column("expire_time", sa.BigInteger, nullable=False),
        sa.Column("note", sa.String(255), nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.CheckConstraint(
            "length(identifier) BETWEEN 1 AND 256", name="assignments_identifier_length"
        ),
        sa.CheckConstraint("length(plan) BETWEEN 1 AND 32", name="assignments_plan_length"),
        sa.CheckConstraint("expire_time BETWEEN 0 AND 8589934591", name="assignments_expire_time"),
    )
    op.create_index("assignments_revision", "assignments", ["revision"])
    op.create_index("assignments_plan", "assignments", ["plan", "identifier_type", "identifier"])
    op.create_index("assignments_expire_time", "assignments", ["expire_time"])
    op.add_column(
        "rule_revision",
        sa.Column("assignments", sa.BigInteger, nullable=False, server_default="0"),
    )
    op.add_column("rule_audit", sa.Column("identifier_type", sa.String(32)))
    op.add_column("rule_audit", sa.Column("identifier", sa.LargeBinary))
    op.create_index(
        "rule_audit_identity", "rule_audit", ["identifier_type", "identifier", "revision"]
    )
