"""A whole set of rules is applied in one revision; the audit trail has its changes in a table of their own."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"


def upgrade() -> None:
    with op.batch_alter_table("rule_audit") as table:
        table.drop_constraint("rule_audit_action", type_="check")
        table.create_check_constraint(
            "rule_audit_action", "action IN ('create', 'update', 'delete', 'apply')"
        )
    op.create_table(
        "rule_audit_changes",
        sa.Column("revision", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("rule_id", sa.String(36), primary_key=True),
        sa.Column("action", sa.String(10), nullable=False),
        sa.Column("before", sa.Text, nullable=True),
        sa.Column("after", sa.Text, nullable=True),
        sa.CheckConstraint(
            "action IN ('create', 'update', 'delete')", name="rule_audit_changes_action"
        ),
    )
    op.create_index("rule_audit_changes_rule", "rule_audit_changes", ["rule_id", "revision"])
