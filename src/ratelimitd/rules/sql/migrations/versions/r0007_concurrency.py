"""A rule's algorithm may be ``concurrency``."""

from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    with op.batch_alter_table("rules") as table:
        table.drop_constraint("rules_algorithm", type_="check")
        table.create_check_constraint(
            "rules_algorithm",
            "algorithm IN ('token_bucket', 'sliding_window', 'fixed_window', 'concurrency')",
        )
