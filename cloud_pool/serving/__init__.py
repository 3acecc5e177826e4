"""Answering a request after parsing: tiers in order, a permit, Triton, chunks or vectors."""
