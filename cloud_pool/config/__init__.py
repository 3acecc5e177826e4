"""The gateway's configuration: `schema` (every key) and `loader` (file and flags)."""
