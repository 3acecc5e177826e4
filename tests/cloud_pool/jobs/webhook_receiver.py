"""A webhook receiver on loopback that records deliveries and answers with scripted statuses."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web


class Receiver:
    def __init__(self) -> None:
        self.arrived: list[tuple[dict[str, str], bytes]] = []
        self.ids_by_job: defaultdict[str, set[str]] = defaultdict(set)  # a retry has the same id
        self.answers: list[int] = []  # statuses, in order; then `status`
        self.status = 200
        self.port = 0
        self.connections = 0
        self.go_on = asyncio.Event()  # until it is set, nothing is answered
        self.go_on.set()

    @property
    def deliveries(self) -> int:
        return len(self.arrived)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        self.arrived.append((dict(request.headers), body))
        document = json.loads(body)
        job = document["data"]["id"]
        self.ids_by_job[job].add(request.headers["webhook-id"])
        await self.go_on.wait()
        status = self.answers.pop(0) if self.answers else self.status
        headers = {"location": f"http://127.0.0.1:{self.port}/elsewhere"} if status in (301, 302, 307, 308) else {}
        return web.Response(status=status, headers=headers, body=b"x" * 100_000)


@asynccontextmanager
async def receiving(
    host: str = "127.0.0.1", tls: ssl.SSLContext | None = None, port: int = 0
) -> AsyncIterator[Receiver]:
    receiver = Receiver()
    runner = web.ServerRunner(web.Server(receiver.handle))
    await runner.setup()
    site = web.TCPSite(runner, host, port, ssl_context=tls)
    await site.start()
    receiver.port = runner.addresses[0][1]
    try:
        yield receiver
    finally:
        await runner.cleanup()
