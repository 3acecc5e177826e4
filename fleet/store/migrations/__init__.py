"""Alembic's environment and revisions. A released revision is never edited; a change of `tables.py` is a new one."""
