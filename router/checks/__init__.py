"""Checks of a policy beyond its own file.

`cases` runs test cases against it, `replay` tries it on recorded requests, and `explanation` puts a decision into
words, also that of a draft that is tried on one request.
"""
