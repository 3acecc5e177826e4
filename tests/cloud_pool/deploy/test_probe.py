"""The exec probe."""

from __future__ import annotations

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from anyio import to_thread

from causeway_server.cloud_pool.cli.readiness_probe import main


async def test_the_probe_reports_ready_not_ready_and_unreachable(capfd: pytest.CaptureFixture[str]) -> None:
    status = 200

    async def ready(_: web.Request) -> web.Response:
        return web.json_response({"tiers": {"large": {"error": "engine_unavailable"}}}, status=status)

    app = web.Application()
    app.router.add_get("/readyz", ready)
    async with TestServer(app) as server:
        url = str(server.make_url("/readyz"))
        assert await to_thread.run_sync(main, [url]) == 0
        status = 503
        assert await to_thread.run_sync(main, [url]) == 1
        assert "engine_unavailable" in capfd.readouterr().err
    assert await to_thread.run_sync(main, [url]) == 1
