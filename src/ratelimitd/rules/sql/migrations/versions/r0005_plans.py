"""A rule has limits by plan."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.add_column("rules", sa.Column("plans", sa.Text))
