"""The script that Alembic runs: it applies revisions on the connection that `fleet.store.database` passes."""

from alembic import context

attributes = context.config.attributes
context.configure(connection=attributes["connection"], target_metadata=attributes["metadata"])
with context.begin_transaction():
    context.run_migrations()
