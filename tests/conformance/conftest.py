"""One stack for the whole suite, and the surfaces in it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from openai import OpenAI

from tests.cloud_pool.upstreams.trtllm_triton import TrtllmTriton
from tests.openai_servers import OpenAIServer, llama_server, running, vllm_server
from tests.redis_server import RedisServer, redis_server
from tests.stack import TOKEN, Stack

from .lacks import lack_of
from .surface import EXCEPTIONS, MAX_BODY_BYTES, Surface

__all__ = ["redis_server"]

_GATEWAY = f"""
server: {{max_body_bytes: {MAX_BODY_BYTES}}}
tiers:
  - {{name: assistant-large, can: [chat, completion, embedding], concurrency: 16}}
  - {{name: no-vectors, model: assistant-large, artifact: assistant-large}}
  - name: remote
    model: small
    can: [chat, completion, embedding]
    upstream: {{kind: openai, urls: ["http://127.0.0.1:EDGE_PORT/v1"], key_file: edge.key}}
jobs: {{durability: warn}}
cache: {{enabled: true}}
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
_EDGE = Surface("edge", "127.0.0.1", 0, "small", TOKEN)
_GATEWAY_SURFACE = Surface("gateway", "127.0.0.1", 0, "assistant-large", TOKEN)

_PLAIN = (
    _EDGE,
    msgspec.structs.replace(_EDGE, name="edge_to_cloud", model="large"),
    msgspec.structs.replace(_GATEWAY_SURFACE, headers={"cache-control": "no-store"}),
)
_HTTP = msgspec.structs.replace(_GATEWAY_SURFACE, name="gateway_to_http", model="remote", headers=_PLAIN[2].headers)
"""A tier over OpenAI's HTTP API; its server is the edge."""
_CACHED = (
    msgspec.structs.replace(_EDGE, name="edge_cached", headers={"x-causeway-tags": "cached"}, twice=True),
    msgspec.structs.replace(_GATEWAY_SURFACE, name="gateway_cached", twice=True),
)
_KINDS = {
    kind: msgspec.structs.replace(_GATEWAY_SURFACE, name=f"gateway_to_{kind}", model=kind)
    for kind in ("llama_server", "trtllm", "vllm")
}
_CHOSEN = tuple(os.environ.get("CAUSEWAY_CONFORMANCE", "").split())
"""Kinds of upstreams that the suite runs against instead of all else: CAUSEWAY_CONFORMANCE="llama_server trtllm"."""
_SHOWN = ("llama_server", "trtllm")
_OURS = ("test_bodies", "test_http", "test_openapi", "test_any_body")
"""Modules about what the gateway does before it asks any upstream."""
collect_ignore = [f"{module}.py" for module in _OURS] if _CHOSEN else []
_SERVERS = (_PLAIN[0], _PLAIN[2])
_SURFACES = {
    "test_bodies": _SERVERS,
    "test_http": _SERVERS,
    "test_openapi": _SERVERS,
    "test_fields": (*_PLAIN, _HTTP),
    "test_any_body": _PLAIN,
    "test_stream": (*_PLAIN, _HTTP, *_CACHED, *(_KINDS[kind] for kind in _SHOWN)),
}
"""By module: bytes that no model is asked about need each server once, refused fields no cache; streams show the kinds.
"""

_CONTEXT_TOKENS, _VLLM_CONTEXT_TOKENS = 2048, 512
SERVERS: Mapping[str, Callable[[Path], OpenAIServer]] = {
    "llama_server": lambda folder: llama_server(folder, "--logits_all=True"),
    # In bfloat16 greedy answers differ by the size of the batch. Answers without a limit end where the context does.
    "vllm": lambda folder: vllm_server(folder, f"--max-model-len={_VLLM_CONTEXT_TOKENS}", "--dtype=float32"),
}
WITHOUT = {"llama_server": ["tools", "schemas"], "vllm": ["tools"]}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "surface" in metafunc.fixturenames:
        module = metafunc.module.__name__.rpartition(".")[2]
        surfaces = _SURFACES.get(module, (*_PLAIN, _HTTP, *_CACHED))
        if _CHOSEN:
            surfaces = tuple(_KINDS[kind] for kind in _CHOSEN)
        names = [surface.name for surface in surfaces]
        metafunc.parametrize("surface", surfaces, ids=names, indirect=True, scope="session")


_PATIENT = {"silent_before_probe_s": 60, "probe_timeout_s": 60, "hung_after_s": 300}
"""A processor is silent for long before the first token of a real model."""


@contextlib.contextmanager
def _before(kinds: Sequence[str], folder: Path, redis: RedisServer) -> Iterator[Stack]:
    """Run a gateway whose tiers are other servers, and `no-vectors` one of them again."""
    started, tiers = Stack(folder), list[dict[str, object]]()
    with contextlib.ExitStack() as servers:
        for kind in kinds:
            if kind == "trtllm":
                triton = TrtllmTriton(folder)
                servers.callback(triton.process.kill)
                triton.process.ready()
                (folder / "words.jinja").write_text("{{ messages[-1].content }}")
                place = {
                    "model": "ensemble",
                    "endpoints": [triton.address],
                    "template_file": str(folder / "words.jinja"),
                }
                tiers.append({"name": kind, "upstream": {"kind": "trtllm"}, **place})
                continue
            server = servers.enter_context(running(SERVERS[kind](folder)))
            upstream = {"kind": "openai", "urls": [server.url], "without": WITHOUT[kind]}
            context = _VLLM_CONTEXT_TOKENS if kind == "vllm" else _CONTEXT_TOKENS
            tiers.append({"name": kind, "model": server.model, "context_tokens": context, "upstream": upstream})
        tiers.append({**tiers[-1], "name": "no-vectors"})
        config = {
            "server": {"max_body_bytes": MAX_BODY_BYTES},
            "tiers": [{"context_tokens": _CONTEXT_TOKENS, **tier} for tier in tiers],
            "load_balancing": _PATIENT,
            "jobs": {"durability": "warn"},
            "redis": redis.url,
        }
        started.start_gateway(config=json.dumps(config), addressed=True).ready()
        yield started
        started.close()


@pytest.fixture(scope="session")
def before_kinds(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> Iterator[Stack]:
    with _before(_CHOSEN or _SHOWN, tmp_path_factory.mktemp("kinds"), redis_server) as started:
        yield started


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, redis_server: RedisServer) -> Iterator[Stack]:
    """Triton, gateway and edge with the same key and the same limits."""
    started = Stack(tmp_path_factory.mktemp("conformance"))
    policy: Path = started.folder / "policy.yaml"
    policy.write_text(_POLICY)
    keys = f"keys: [{{name: tests, sha256: {hashlib.sha256(TOKEN.encode()).hexdigest()}}}]"
    try:
        triton = started.start_triton()
        (started.folder / "edge.key").write_text(f"{TOKEN}\n")
        config = _GATEWAY.replace("EDGE_PORT", str(started.edge_port))
        gateway = started.start_gateway(config=f"{config}redis: {redis_server.url}\n")
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


@pytest.fixture(scope="session")
def surface(request: pytest.FixtureRequest) -> Surface:
    chosen: Surface = request.param
    stack: Stack = request.getfixturevalue("before_kinds" if chosen.model in _KINDS else "stack")
    port = stack.edge_port if chosen.name.startswith("edge") else stack.gateway_port
    return msgspec.structs.replace(chosen, port=port)


@pytest.fixture(autouse=True)
def known_exceptions(request: pytest.FixtureRequest, surface: Surface) -> None:
    """Expect the failures that `lacks` names: a listed case that passes is a failure, too."""
    reason = EXCEPTIONS.get((surface.name, request.function.__name__))
    if reason is not None:
        pytest.skip(reason)
    module = request.module.__name__.rpartition(".")[2]
    if lack := lack_of(surface.model, module, request.node.name.replace(surface.name, "")):
        request.node.add_marker(pytest.mark.xfail(reason=lack, strict=True))


@pytest.fixture(scope="session")
def client(surface: Surface) -> Iterator[OpenAI]:
    with OpenAI(
        base_url=surface.url, api_key=surface.api_key, default_headers=surface.headers, max_retries=0, timeout=60
    ) as made:
        yield made
