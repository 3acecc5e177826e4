"""Scripted backends with faults: an engine in memory, an OpenAI-compatible server on a real socket."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Literal

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from causeway_server.edge_node.backends.backend import BackendRequest
from causeway_server.router.errors import EngineCrashed, EngineUnavailable
from causeway_server.router.openai.tokens import TokenList
from causeway_server.router.types import Chunk, Confidence, EdgeSignals, Embeddings, Request, Usage

Fault = Literal["none", "refuse", "stall", "die", "drip", "corrupt", "unfinished"]
FAULTS: tuple[Fault, ...] = ("refuse", "stall", "die", "drip", "corrupt", "unfinished")
"""refuse: at once · stall: nothing arrives · die: after the first pieces · drip: too slow for the timeouts ·
corrupt: malformed output · unfinished: no finish_reason"""

EDGE_WORDS = ("edge ", "says ", "so")
CLOUD_WORDS = ("cloud ", "says ", "so")
DRIP_S = 0.15


class ScriptedEngine:
    """An `engines.Engine` without a model."""

    def __init__(self, model: str = "m-small") -> None:
        self.model = model
        self.fault: Fault = "none"
        self.refusal: Exception | None = None  # raised instead of an answer
        self.score = 0.9
        self.flood = False  # an answer without an end
        self.words = EDGE_WORDS
        self.state = "ready"
        self.restarts = 0
        self.unloads = 0
        self.problem = ""
        self.running = 0
        self.calls: list[BackendRequest] = []
        self.gate: asyncio.Event | None = None  # set: held back until somebody opens it
        self.pause_after: int | None = None  # set: it stops for good after so many words
        self.paused = False
        self.entered = asyncio.Event()
        self.closed = False

    @property
    def jobs(self) -> int:
        return self.running

    async def start(self) -> None:
        self.state = "ready"

    async def ready(self, deadline: float) -> None:
        if self.refusal is not None:
            raise self.refusal

    async def count(self, request: Request) -> int | None:
        if self.fault == "stall":
            await asyncio.sleep(3600)
        self._break_early()
        texts = [message.content for message in request.messages if isinstance(message.content, str)]
        return sum(len(text.split()) for text in texts) if self.state == "ready" else None

    async def tokenize(self, request: Request, *, adds_special: bool = True) -> TokenList:
        """A token for each word, which is its length; 1 begins a prompt."""
        if await self.count(request) is None:
            raise EngineUnavailable("loading", phase="connect", retry_after_s=1.0)
        texts = [*(message.content for message in request.messages), *request.prompts]
        begin = (1,) if request.prompts and adds_special else ()
        ids = (*begin, *(len(word) for text in texts if isinstance(text, str) for word in text.split()))
        return TokenList(len(ids), 4096, ids)

    async def detokenize(self, tokens: tuple[int, ...]) -> str:
        self._break_early()
        return " ".join("w" * token for token in tokens)

    def signals(self) -> EdgeSignals:
        return EdgeSignals(queue=self.running, tokens_per_s=100.0, loaded=self.state == "ready")

    async def generate(self, call: BackendRequest) -> AsyncGenerator[Chunk]:
        self.calls.append(call)
        self.running += 1
        self.entered.set()
        try:
            if self.gate is not None:
                await self.gate.wait()
            async for chunk in self._answer(call):
                yield chunk
        finally:
            self.running -= 1

    def complete(self, call: BackendRequest) -> None:
        return None

    async def embed(self, call: BackendRequest) -> Embeddings:
        self.calls.append(call)
        self._break_early()
        return Embeddings(tuple((float(len(str(p))), 1.0) for p in call.request.prompts), Usage(prompt_tokens=2))

    async def close(self) -> None:
        self.closed = True
        self.state = "closed"

    def _break_early(self) -> None:
        if self.fault == "refuse":
            raise EngineUnavailable("no model is loaded", phase="connect")
        if self.fault == "corrupt":
            raise ValueError("bad frame: the secret prompt")

    async def _answer(self, call: BackendRequest) -> AsyncIterator[Chunk]:
        self._break_early()
        if self.refusal is not None:
            raise self.refusal
        if self.fault == "stall":
            await asyncio.sleep(3600)
        while self.flood:
            yield Chunk(text="x" * 10_000, tokens=1)
            await asyncio.sleep(0)
        choices = range(call.request.n * max(1, len(call.request.prompts)))
        for at, word in enumerate(self.words):
            if at == self.pause_after:
                self.paused = True
                await asyncio.sleep(3600)
            confidence = Confidence(at + 1, self.score, -0.1, 0.5, 0.2) if call.confidence_tokens > at else None
            for index in choices:
                yield Chunk(text=word, index=index, tokens=1, confidence=confidence if index == 0 else None)
            if self.fault == "die" and at == 1:
                raise EngineCrashed("the child was killed", phase="stream")
            if self.fault == "drip":
                await asyncio.sleep(DRIP_S)
        if self.fault != "unfinished":
            for index in choices:
                yield Chunk(index=index, finish_reason="stop")
            yield Chunk(usage=Usage(prompt_tokens=5, completion_tokens=3 * len(choices)))


class ScriptedCloud:
    """An OpenAI-compatible server. `fault` is one of FAULTS, or `status` answers that instead."""

    def __init__(self) -> None:
        self.fault: Fault = "none"
        self.status = 200
        self.tls: ssl.SSLContext | None = None
        self.error: dict[str, object] = {}
        self.headers: dict[str, str] = {}
        self.words = CLOUD_WORDS
        self.running = 0
        self.bodies: list[dict[str, object]] = []
        self.request_headers: list[dict[str, str]] = []
        self.gate: asyncio.Event | None = None
        self.rest: asyncio.Event | None = None  # set: a stream is held back after two words until somebody opens it
        self.entered = asyncio.Event()
        self.url = ""
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def connections(self) -> list[RequestHandler]:
        """The open connections of the server."""
        assert self._runner is not None
        assert self._runner.server is not None
        return self._runner.server.connections

    async def start(self, port: int = 0, sock: socket.socket | None = None) -> ScriptedCloud:
        """Listen on `sock`, which is bound, or on a port."""
        app = web.Application()
        self.routes(app)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site: web.BaseSite = web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=self.tls)
        if sock is not None:
            site = web.SockSite(self._runner, sock, ssl_context=self.tls)
        await site.start()
        self.port = int(self._runner.addresses[0][1])
        self.url = f"http{'s' * (self.tls is not None)}://127.0.0.1:{self.port}/v1"
        return self

    def routes(self, app: web.Application) -> None:
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
            app.router.add_post(path, self._serve)
        app.router.add_get("/v1/models", self._models)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": []})

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        self.request_headers.append({name.lower(): value for name, value in request.headers.items()})
        self.running += 1
        self.entered.set()
        try:
            if self.gate is not None:
                await self.gate.wait()
            return await self._answer(request, body)
        finally:
            self.running -= 1

    async def _answer(self, request: web.Request, body: dict[str, object]) -> web.StreamResponse:
        if self.status != 200:
            return web.json_response({"error": self.error}, status=self.status, headers=self.headers)
        if self.fault == "refuse":
            _hang_up(request)
        if self.fault == "stall":
            await asyncio.sleep(3600)
        if request.path.endswith("/embeddings"):
            return web.json_response(_embeddings(body))
        if body.get("stream"):
            return await self._stream(request)
        return await self._whole(request)

    async def _whole(self, request: web.Request) -> web.StreamResponse:
        data = b"<html>" if self.fault == "corrupt" else json.dumps(whole_answer("".join(self.words))).encode()
        if self.fault not in ("die", "drip", "unfinished"):
            return web.Response(body=data, content_type="application/json", headers=self.headers)
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(len(data))})
        await response.prepare(request)
        for at in range(0, len(data) - 20, 20):
            await response.write(data[at : at + 20])
            if self.fault == "drip":
                await asyncio.sleep(DRIP_S)
        _hang_up(request)
        return response

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", **self.headers})
        await response.prepare(request)
        if self.fault == "corrupt":
            await response.write(b"data: {nonsense\n\n")
            return response
        if self.error:
            await response.write(b"data: " + json.dumps({"error": self.error}).encode() + b"\n\n")
            return response
        for at, word in enumerate(self.words):
            await response.write(_event({"content": word}))
            if self.fault == "die" and at == 1:
                _hang_up(request)
            if self.fault == "drip":
                await asyncio.sleep(DRIP_S)
            if self.rest is not None and at == 1:
                await self.rest.wait()
        if self.fault != "unfinished":
            await response.write(_event({}, "stop") + _usage() + b"data: [DONE]\n\n")
        return response


def _hang_up(request: web.Request) -> None:
    assert request.transport is not None
    request.transport.abort()
    raise asyncio.CancelledError


def _event(delta: dict[str, str], finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    event = {"id": "x", "object": "chat.completion.chunk", "choices": [choice]}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def _usage() -> bytes:
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    return b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n"


def whole_answer(text: str) -> dict[str, object]:
    message = {"role": "assistant", "content": text}
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 1,
        "model": "m-large",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
    }


def _embeddings(body: dict[str, object]) -> dict[str, object]:
    return {
        "object": "list",
        "model": body["model"],
        "data": [{"index": 0, "object": "embedding", "embedding": [0.5, 0.25]}],
        "usage": {"prompt_tokens": 2, "total_tokens": 2},
    }
