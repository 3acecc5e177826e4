"""Decisions, and what they are made from.

Reading order: decide (request + signals + policy → attempts; cache rule and key), attempts (their state table and
order), handoff, continue_token. breaker, latency and spend keep the state behind signals.
"""
