"""The service, which answers a parsed request: fallback steps, a permit, Triton, and chunks or vectors."""
