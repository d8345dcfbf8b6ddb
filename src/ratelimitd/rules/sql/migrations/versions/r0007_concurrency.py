"""A rule's algorithm may be ``concurrency``: which ones there are is known to the validation alone."""

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("rules") as table:
        table.drop_constraint("rules_algorithm", type_="check")
