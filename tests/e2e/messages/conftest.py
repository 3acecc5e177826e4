"""The device, with a model that plays what a test wrote, and a gateway whose only tier is that device."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from anthropic import AsyncAnthropic

from causeway_server.edge_node.backends.backend import BackendRequest
from causeway_server.router.types import Chunk, Request
from tests.cloud_pool.upstreams.http_gateway import http_tier, serving
from tests.edge_node.device import Answer, Device, running
from tests.edge_node.scripted import ScriptedEngine
from tests.own_task import in_own_task


class PlayedModel(ScriptedEngine):
    """Answers each request with the next of `answers`, the last one again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Sequence[Chunk]] = []

    async def _answer(self, call: BackendRequest) -> AsyncIterator[Chunk]:
        if not self.answers or self.fault != "none":
            async for chunk in super()._answer(call):
                yield chunk
            return
        for chunk in self.answers[0] if len(self.answers) == 1 else self.answers.pop(0):
            yield chunk


class Surface(msgspec.Struct, frozen=True):
    """A server that speaks Messages. `model`: the name of the scripted model there."""

    name: str
    url: str
    model: str
    played: PlayedModel
    device: Device
    http: aiohttp.ClientSession
    client: AsyncAnthropic

    @property
    def asked(self) -> Request:
        """The request that the model got last."""
        return self.played.calls[-1].request

    def body(self, **fields: object) -> dict[str, Any]:
        """A short request; a field of None is left out."""
        body = {"model": self.model, "max_tokens": 50, "messages": [{"role": "user", "content": "hi"}]} | fields
        return {name: value for name, value in body.items() if value is not None}

    async def post(self, body: object, path: str = "/v1/messages", **headers: str) -> Answer:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.post(self.url + path, json=body, headers=names) as response:
            return Answer(response.status, dict(response.headers), await response.read())

    async def get(self, path: str, **headers: str) -> Answer:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        async with self.http.get(self.url + path, headers=names) as response:
            return Answer(response.status, dict(response.headers), await response.read())


on_edge = pytest.mark.parametrize("surface", ["edge"], indirect=True)


@pytest.fixture(params=["edge", "gateway"])
async def surface(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Surface]:
    played = PlayedModel()
    async with AsyncExitStack() as stack:
        device = await stack.enter_async_context(running(tmp_path, engine=played))
        url, model = f"http://127.0.0.1:{device.app.port}", "small"
        if request.param == "gateway":
            tier = http_tier(f"{url}/v1", model=model)
            gateway = await stack.enter_async_context(in_own_task(serving(tmp_path, tier)))
            url, model = gateway.app.url.removesuffix("/v1"), "large"
        client = AsyncAnthropic(base_url=url, api_key="any", max_retries=0)
        await stack.enter_async_context(client)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        yield Surface(request.param, url, model, played, device, http, client)
