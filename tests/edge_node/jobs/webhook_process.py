"""End a job whose webhook goes to URL, or send what waits.

`python -m tests.edge_node.jobs.webhook_process FOLDER [URL]`.
With a URL it prints `ended` once the end of the job is committed, and hangs; without, it runs the sender until killed.
"""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import msgspec

from causeway_server.edge_node.clock import system_clock
from causeway_server.edge_node.config.schema import OutboxConfig, OutboxWebhookConfig
from causeway_server.edge_node.jobs.record import JobAnswer
from causeway_server.edge_node.jobs.run import JobFeed
from causeway_server.edge_node.jobs.store import JobOutbox
from causeway_server.edge_node.jobs.webhooks import ReceiverQueue
from causeway_server.router.serving.webhooks import WebhookSender

from .killed_outbox import new_job

HERE = OutboxWebhookConfig(allowed_networks=("127.0.0.0/8",), allow_http=True)


async def end(store: JobOutbox, url: str) -> None:
    await store.accept(msgspec.structs.replace(new_job(store, "one"), webhook=url), b"the request")
    (claimed,) = await store.claim("edge", 1)
    await store.succeed(claimed.job, JobAnswer(b"the answer", "miss", "edge", "d"))
    print("ended", flush=True)
    await asyncio.Event().wait()


async def main(folder: str, url: str = "") -> None:
    store = JobOutbox(Path(folder), OutboxConfig(webhooks=HERE), system_clock())
    store.start()
    await store.open()
    if url:
        await end(store, url)
    queue = ReceiverQueue(store, HERE, system_clock(), random.Random(7))
    await WebhookSender(queue, HERE, change=JobFeed().change).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
