"""The order in which a gateway ends: nobody may use a connection that is closed."""

from __future__ import annotations

import logging
import time

import anyio
import pytest
from anyio import to_thread

from cloud_pool.app import App, build
from cloud_pool.config.schema import Config, ServerConfig, TierConfig
from router.errors import CausewayError, CloudUnreachable

CONFIG = Config(
    server=ServerConfig(port=0), tiers=(TierConfig(name="large", artifact="assistant-large", triton="127.0.0.1:1"),)
)


async def asked_last(app: App, found: list[str]) -> None:
    """Background work that still asks its Triton on its way out."""
    pool = app.pools.by_tier["large"]
    with pool.lease() as lease:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                for _ in range(20):
                    await to_thread.run_sync(time.monotonic)
                try:
                    await lease.triton.probe(pool.model)
                except CausewayError as error:
                    found.append(error.code)


async def test_the_background_work_ends_before_its_connections(caplog: pytest.LogCaptureFixture) -> None:
    """A probe that comes late finds its channel open; one that was only just begun leaves no error."""
    found: list[str] = []
    async with anyio.create_task_group() as tasks:
        app = build(CONFIG, tasks)
        await app.start()
        tasks.start_soon(asked_last, app, found)
        await anyio.lowlevel.checkpoint()
        tasks.start_soon(app.pools.by_tier["large"].check)
        await app.stop()
    await app.close()
    assert found == [CloudUnreachable.code]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
