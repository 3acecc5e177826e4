"""Uploaded files that jobs and lines of batches name, on a real Redis with the official client.

The load: devices of many tenants, each with files of its own. The faults: the file is another device's, expired, was
deleted before or after the job was accepted, is too large for a job, or is the input of a batch.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator

import aiohttp
import msgspec
import openai
import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.app import JobsGateway
from causeway_server.cloud_pool.batches.processor import BatchProcessor
from causeway_server.cloud_pool.core.subject import ErasureSubject
from causeway_server.cloud_pool.erasure import Erasure, job_kinds
from causeway_server.cloud_pool.jobs.http.job_api import JobCallers
from causeway_server.cloud_pool.jobs.submission import NamedFileReader, SubmissionParser
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.file_contents import FileContentLost
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.cloud_pool.tiers.config import TierConfig
from causeway_server.cloud_pool.tiers.tier import ChatFormat, Tier
from causeway_server.router.errors import CausewayError, NotFound
from tests.cloud_pool.batches.batch_support import create_from, input_line, process, rows, upload

from .conftest import Clock
from .gateway import identify, serving
from .redis_server import RedisServer
from .test_api import TIER

NOTE = b"Rent is due."
TIERS = {"large": TIER, "files": Tier(TierConfig(name="files", can=("file",)), ChatFormat("{{ messages }}"))}


@pytest.fixture
def config(config: JobsConfig) -> JobsConfig:
    return msgspec.structs.replace(config, max_body_bytes=20_000)


@pytest_asyncio.fixture
async def url(config: JobsConfig, clock: Clock) -> AsyncIterator[str]:
    gateway = JobsGateway(config, TIERS, JobCallers(identify), CollectorRegistry(), clock=clock)
    async with serving(gateway.api.handler) as found:
        yield found
    await gateway.close()


def client_of(url: str, token: str = "acme") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0)


def body_of(file_id: str) -> dict[str, object]:
    part = {"type": "file", "file": {"file_id": file_id}}
    return {"model": "large", "messages": [{"role": "user", "content": [part]}]}


async def submit(url: str, body: object, token: str = "acme", **headers: str) -> tuple[int, dict[str, object]]:
    sent = {"authorization": f"Bearer {token}", **{name.replace("_", "-"): value for name, value in headers.items()}}
    async with aiohttp.ClientSession(url) as http, http.post("/v1/jobs", json=body, headers=sent) as response:
        return response.status, await response.json()


def file_of(stored: bytes) -> dict[str, str]:
    found = json.loads(stored)["messages"][0]["content"][0]["file"]
    assert isinstance(found, dict)
    return found


async def test_a_job_has_the_bytes_of_its_file_and_its_repeat_is_known(url: str, stores: JobStores) -> None:
    async with client_of(url) as client:
        file = await client.files.create(file=("note.txt", NOTE), purpose="user_data")
        assert (file.purpose, file.filename, file.bytes) == ("user_data", "note.txt", len(NOTE))
        status, job = await submit(url, body_of(file.id), idempotency_key="once")
        assert status == 202, job
        await client.files.delete(file.id)
        (record,) = (await stores.jobs.claim("w", "large", ["standard"])).records
        encoded = base64.b64encode(NOTE).decode()
        assert file_of(record.body) == {"file_data": f"data:text/plain;base64,{encoded}", "filename": "note.txt"}
        status, again = await submit(url, body_of(file.id), idempotency_key="once")
        assert (status, again["id"]) == (202, job["id"])
        status, _ = await submit(url, body_of(file.id) | {"n": 2}, idempotency_key="once")
        assert status == 409
        status, refused = await submit(url, body_of(file.id))
        assert (status, refused["error"]["param"]) == (404, "messages[0].content[0].file.file_id")  # type: ignore[index]


async def test_a_job_has_the_tags_of_its_file(url: str, stores: JobStores) -> None:
    """They join its own; a file without tags changes nothing of the body."""
    async with client_of(url) as client:
        for tags, own, kept in (("B,a", ["c"], ["a", "b", "c"]), ("Private", None, ["private"]), ("", ["c"], ["c"])):
            file = await client.files.create(
                file=("note.txt", NOTE), purpose="user_data", extra_headers={"x-causeway-tags": tags}
            )
            hints = {} if own is None else {"causeway": {"tags": own}}
            status, _ = await submit(url, body_of(file.id) | hints)
            assert status == 202
            (record,) = (await stores.jobs.claim("w", "large", ["standard"])).records
            assert json.loads(record.body)["causeway"]["tags"] == kept


async def test_a_malformed_tag_of_an_upload_is_refused_with_the_file(url: str) -> None:
    async with client_of(url) as client:
        with pytest.raises(openai.BadRequestError, match="x-causeway-tags"):
            await client.files.create(
                file=("note.txt", NOTE), purpose="user_data", extra_headers={"x-causeway-tags": "a b"}
            )
        assert [one async for one in client.files.list()] == []


async def test_only_its_owner_names_a_file_and_reads_no_content_back(url: str) -> None:
    async with client_of(url) as client, client_of(url, "other") as other, client_of(url, "acme:chat") as chat:
        file = await client.files.create(file=("note.txt", NOTE), purpose="vision")
        for call in (other.files.retrieve, other.files.delete, other.files.content):
            with pytest.raises(openai.NotFoundError):
                await call(file.id)
        assert (await submit(url, body_of(file.id), "other"))[0] == 404
        with pytest.raises(openai.BadRequestError, match="cannot be downloaded"):
            await client.files.content(file.id)
        assert [one.id async for one in client.files.list(purpose="vision")] == [file.id]
        # A token that may only chat names files, and makes no batches.
        theirs = await chat.files.create(file=("note.txt", NOTE), purpose="assistants")
        assert (await chat.files.delete(theirs.id)).deleted
        with pytest.raises(openai.PermissionDeniedError):
            await chat.files.create(file=("in.jsonl", NOTE), purpose="batch")
        with pytest.raises(openai.PermissionDeniedError):
            await chat.batches.list()


async def test_a_file_lives_as_long_as_its_upload_says(url: str, clock: Clock) -> None:
    """Its owner does not see it a moment longer, whenever a worker deletes its content."""
    async with client_of(url) as client:
        terms = {"anchor": "created_at", "seconds": 3600}
        file = await client.files.create(file=("note.txt", NOTE), purpose="user_data", expires_after=terms)  # type: ignore[arg-type]
        assert (file.expires_at or 0) - file.created_at == 3600
        clock.now += 3599
        assert (await submit(url, body_of(file.id)))[0] == 202
        clock.now += 1
        assert (await submit(url, body_of(file.id)))[0] == 404
        assert [one async for one in client.files.list()] == []
        with pytest.raises(openai.BadRequestError, match="604800"):
            await client.files.create(
                file=("note.txt", NOTE), purpose="user_data", expires_after={"anchor": "created_at", "seconds": 604801}
            )


async def test_what_cannot_be_named_is_refused_at_its_part(url: str) -> None:
    async with client_of(url) as client:
        large = await client.files.create(file=("large.txt", b"x" * 16_000), purpose="user_data")
        lines = await client.files.create(file=("in.jsonl", NOTE), purpose="batch")
        for name, status, words in (
            (large.id, 413, "20000"),
            (lines.id, 400, "purpose batch"),
            ("file-..", 404, "no file"),
            ("file-a b", 404, "no file"),
        ):
            found, answer = await submit(url, body_of(name))
            assert (found, words in str(answer)) == (status, True), answer
            assert "messages[0].content[0].file.file_id" in str(answer)
        with pytest.raises(openai.BadRequestError, match="empty"):
            await client.files.create(file=("note.txt", b""), purpose="user_data")
        with pytest.raises(openai.BadRequestError, match="batch, user_data, vision, assistants"):
            await client.files.create(file=("note.txt", NOTE), purpose="fine-tune")
        named = await client.files.create(file=("../../etc/passwd", NOTE), purpose="user_data")
        assert named.filename == "passwd"


@pytest.mark.parametrize("keeps_record", [False, True], ids=["deleted", "content lost"])
async def test_a_file_that_goes_before_it_is_read_is_told_from_one_whose_content_is_lost(
    url: str, stores: JobStores, redis_server: RedisServer, keeps_record: bool
) -> None:
    """A file that its owner deleted is not there any more; one that another program damaged is a fault of the store."""
    async with client_of(url) as client:
        file = await client.files.create(file=("note.txt", NOTE), purpose="user_data")
    keys = [stores.database.key("content", file.id)] + [stores.database.key("file", file.id)] * (not keeps_record)

    def delete(_size: int) -> None:  # between the look at the record and the read
        with redis_server.client() as other:
            assert other.unlink(*keys) == len(keys)

    reader = NamedFileReader(stores.files)
    expected: type[CausewayError] = FileContentLost if keeps_record else NotFound
    with pytest.raises(expected, match=file.id) as caught:
        await reader.inline(json.dumps(body_of(file.id)).encode(), "acme/1", 20_000, delete)
    assert ("deleted in the meantime" in caught.value.message) == (not keeps_record)


async def test_a_line_of_a_batch_names_a_file_and_one_whose_file_is_gone_fails_alone(
    url: str, stores: JobStores, clock: Clock, config: JobsConfig
) -> None:
    async with client_of(url) as client:
        file = await client.files.create(file=("note.txt", NOTE), purpose="user_data")
    lines = [input_line("kept", body=body_of(file.id)), input_line("gone", body=body_of("file-gone")), input_line("x")]
    batch = await create_from(stores, await upload(stores, "\n".join(lines).encode(), "acme/1"))
    processor = BatchProcessor(stores, SubmissionParser(config, TIERS), config)
    done = await process(stores, processor, clock, batch.id)
    assert (done.completed, done.failed) == (2, 1)
    (failed,) = await rows(stores, done, "error")
    assert failed["custom_id"] == "gone"
    assert "messages[0].content[0].file.file_id" in str(failed["error"])
    assert "not_found" in str(failed["error"])


async def test_named_files_count_for_their_tenant_and_are_erased_with_it(url: str, stores: JobStores) -> None:
    async with client_of(url) as client:
        file = await client.files.create(file=("note.txt", NOTE), purpose="user_data")
        assert (await stores.files.usage("acme/1")).bytes == len(NOTE)
        receipt = await Erasure(stores.database, job_kinds(stores)).erase(ErasureSubject("acme"))
        assert receipt.erased["files"] == 1
        assert (await stores.files.usage("acme/1")).store_bytes == 0
        with pytest.raises(openai.NotFoundError):
            await client.files.retrieve(file.id)
