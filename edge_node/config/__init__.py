"""The daemon's configuration: `schema` (the keys), `meaning` (what they mean), `loader` (file < environment < flag);
below them `layers` and `values`.
"""
