"""Decisions, and their attempts.

Reading order: decide (request + signals + policy → attempts; cache rule and key), attempt_states (the life of an
attempt), attempts (one, and their order), failure (the client's error when all have failed), handoff. Special cases of
decide: part_forms (sound and pictures), no_route, continue_token, semantic_question, shadow, job_decision. features
rebuilds a request from its record.
"""
