"""Run by Alembic: apply revisions on the connection that `fleet.store.database` hands over."""

from alembic import context

attributes = context.config.attributes
context.configure(connection=attributes["connection"], target_metadata=attributes["metadata"])
with context.begin_transaction():
    context.run_migrations()
