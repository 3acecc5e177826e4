"""Records of every kind as this version writes them.

`python -m tests.cloud_pool.storage.layout_records` fills layouts/<layout>.resp.
Run it once, when the layout of jobs is raised, and commit the file: `test_upgrade` reads it with every later version.
The file is what Redis itself writes as its append-only file: commands in RESP, times to live left out.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.app import JobsGateway
from causeway_server.cloud_pool.batches.processor import BatchProcessor
from causeway_server.cloud_pool.jobs.http.job_api import JobCallers
from causeway_server.cloud_pool.jobs.submission import SubmissionParser
from causeway_server.cloud_pool.redis.keys import JOBS_LAYOUT
from causeway_server.cloud_pool.storage.config import JobsConfig, WebhookConfig
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.router.errors import CloudFailed, RateLimited
from tests.cloud_pool.jobs.conftest import Clock
from tests.cloud_pool.jobs.gateway import identify, serving
from tests.cloud_pool.jobs.test_api import TIER
from tests.redis_server import RedisServer

FOLDER = Path(__file__).parent / "layouts"
TIERS = {"large": TIER}
WEBHOOKS = WebhookConfig(allowed_networks=("127.0.0.0/8",), allow_http=True)
CHAT = {"model": "large", "messages": [{"role": "user", "content": "a question"}]}
RECEIVER = "http://127.0.0.1:9/"
NAMES = ("succeeded", "dead", "waiting", "limited", "running", "queued")
LINES = 3


def config_of(url: str) -> JobsConfig:
    return JobsConfig(redis=url, webhooks=WEBHOOKS, max_attempts=2, lease_s=3.0, backoff_s=0.001)


async def write_records(url: str, clock: Clock) -> dict[str, str]:
    """Bring one job into each state of NAMES, and a batch into progress. Returns their ids by name."""
    config = config_of(url)
    gateway = JobsGateway(config, TIERS, JobCallers(identify), CollectorRegistry(), clock=clock)
    stores = JobStores.open(config, clock)
    await stores.durability.wait()
    ids: dict[str, str] = {}
    async with serving(gateway.api.handler) as address, aiohttp.ClientSession(address) as http:
        for name in NAMES:
            ids[name] = await _submit(http, name, "limited" if name == "limited" else "acme")
            if name != "queued":
                await _advance(stores, name)
            clock.now += 1.0
        ids["batch"] = await _create_batch(http)
    processor = BatchProcessor(stores, SubmissionParser(config, TIERS), config)
    for _ in range(3):  # it is checked, and its lines become jobs
        await processor.step()
        clock.now += 1.0
    await stores.close()
    await gateway.close()
    return ids


async def _submit(http: aiohttp.ClientSession, name: str, tenant: str) -> str:
    headers = {"authorization": f"Bearer {tenant}", "idempotency-key": name}
    async with http.post("/v1/jobs", json=CHAT | {"webhook": RECEIVER}, headers=headers) as response:
        return str((await response.json())["id"])


async def _advance(stores: JobStores, name: str) -> None:
    (record,) = (await stores.jobs.claim("a worker", "large", ["standard"])).records
    if name == "succeeded":
        await stores.jobs.succeed(record.id, record.fence, b'{"answer":1}')
    elif name == "dead":
        await stores.jobs.postpone(record.id, record.fence, CloudFailed("broken"), 0.0, counts=True)
        await stores.jobs.promote_and_expire()
        await _advance_again(stores)
    elif name == "waiting":
        await stores.jobs.postpone(record.id, record.fence, CloudFailed("broken"), 60.0, counts=True)
    elif name == "limited":
        error = RateLimited("over your budget", retry_after_s=60.0)
        await stores.jobs.postpone(record.id, record.fence, error, 60.0, counts=False, park=True)


async def _advance_again(stores: JobStores) -> None:
    (record,) = (await stores.jobs.claim("a worker", "large", ["standard"])).records
    await stores.jobs.postpone(record.id, record.fence, CloudFailed("broken"), 0.0, counts=True)


async def _create_batch(http: aiohttp.ClientSession) -> str:
    rows = [
        {"custom_id": f"line {number}", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}
        for number in range(LINES)
    ]
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", "\n".join(map(json.dumps, rows)), filename="lines.jsonl")
    headers = {"authorization": "Bearer acme"}
    async with http.post("/v1/files", data=form, headers=headers) as response:
        file = (await response.json())["id"]
    body = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    async with http.post("/v1/batches", json=body, headers=headers) as response:
        return str((await response.json())["id"])


def commands_of(resp: bytes) -> Iterator[list[bytes]]:
    """Parse commands in RESP."""
    at = 0
    while at < len(resp):
        end = resp.index(b"\r\n", at)
        count, at = int(resp[at + 1 : end]), end + 2
        command = []
        for _ in range(count):
            end = resp.index(b"\r\n", at)
            size, at = int(resp[at + 1 : end]), end + 2
            command.append(resp[at : at + size])
            at += size + 2
        yield command


def as_resp(command: list[bytes]) -> bytes:
    return b"*%d\r\n" % len(command) + b"".join(b"$%d\r\n%s\r\n" % (len(part), part) for part in command)


def dump(server: RedisServer, folder: Path) -> bytes:
    """Return the commands that rebuild the server's data, without times to live: those of the file would be over."""
    with server.client() as client:
        client.config_set("aof-use-rdb-preamble", "no")
        client.bgrewriteaof()
        while (info := client.info("persistence"))["aof_rewrite_in_progress"] or info["aof_rewrite_scheduled"]:
            time.sleep(0.01)
    (base,) = (folder / "appendonlydir").glob("*.base.aof")
    kept = (each for each in commands_of(base.read_bytes()) if each[0].upper() not in (b"PEXPIREAT", b"SELECT"))
    return b"".join(as_resp(command) for command in kept)


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        server = RedisServer(Path(folder))
        try:
            clock = Clock()
            ids = await write_records(server.url, clock)
            with server.client() as client:
                client.hset("test", mapping=ids | {"now": str(clock.now)})
            (FOLDER / f"{JOBS_LAYOUT}.resp").write_bytes(dump(server, Path(folder)))
        finally:
            server.kill()


if __name__ == "__main__":
    asyncio.run(main())
