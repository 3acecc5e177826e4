"""The jobs API on a real HTTP socket; a bearer token is the name of its tenant."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from causeway_server.cloud_pool.core.principal import Grants, Principal
from causeway_server.router.errors import AuthenticationFailed, CausewayError, NotFound
from causeway_server.router.serving.aiohttp_connection import aiohttp_response, whole_response
from causeway_server.router.serving.responses import Handler, error_response

EVERYTHING = Grants(priority="interactive", critical=True)
GRANTS = {"limited": Grants(models=("large",), modalities=("text",)), "modest": Grants(priority="bulk")}
"""What some tenants' tokens grant; all others get everything."""


def identify(http: web.BaseRequest) -> Principal:
    """Return tenant `T` for the token `T`; `T:chat` has the scope chat instead of jobs."""
    found = http.headers.get("authorization", "").removeprefix("Bearer ")
    if not found:
        raise AuthenticationFailed("send a token")
    tenant, _, scope = found.partition(":")
    return Principal(tenant, "1", frozenset({scope or "jobs"}), GRANTS.get(tenant, EVERYTHING))


@asynccontextmanager
async def serving(handler: Callable[[web.BaseRequest], Handler | None]) -> AsyncIterator[str]:
    """Serve `handler` and yield the URL."""

    async def handle(http: web.BaseRequest) -> web.StreamResponse:
        try:
            found = handler(http)
            if found is None:
                raise NotFound("nothing here")
            return aiohttp_response(await found(http))
        except CausewayError as error:
            return whole_response(error_response(error))

    runner = web.ServerRunner(web.Server(handle, handler_cancellation=True))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
