"""A webhook sender as a process that can be killed: `python -m tests.cloud_pool.jobs.webhook_process URL PREFIX`."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.router.serving.webhooks import WebhookSender

from .test_webhooks import LOOPBACK


async def main(url: str, prefix: str) -> None:
    patient = msgspec.structs.replace(LOOPBACK, timeout_s=600.0)
    config = JobsConfig(redis=url, key_prefix=prefix, webhooks=patient)
    stores = JobStores.open(config, lambda: 1_800_000_000.0)
    await WebhookSender(stores.outbox, config.webhooks).run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
