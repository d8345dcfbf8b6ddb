"""Run by alembic to apply revisions, in the transaction that ``upgrade`` opened."""

from alembic import context

from ratelimitd.rules.sql.database import VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    version_table=VERSION_TABLE,
    transactional_ddl=True,  # supported by both databases
)
context.run_migrations()
