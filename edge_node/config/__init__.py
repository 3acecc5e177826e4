"""The daemon's configuration. Read `schema` first (the keys), then `layers` (file, environment, flags) and `values`."""
