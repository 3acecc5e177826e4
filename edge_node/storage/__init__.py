"""What the daemon keeps: answers (`cache`) and `decisions`, both in `background_sqlite`, and the active policy."""
