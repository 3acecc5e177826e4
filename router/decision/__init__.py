"""Decisions, and their attempts.

Reading order: decide (request + signals + policy → attempts; cache rule and key), attempts (the life of one, their
order, handoff, the client's error when all have failed). Special cases of decide: abilities (the forms of audio and
images; requests that no target can serve). features rebuilds a request from its record.
"""
