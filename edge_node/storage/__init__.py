"""Storage of the daemon: answers (`cache`) and `decisions`, both on `background_sqlite`, and the active policy."""
