"""One stack for the whole suite, and a surface per server in it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.stack import TOKEN, Stack

from .surface import EXCEPTIONS, MAX_BODY_BYTES, Surface

_GATEWAY = f"""
server: {{max_body_bytes: {MAX_BODY_BYTES}}}
tiers:
  - {{name: assistant-large, can: [chat, completion, embedding], concurrency: 16}}
  - {{name: no-vectors, model: assistant-large, artifact: assistant-large}}
"""
_POLICY = """
version: 1
name: conformance
targets:
  small: {at: edge, model: assistant, can: [chat, completion, embedding, tools, json, logprobs]}
  large: {at: cloud, model: assistant-large, can: [chat, completion, embedding, tools, json, logprobs]}
  no-vectors: {at: cloud, model: no-vectors}
routes:
  - {name: all, use: [small, large]}
cache:
  - {when: '"cached" in request.tags', exact: {ttl: 60s}}
limits: {concurrent: 16, queue: 64}
"""
_SURFACES = {"edge": ("edge", "small"), "edge_to_cloud": ("edge", "large"), "gateway": ("gateway", "assistant-large")}


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Triton, gateway and edge with the same key and the same limits."""
    started = Stack(tmp_path_factory.mktemp("conformance"))
    policy: Path = started.folder / "policy.yaml"
    policy.write_text(_POLICY)
    keys = f"keys: [{{name: tests, sha256: {hashlib.sha256(TOKEN.encode()).hexdigest()}}}]"
    try:
        triton = started.start_triton()
        gateway = started.start_gateway(config=_GATEWAY)
        edge = started.start_edge(f"policy: {policy}\n", server=f"max_body_bytes: {MAX_BODY_BYTES}, {keys}")
        for part in (triton, gateway, edge):
            part.ready()
        started.wait_until_loaded()
        yield started
        started.close()
    finally:
        for part in started.parts.values():
            if part.popen.poll() is None:
                part.kill()


@pytest.fixture(scope="session", params=list(_SURFACES))
def surface(request: pytest.FixtureRequest, stack: Stack) -> Surface:
    server, model = _SURFACES[request.param]
    port = stack.edge_port if server == "edge" else stack.gateway_port
    return Surface(request.param, "127.0.0.1", port, model, TOKEN)


@pytest.fixture(autouse=True)
def known_exceptions(request: pytest.FixtureRequest, surface: Surface) -> None:
    reason = EXCEPTIONS.get((surface.name, request.function.__name__))
    if reason is not None:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def client(surface: Surface) -> Iterator[OpenAI]:
    with OpenAI(base_url=surface.url, api_key=surface.api_key, max_retries=0, timeout=60) as made:
        yield made
