"""Alembic's entry: it runs on the connection that ``Database.migrate`` opened, inside its transaction."""

from alembic import context

from space.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    render_as_batch=True,
    transactional_ddl=True,
)
context.run_migrations()
