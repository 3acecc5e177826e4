"""Decisions, and what they are made from.

Reading order: decide (request + signals + policy → attempts), attempts (their state table and order), handoff,
cache_key (the response cache's side), continue_token. breaker, latency and spend keep the state behind signals.
"""
