"""The daemon's configuration: `schema` (the keys and what they mean), `loader` (file < environment < flag)."""
