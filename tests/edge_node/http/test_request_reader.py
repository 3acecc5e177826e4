"""What the request reader keeps of the bodies that it has parsed."""

from __future__ import annotations

import asyncio
import gc
from types import FunctionType, ModuleType

from aiohttp import ClientSession, web

from causeway_server.edge_node.config.schema import ServerConfig
from causeway_server.edge_node.http.api import ParsedRequest, RequestReader

from .test_server import BODY, JSON


def reachable(root: object) -> list[object]:
    """Every object that `root` holds, directly or not; not the code."""
    seen: dict[int, object] = {}
    left = [root]
    while left:
        one = left.pop()
        if id(one) not in seen and not isinstance(one, type | FunctionType | ModuleType):
            seen[id(one)] = one
            left += gc.get_referents(one)
    return list(seen.values())


async def test_a_body_that_comes_again_is_parsed_no_third_time_and_its_digest_is_kept() -> None:
    reader = RequestReader(ServerConfig())
    parsed: list[ParsedRequest] = []

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        parsed.append(await reader.request(request, "chat"))
        return web.Response()

    server = await asyncio.get_running_loop().create_server(web.Server(handle), "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with ClientSession(f"http://{host}:{port}") as session:
        for body in (BODY, BODY + b" "):
            await (await session.post("/", data=body, headers=JSON)).read()
        assert not any(isinstance(one, ParsedRequest) for one in reachable(reader))
        for _ in range(2):
            await (await session.post("/", data=BODY, headers=JSON)).read()
    server.close()
    first, _, second, third = parsed
    assert second is third
    assert second is not first
    assert [one for one in reachable(reader) if isinstance(one, bytes) and b"messages" in one] == []
