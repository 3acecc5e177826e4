"""Turns weights into artifacts: a folder with weights, manifest and card.

Read `publish` first (artifacts of our own training), then `add` (a user's own file) and `card` (the README beside the
weights).
"""
