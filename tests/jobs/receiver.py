"""Somebody's webhook endpoint on loopback: notes what arrives, answers as told."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


class Receiver:
    def __init__(self) -> None:
        self.arrived: list[tuple[dict[str, str], bytes]] = []
        self.answers: list[int] = []  # statuses, in order; then 200
        self.port = 0
        self.connections = 0

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.arrived.append((dict(request.headers), await request.read()))
        status = self.answers.pop(0) if self.answers else 200
        headers = {"location": f"http://127.0.0.1:{self.port}/elsewhere"} if status in (301, 302, 307, 308) else {}
        return web.Response(status=status, headers=headers, body=b"x" * 100_000)


@asynccontextmanager
async def receiving() -> AsyncIterator[Receiver]:
    receiver = Receiver()
    runner = web.ServerRunner(web.Server(receiver.handle))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    receiver.port = runner.addresses[0][1]
    try:
        yield receiver
    finally:
        await runner.cleanup()
