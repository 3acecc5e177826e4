"""The control plane's database: the only package that speaks SQL. SQLite in WAL mode, or PostgreSQL by its URL.

    tables.py       every table
    migrations/     Alembic's environment and revisions, applied when the store opens. A new database gets the tables
                    of `tables.py`; a change of that file is a new revision, for the older databases.
    database.py     `Store`: connections, transactions, migrations, a lost database, the lock of the controller;
                    `GroupCommit`: many small writes in one transaction
    enrolment.py    join tokens and new devices; operators' sessions
    devices.py      devices as rows: their reports, and operators' decisions
    telemetry.py    counters of requests by device and bundle, and what changed since a look
    generations.py  counters by cohort that wake parked polls in every process; devices whose tokens are refused
    rollouts.py     rollouts, their looks, pins and holds
    audit.py        the log of what operators and the controller did
    history.py      the hash chain of that log and the events of a device, also for commands: without SQLAlchemy

Functions take the connection of the caller's transaction, so that several calls form one change.
"""
