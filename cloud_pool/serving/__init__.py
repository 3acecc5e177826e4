"""One request through the gateway after parsing: tiers in order, a permit, Triton, chunks.

Reading order: `service` (the hops), `tier_attempt` (one tier up to its first delta), `answer_builder` (deltas to
chunks), `stream_merge` (several prompts as one answer), `assembly` (wiring).
"""
