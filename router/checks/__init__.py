"""Checks of a policy beyond its own file: `cases` runs test cases against it, `draft` tries it on one request,
`replay` tries it on recorded ones, and `explanation` puts a decision into words.
"""
