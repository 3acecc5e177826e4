"""The cloud backend with a token that changes, against a real server that checks it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from causeway_server.edge_node.backends.backend import BackendRequest
from causeway_server.edge_node.backends.cloud.backend import CloudBackend
from causeway_server.edge_node.config.schema import CloudConfig
from causeway_server.router.errors import CloudRejected, CloudTimeout
from causeway_server.router.types import Message, Request, Target

ANSWER = {
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 1, "completion_tokens": 1},
}


class Gateway:
    """Accepts one token, and remembers what came."""

    def __init__(self) -> None:
        self.accepted = "new"
        self.tokens: list[str] = []
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Gateway]:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._serve)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _serve(self, http: web.Request) -> web.Response:
        token = http.headers.get("Authorization", "").removeprefix("Bearer ")
        self.tokens.append(token)
        return web.json_response(ANSWER, status=200 if token == self.accepted else 401)


class Renewed:
    """Credentials: "old", and "new" after a renewal. `useless`: there is never another token."""

    def __init__(self, *, useless: bool = False, hangs: bool = False) -> None:
        self.token = "old"
        self.certificate_file = ""
        self.useless = useless
        self.hangs = hangs
        self.refused: list[str] = []

    async def renew(self, refused: str) -> bool:
        self.refused.append(refused)
        if self.hangs:
            await asyncio.Event().wait()
        if not self.useless:
            self.token = "new"
        return not self.useless


@asynccontextmanager
async def asking(credentials: Renewed | None, api_key: str = "") -> AsyncIterator[tuple[CloudBackend, Gateway]]:
    async with Gateway().running() as gateway:
        backend = CloudBackend(CloudConfig(url=gateway.url, key=api_key), credentials=credentials)
        await backend.start()
        try:
            yield backend, gateway
        finally:
            await backend.close()


async def ask(backend: CloudBackend, timeout_s: float = 20.0) -> None:
    now = time.monotonic()
    request = Request(kind="chat", model="auto", messages=(Message(role="user", content="?"),))
    target = Target("large", "cloud", "m-large")
    call = BackendRequest("id", request, target, deadline=now + timeout_s, first_token_by=now + timeout_s)
    assert [chunk async for chunk in backend.generate(call)]


async def test_a_refused_token_is_renewed_once_and_the_request_repeated() -> None:
    credentials = Renewed()
    async with asking(credentials) as (backend, gateway):
        await ask(backend)
        await ask(backend)
        assert gateway.tokens == ["old", "new", "new"]
        assert credentials.refused == ["old"]
        assert backend.health.problems == ()


async def test_a_renewed_token_that_is_refused_is_not_renewed_again() -> None:
    async with asking(Renewed()) as (backend, gateway):
        gateway.accepted = "another"
        with pytest.raises(CloudRejected):
            await ask(backend)
        assert gateway.tokens == ["old", "new"]
        assert any("causeway-edge fleet status" in problem for problem in backend.health.problems)


async def test_without_another_token_the_request_is_not_repeated() -> None:
    async with asking(Renewed(useless=True)) as (backend, gateway):
        with pytest.raises(CloudRejected):
            await ask(backend)
        assert gateway.tokens == ["old"]


async def test_a_renewal_takes_no_longer_than_the_request_may() -> None:
    async with asking(Renewed(hangs=True)) as (backend, _):
        with pytest.raises((CloudRejected, CloudTimeout)):
            await ask(backend, timeout_s=0.2)


async def test_the_next_request_uses_a_token_that_changed_meanwhile() -> None:
    """Without a 401, and without a token at all at first."""
    credentials = Renewed()
    credentials.token = ""
    async with asking(credentials) as (backend, gateway):
        gateway.accepted = ""
        await ask(backend)
        credentials.token = gateway.accepted = "newer"
        await ask(backend)
        assert gateway.tokens == ["", "newer"]
        assert credentials.refused == []


async def test_a_probe_renews_too() -> None:
    async with asking(Renewed()) as (backend, gateway):
        assert await backend.probe()
        assert gateway.tokens == ["old", "new"]
        assert backend.health.problems == ()


async def test_a_configured_key_stays() -> None:
    async with asking(None, api_key="key") as (backend, gateway):
        with pytest.raises(CloudRejected):
            await ask(backend)
        assert gateway.tokens == ["key"]
        assert any("clouds.main.key" in problem for problem in backend.health.problems)
