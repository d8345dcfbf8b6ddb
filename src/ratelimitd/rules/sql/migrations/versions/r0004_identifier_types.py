"""A rule's identifier type is one that nodes declare, or a product of several."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    by_bytes = sa.String(255).with_variant(sa.String(255, collation="C"), "postgresql")
    with op.batch_alter_table("rules") as table:
        table.drop_constraint("rules_identifier_type", type_="check")
        table.alter_column("identifier_type", type_=by_bytes, existing_nullable=False)
