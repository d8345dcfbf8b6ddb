"""The audit trail of one rule is found without reading that of all."""

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_index("rule_audit_rule", "rule_audit", ["rule_id", "revision"])
