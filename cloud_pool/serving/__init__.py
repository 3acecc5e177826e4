"""One request through the gateway after parsing: tiers in order, a permit, Triton, chunks or vectors."""
