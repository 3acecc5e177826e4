"""A device that speaks the surface over a real socket: each path answers with what the test puts there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

HEADERS = {
    "x-causeway-decision": "dec_1",
    "x-causeway-route": "edge",
    "x-causeway-target": "small",
    "x-causeway-reason": "fast-path",
    "x-causeway-cache": "miss",
    "x-causeway-policy": "default@9f2c",
    "x-causeway-degraded": "false",
}


class Device:
    """`handler` answers every request; `requests` are their bodies, `paths` and `headers` what came with them."""

    def __init__(self) -> None:
        self.handler: Handler = answer_with({})
        self.requests: list[dict[str, object]] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.left = asyncio.Event()  # a client went away in the middle of an answer
        self.url = ""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.paths.append(f"{request.method} {request.path}")
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        body = await request.read()
        self.requests.append(json.loads(body) if body else {})
        try:
            return await self.handler(request)
        except (asyncio.CancelledError, ConnectionError):
            self.left.set()
            raise


@asynccontextmanager
async def running(socket: Path | None = None) -> AsyncIterator[Device]:
    device = Device()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", device.handle)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.UnixSite(runner, str(socket)) if socket else web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    device.url = f"unix://{socket}" if socket else f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield device
    finally:
        await runner.cleanup()


def answer_with(document: object, status: int = 200, headers: dict[str, str] | None = None) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response(document, status=status, headers={**HEADERS, **(headers or {})})

    return handler


def raw(body: bytes, status: int = 200, content_type: str = "text/html") -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, status=status, content_type=content_type)

    return handler


def stream_of(*writes: bytes, end: str = "done", headers: dict[str, str] | None = None) -> Handler:
    """Write each of `writes`; then end well ("done"), "drop" the connection, or "stall" until the client goes."""

    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={**HEADERS, **(headers or {}), "content-type": "text/event-stream"})
        await response.prepare(request)
        for data in writes:
            await response.write(data)
        if end == "drop":
            assert request.transport is not None
            request.transport.abort()
        elif end == "stall":
            await asyncio.Event().wait()
        return response

    return handler


def event(document: object) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def delta(text: str, index: int = 0, finish: str | None = None, **fields: object) -> bytes:
    content = {"content": text} if text else {}
    choice = {"index": index, "delta": {**content, **fields}, "finish_reason": finish}
    return event({"id": "a", "model": "small", "choices": [choice]})
