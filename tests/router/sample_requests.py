"""Requests, chunks and policies that the tests of the router share."""

from __future__ import annotations

from causeway_server.router.policy.compiled import Policy, parse_policy
from causeway_server.router.types import Chunk, Confidence, Message, Prefer, Request, RoutingHints, Sampling

KIOSK = """
version: 1
name: retail-kiosk
targets:
  small:  {at: edge,  model: assistant}
  large:  {at: cloud, model: assistant-large, timeout: 4s, price: {input: 70, output: 70}}
  medium: {at: cloud, model: assistant-medium}
constraints:                       # restrict every route, fallback, cache, queue and log; fail closed
  - name: private-stays
    when: '"private" in request.tags'
    keep: on_device
routes:                            # the first rule that holds decides; `use` is the order of attempts
  - name: hot-device
    when: device.temperature_c > 85.0 || device.memory_free_mb < 300
    use: [large, small]
  - name: fast-path
    when: request.prompt_tokens < 30
    use: [small, large]
    handoff: {after_tokens: 8, below: 0.55}
  - name: otherwise
    use: [large, medium, small]
cache:                             # the first rule that holds decides
  - when: request.temperature == 0.0
    exact: {ttl: 30s, stale_if_error: 10m}
limits: {concurrent: 16, queue: 64, per_client_rps: 20}
"""
"""The example of DESIGN.md."""


def kiosk() -> Policy:
    return parse_policy(KIOSK, "kiosk.yaml")


def chat(
    *,
    tags: tuple[str, ...] = (),
    prefer: Prefer | None = None,
    model: str = "auto",
    temperature: float | None = None,
    n: int = 1,
) -> Request:
    return Request(
        kind="chat",
        model=model,
        messages=(Message("user", "switch the light on"),),
        sampling=Sampling(temperature=temperature),
        n=n,
        hints=RoutingHints(prefer=prefer, tags=tags),
    )


def confidence_of(score: float, tokens: int = 8) -> Confidence:
    return Confidence(tokens=tokens, score=score, logprob=-0.1, margin=0.5, entropy=0.4)


def chunk_of(text: str = "x", *, tokens: int = 1, score: float | None = None, index: int = 0) -> Chunk:
    return Chunk(
        text=text, index=index, tokens=tokens, confidence=None if score is None else confidence_of(score, tokens)
    )


def end_chunk(*, index: int = 0) -> Chunk:
    return Chunk(index=index, finish_reason="stop")
