"""The order in which a gateway shuts down."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import time
from contextlib import closing

import anyio
import pytest
from anyio import to_thread

from causeway_server.cloud_pool.app import App, build
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.http.config import ServerConfig
from causeway_server.router.errors import CausewayError, CloudUnreachable
from tests.check.sources import ROOT

from ..unreachable import unreachable_tier

CONFIG = Config(server=ServerConfig(port=0), tiers=(unreachable_tier(),))


async def probe_on_exit(app: App, codes: list[str]) -> None:
    """Background work that still probes its Triton while it is cancelled."""
    pool = app.runtime.pools.by_tier["large"]
    with closing(pool.lease()) as lease:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                for _ in range(20):
                    await to_thread.run_sync(time.monotonic)
                try:
                    await lease.upstream.probe(pool.configured.model)
                except CausewayError as error:
                    codes.append(error.code)


async def test_background_work_ends_before_its_connections_close(caplog: pytest.LogCaptureFixture) -> None:
    """A late probe finds its channel open; one that has only just begun leaves no error."""
    codes: list[str] = []
    async with anyio.create_task_group() as tasks:
        app = build(CONFIG, tasks)
        await app.start()
        tasks.start_soon(probe_on_exit, app, codes)
        await anyio.lowlevel.checkpoint()
        tasks.start_soon(app.runtime.pools.by_tier["large"].check)
        await app.stop()
    await app.close()
    assert codes == [CloudUnreachable.code]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gateway", "background"])
def test_a_background_task_that_fails_ends_the_process_with_a_status_and_a_line(kind: str) -> None:
    """`background`: what a worker and a stream run in."""
    process = subprocess.run(
        [sys.executable, "-m", "tests.cloud_pool.http.failing_process", kind],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (process.returncode, process.stdout) == (1, "ready\n")
    (line,) = [record for record in map(json.loads, process.stderr.splitlines()) if record["level"] == "critical"]
    assert line["message"] == "The process failed."
    assert "RuntimeError" in str(line)
