"""A gateway, or what a worker and a stream run in, whose background task fails.

`python -m tests.cloud_pool.http.failing_process KIND`.
"""

from __future__ import annotations

import asyncio
import sys

from anyio.abc import TaskGroup

from causeway_server.cloud_pool.app import build
from causeway_server.cloud_pool.cli.process import until_stopped
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.http.config import ServerConfig
from causeway_server.cloud_pool.lifetime import Closing, run_with_tasks
from causeway_server.router.serving.logs import log_crashes, start_log
from causeway_server.router.serving.process import run_fast

from ..unreachable import unreachable_tier


async def fail() -> None:
    raise RuntimeError("a fault of ours")


async def run(kind: str, stop: asyncio.Event) -> None:
    async def work(tasks: TaskGroup, closing: list[Closing]) -> None:
        if kind == "gateway":
            app = build(Config(server=ServerConfig(port=0), tiers=(unreachable_tier(),)), tasks)
            closing.append(app.close)
            await app.start()
        print("ready", flush=True)
        tasks.start_soon(fail)
        await stop.wait()

    await run_with_tasks(work)


if __name__ == "__main__":
    start_log("info", "json")
    log_crashes()
    until_stopped(lambda stop: run(sys.argv[1], stop), run_fast)
