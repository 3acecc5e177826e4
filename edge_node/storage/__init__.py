"""Storage of the daemon: answers (`cache`) and `decisions`, both in `background_sqlite`, and the active policy."""
