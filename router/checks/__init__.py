"""Checks of a policy beyond its own file: `cases` runs test cases against it."""
