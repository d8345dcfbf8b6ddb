"""What alembic runs to apply revisions: on the connection and in the transaction that ``upgrade`` opened."""

from alembic import context

from ratelimitd.rules.sql.migrations import VERSION_TABLE

context.configure(
    connection=context.config.attributes["connection"],
    version_table=VERSION_TABLE,
    transactional_ddl=True,  # both databases can, and our engines begin transactions themselves
)
context.run_migrations()
