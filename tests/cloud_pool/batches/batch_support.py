"""Batches for tests: input files, their processing, and what came of each line."""

from __future__ import annotations

import json
from collections.abc import Iterable

from causeway_server.cloud_pool.batches.processor import BatchProcessor
from causeway_server.cloud_pool.core.principal import NO_GRANTS
from causeway_server.cloud_pool.storage.batch_store import Batch, is_final
from causeway_server.cloud_pool.storage.file_store import StoredFile
from causeway_server.cloud_pool.storage.stores import JobStores
from tests.cloud_pool.jobs.conftest import Clock

OWNER = "acme/1"
_BODY = {"model": "large", "messages": [{"role": "user", "content": "hi"}]}


def input_line(custom_id: str, **changes: object) -> str:
    row = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": _BODY}
    return json.dumps(row | changes)


def input_file(lines: int) -> bytes:
    return "\n".join(input_line(str(at)) for at in range(1, lines + 1)).encode()


async def upload(stores: JobStores, content: bytes, owner: str = OWNER) -> StoredFile:
    async with stores.files.write(owner, len(content)) as writer:
        await writer.write(content)
        return await writer.finish("in.jsonl", "batch")


async def create_batch(stores: JobStores, lines: int, owner: str = OWNER, name: str = "batch_1") -> Batch:
    file = await upload(stores, input_file(lines), owner)
    return await create_from(stores, file, name)


async def create_from(stores: JobStores, file: StoredFile, name: str = "batch_1") -> Batch:
    return await stores.batches.create(
        name, file.owner, file.id, "/v1/chat/completions", b"null", "digest", grants=NO_GRANTS
    )


async def answer_jobs(stores: JobStores, limit: int = 100) -> list[str]:
    """Claim and answer queued jobs; return their ids."""
    claimed = (await stores.jobs.claim("w", "large", ["bulk"] * limit)).records
    for record in claimed:
        await stores.jobs.succeed(record.id, record.fence, json.dumps({"id": record.id}).encode())
    return [record.id for record in claimed]


async def process(stores: JobStores, processor: BatchProcessor, clock: Clock, name: str = "batch_1") -> Batch:
    """Advance a batch to its end, answering its jobs."""
    for _ in range(10_000):
        batch = await stores.batches.lookup(name)
        assert batch is not None
        if is_final(batch.state):
            return batch
        await processor.step()
        await answer_jobs(stores)
        clock.now += 1.0
    raise AssertionError(f"{name} did not end")


async def rows(stores: JobStores, batch: Batch, part: str) -> list[dict[str, object]]:
    """The lines of a batch's output or error file."""
    name = batch.output if part == "output" else batch.errors
    if not name:
        return []
    file = await stores.files.get(name, batch.owner)
    content = b"".join([piece async for piece in stores.files.read(file)])
    assert len(content) == file.bytes
    return [json.loads(row) for row in content.splitlines()]


async def custom_ids(stores: JobStores, batch: Batch, part: str) -> list[str]:
    return [str(row["custom_id"]) for row in await rows(stores, batch, part)]


def numbers(lines: Iterable[int]) -> list[str]:
    return [str(at) for at in lines]
