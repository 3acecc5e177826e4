"""Checks of a policy beyond its own file.

`cases` runs test cases against it, `replay` tries it on recorded requests (`report` is the result, `possible` the steps
behind it), `what_if` changes signals of one recorded request, and `explanation` describes a decision in words, also
that of a draft policy on one request.
"""
