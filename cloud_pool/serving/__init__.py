"""One request through the gateway after parsing: tiers in order, a permit, Triton, chunks.

Reading order: `service` (the hops, and deltas to chunks), `embedding_service`.
"""
