"""The daemon's configuration: `schema` (the keys and their meaning), `loader` (file < environment < flag)."""
