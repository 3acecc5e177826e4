"""OpenAI's files and batches with OpenAI's own client, over real sockets and a real Redis."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, cast

import aiohttp
import anyio
import msgspec
import openai
import openai.types.responses
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from causeway_server.cloud_pool.app import JobsGateway
from causeway_server.cloud_pool.background import WorkerRuntime
from causeway_server.cloud_pool.batches.input_file import InputCheck, LineSplitter
from causeway_server.cloud_pool.batches.processor import BatchProcessor
from causeway_server.cloud_pool.jobs.http.job_api import JobCallers
from causeway_server.cloud_pool.jobs.submission import SubmissionParser
from causeway_server.cloud_pool.jobs.worker.execution import WorkerSlots
from causeway_server.cloud_pool.jobs.worker.runner import JobRun
from causeway_server.cloud_pool.storage.batch_store import BATCH_TRANSITIONS, is_final, source_states
from causeway_server.cloud_pool.storage.config import BatchConfig, JobsConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.cloud_pool.tiers.config import TierConfig
from causeway_server.cloud_pool.tiers.tier import ChatFormat, Tier
from causeway_server.router.errors import ContextLengthExceeded, ModelNotFound
from causeway_server.router.jobs.submission import Endpoint
from causeway_server.router.types import Chunk, Embeddings, Usage
from tests.cloud_pool.jobs.conftest import Clock, until
from tests.cloud_pool.jobs.gateway import identify, serving
from tests.cloud_pool.jobs.scripted_worker import ScriptedRunner, answers
from tests.cloud_pool.jobs.test_api import SMALL, TIER

VECTORS = Tier(TierConfig(name="vectors", can=("embedding",)), ChatFormat("{{ messages }}"))
TIERS = {"large": TIER, "big": TIER, "small": SMALL, "vectors": VECTORS}
BODY = {"model": "big", "messages": [{"role": "user", "content": "hi"}]}

NO_FILE = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'


def line(custom_id: str, **changes: object) -> str:
    row = {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": BODY}
    return json.dumps(row | changes)


@pytest.fixture
def config(config: JobsConfig) -> JobsConfig:
    batches = BatchConfig(max_file_bytes=20_000, max_files=6, max_lines=20, max_line_bytes=2000, max_open_jobs=3)
    return msgspec.structs.replace(config, batches=batches, drain_s=0.0)


@pytest_asyncio.fixture
async def url(config: JobsConfig, clock: Clock) -> AsyncIterator[str]:
    gateway = JobsGateway(config, TIERS, JobCallers(identify), CollectorRegistry(), clock=clock)
    async with serving(gateway.api.handler) as found:
        yield found
    await gateway.close()


@pytest_asyncio.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="kiosk", max_retries=0) as found:
        yield found


@pytest.fixture
def processor(config: JobsConfig, stores: JobStores) -> BatchProcessor:
    return BatchProcessor(stores, SubmissionParser(config, TIERS), config)


async def batch_of(
    client: openai.AsyncOpenAI, *lines: str, endpoint: Endpoint = "/v1/chat/completions"
) -> openai.types.Batch:
    file = await client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id,
        endpoint=cast("Any", endpoint),  # /v1/messages is none of OpenAI's
        completion_window="24h",
        metadata={"for": "a test"},
    )


async def content(client: openai.AsyncOpenAI, file: str | None) -> list[dict[str, object]]:
    assert file is not None
    return [json.loads(row) for row in (await client.files.content(file)).text.splitlines()]


class RunningRuntime:
    """A WorkerRuntime for a `with` block."""

    def __init__(self, config: JobsConfig, clock: Clock, runner: ScriptedRunner) -> None:
        def tick() -> float:  # scheduled steps become due
            clock.now += 0.01
            return clock.now

        self._runtime = WorkerRuntime(
            config,
            TIERS,
            runner,
            {"large": WorkerSlots("large", 4), "vectors": WorkerSlots("vectors", 1)},
            CollectorRegistry(),
            clock=tick,
        )
        self._stop = anyio.Event()
        self._tasks = anyio.create_task_group()

    async def __aenter__(self) -> None:
        assert await self._runtime.start(self._stop)
        await self._tasks.__aenter__()
        self._tasks.start_soon(self._runtime.run, self._stop)

    async def __aexit__(self, *fault: object) -> None:
        self._stop.set()
        await self._tasks.__aexit__(None, None, None)
        await self._runtime.close()


def over(client: openai.AsyncOpenAI, name: str) -> Callable[[], Awaitable[bool]]:
    async def condition() -> bool:
        return is_final((await client.batches.retrieve(name)).status)

    return condition


async def test_a_batch_ends_with_an_output_and_an_error_file(
    client: openai.AsyncOpenAI, config: JobsConfig, clock: Clock
) -> None:
    """Both keep the input's order and custom ids."""

    async def one_fails(at: int, job_run: JobRun) -> AsyncGenerator[Chunk, None]:
        if job_run.request.max_tokens == 7:
            raise ContextLengthExceeded("too long")
        async for chunk in answers(at, job_run):
            yield chunk

    bad = line("bad", body=BODY | {"max_tokens": 7})
    batch = await batch_of(client, line("a"), line("b"), bad, "", line("c"), line("d"))
    assert (batch.status, batch.object, batch.metadata) == ("validating", "batch", {"for": "a test"})
    runner = ScriptedRunner(one_fails)
    async with RunningRuntime(config, clock, runner):
        await until(over(client, batch.id))
    ended = await client.batches.retrieve(batch.id)
    assert ended.status == "completed"
    assert ended.request_counts is not None
    assert (ended.request_counts.total, ended.request_counts.completed, ended.request_counts.failed) == (5, 4, 1)
    good = await content(client, ended.output_file_id)
    assert [row["custom_id"] for row in good] == ["a", "b", "c", "d"]
    for row in good:
        assert row["error"] is None
        assert row["response"]["status_code"] == 200  # type: ignore[index]
        assert row["response"]["body"]["choices"][0]["message"]["content"] == "an answer"  # type: ignore[index]
    (fault,) = await content(client, ended.error_file_id)
    assert (fault["custom_id"], fault["response"]) == ("bad", None)
    assert fault["error"] == {"code": "context_length_exceeded", "message": "too long"}
    assert {one.record.priority for one in runner.runs} == {"bulk"}
    assert len(runner.runs) == 5
    output = await client.files.retrieve(str(ended.output_file_id))
    assert output.purpose == "batch_output"
    assert output.bytes == len((await client.files.content(output.id)).content)
    async with aiohttp.ClientSession(str(client.base_url), headers=client.auth_headers) as http:
        for _ in range(2):  # a connection that is in order takes the next request
            async with http.head(f"files/{output.id}/content") as head:
                assert (head.status, head.content_length, await head.read()) == (200, output.bytes, b"")


async def test_a_batch_of_responses(client: openai.AsyncOpenAI, config: JobsConfig, clock: Clock) -> None:
    """Each line has a Response object, which repeats fields of its body; a line of another endpoint fails alone."""
    body = {"model": "big", "input": "hi", "instructions": "Be kind.", "metadata": {"for": "it"}}
    lines = line("a", url="/v1/responses", body=body), line("b")
    batch = await batch_of(client, *lines, endpoint="/v1/responses")
    async with RunningRuntime(config, clock, ScriptedRunner()):
        await until(over(client, batch.id))
    ended = await client.batches.retrieve(batch.id)
    (good,) = await content(client, ended.output_file_id)
    response = openai.types.responses.Response.model_validate(good["response"]["body"])  # type: ignore[index]
    assert (response.object, response.status, response.output_text) == ("response", "completed", "an answer")
    assert (response.instructions, response.metadata, response.model) == ("Be kind.", {"for": "it"}, "large")
    assert response.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens) == (5, 2)
    (bad,) = await content(client, ended.error_file_id)
    assert (bad["custom_id"], bad["error"]["code"]) == ("b", "mismatched_endpoint")  # type: ignore[index]


async def test_a_batch_of_embeddings(client: openai.AsyncOpenAI, config: JobsConfig, clock: Clock) -> None:
    """Each line has its vectors, in the encoding that it asks for; one whose tier makes none fails alone."""
    vectors = Embeddings(((0.5, 0.25),), Usage(prompt_tokens=3))

    async def embed(_at: int, _run: JobRun) -> AsyncGenerator[Embeddings, None]:
        yield vectors

    def embedding(name: str, model: str, **more: object) -> str:
        return line(name, url="/v1/embeddings", body={"model": model, "input": "hi"} | more)

    lines = embedding("a", "vectors"), embedding("b", "vectors", encoding_format="base64"), embedding("c", "big")
    batch = await batch_of(client, *lines, endpoint="/v1/embeddings")
    async with RunningRuntime(config, clock, ScriptedRunner(embed)):
        await until(over(client, batch.id))
    ended = await client.batches.retrieve(batch.id)
    rows = await content(client, ended.output_file_id)
    bodies = [row["response"]["body"] for row in rows]  # type: ignore[index]
    assert [body["data"][0]["embedding"] for body in bodies] == [[0.5, 0.25], "AAAAPwAAgD4="]
    assert [body["usage"] for body in bodies] == [{"prompt_tokens": 3, "total_tokens": 3}] * 2
    (bad,) = await content(client, ended.error_file_id)
    assert (bad["custom_id"], bad["error"]["code"]) == ("c", "unsupported_feature")  # type: ignore[index]


BAD_LINES = {
    "": ("{", "invalid_json_line", "Request 1 of the file: This line is not a JSON object."),
    "b": (
        '{"custom_id":"b","method":"POST","url":"/v1/completions","body":{}}',
        "mismatched_endpoint",
        "`url` must be",
    ),
    "c": ('{"custom_id":"c","method":"GET","url":"/v1/chat/completions","body":{}}', "invalid_method", "`method` must"),
    "d": ('{"custom_id":"d"}', "invalid_line", "Object missing required field"),
}


async def test_a_bad_line_fails_alone(client: openai.AsyncOpenAI, config: JobsConfig, clock: Clock) -> None:
    """Also one of another model, without messages, or too long; the others are answered, each in its place."""
    bad = [raw for raw, _, _ in BAD_LINES.values()]
    bad += [line("e", body={"model": "nowhere", "messages": BODY["messages"]}), line("f", body={"model": "big"})]
    batch = await batch_of(client, *bad, line("good"), line("g" * 3000), line("last"))
    runner = ScriptedRunner()
    async with RunningRuntime(config, clock, runner):
        await until(over(client, batch.id))
    ended = await client.batches.retrieve(batch.id)
    assert ended.status == "completed"
    assert ended.request_counts is not None
    assert (ended.request_counts.total, ended.request_counts.completed, ended.request_counts.failed) == (9, 2, 7)
    assert [row["custom_id"] for row in await content(client, ended.output_file_id)] == ["good", "last"]
    faults = await content(client, ended.error_file_id)
    assert [(row["custom_id"], row["error"]["code"]) for row in faults] == [  # type: ignore[index]
        *((name, code) for name, (_, code, _) in BAD_LINES.items()),
        *(("e", "model_not_found"), ("f", "missing_required_parameter"), ("", "line_too_long")),
    ]
    for row, (_, _, words) in zip(faults, BAD_LINES.values(), strict=False):
        assert row["error"]["message"].startswith(words)  # type: ignore[index]
    assert len(runner.runs) == 2


async def test_a_byte_order_mark_is_no_fault_of_the_first_line(
    client: openai.AsyncOpenAI, config: JobsConfig, clock: Clock
) -> None:
    batch = await batch_of(client, "\ufeff" + line("a"), line("b"))
    async with RunningRuntime(config, clock, ScriptedRunner()):
        await until(over(client, batch.id))
    ended = await client.batches.retrieve(batch.id)
    assert [row["custom_id"] for row in await content(client, ended.output_file_id)] == ["a", "b"]
    assert ended.error_file_id is None


@pytest.mark.parametrize("twice", [False, True], ids=["no valid line", "an id twice"])
async def test_a_file_whose_lines_cannot_be_told_apart_runs_none(
    client: openai.AsyncOpenAI, processor: BatchProcessor, store: JobStore, twice: bool
) -> None:
    """All errors are reported with their lines; so are those of a file without a valid line."""
    bad = [raw for raw, _, _ in BAD_LINES.values()]
    batch = await batch_of(client, *bad, *((line("a"), line("a")) if twice else ()))
    await processor.step()
    ended = await client.batches.retrieve(batch.id)
    assert ended.status == "failed"
    assert ended.errors is not None
    expected = [(at, code) for at, (_, code, _) in enumerate(BAD_LINES.values(), 1)]
    expected += [(6, "duplicate_custom_id")] if twice else []
    assert [(fault.line, fault.code) for fault in ended.errors.data or []] == expected
    assert (await store.depths()).queues == ()


async def test_an_empty_or_too_long_file_fails(client: openai.AsyncOpenAI, processor: BatchProcessor) -> None:
    for lines, code in ((["", " "], "empty_file"), ([line(str(at)) for at in range(21)], "too_many_lines")):
        batch = await batch_of(client, *lines)
        await processor.step()
        ended = await client.batches.retrieve(batch.id)
        assert ended.errors is not None
        assert [fault.code for fault in ended.errors.data or []] == [code]


async def test_a_cancelled_batch_keeps_answers_and_cancels_the_rest(
    client: openai.AsyncOpenAI, processor: BatchProcessor, store: JobStore
) -> None:
    """Lines that never became jobs are in the error file; cancelling again is 409."""
    batch = await batch_of(client, *(line(str(at)) for at in range(6)))
    await processor.step()  # validated
    await processor.step()  # three lines submitted
    (first,) = (await store.claim("w", "large", ["bulk"])).records
    await store.succeed(first.id, first.fence, b'{"an":"answer"}')
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    await processor.step()
    ended = await client.batches.retrieve(batch.id)
    assert ended.status == "cancelled"
    assert [row["custom_id"] for row in await content(client, ended.output_file_id)] == ["0"]
    faults = await content(client, ended.error_file_id)
    assert [row["custom_id"] for row in faults] == ["1", "2", "3", "4", "5"]
    assert {row["error"]["code"] for row in faults} == {"batch_cancelled"}  # type: ignore[index]
    assert (await store.claim("w", "large", ["bulk"])).records == ()
    with pytest.raises(openai.ConflictError):
        await client.batches.cancel(batch.id)


async def test_a_batch_expires_after_its_window_and_keeps_answers(
    client: openai.AsyncOpenAI, processor: BatchProcessor, store: JobStore, clock: Clock
) -> None:
    batch = await batch_of(client, *(line(str(at)) for at in range(5)))
    await processor.step()
    await processor.step()
    (first,) = (await store.claim("w", "large", ["bulk"])).records
    await store.succeed(first.id, first.fence, b'{"an":"answer"}')
    clock.now += 86_401
    await store.promote_and_expire()
    await processor.step()
    ended = await client.batches.retrieve(batch.id)
    assert ended.status == "expired"
    assert len(await content(client, ended.output_file_id)) == 1
    assert {row["error"]["code"] for row in await content(client, ended.error_file_id)} == {"batch_expired"}  # type: ignore[index]


async def test_a_batch_waits_for_a_full_queue(
    client: openai.AsyncOpenAI, stores: JobStores, config: JobsConfig, clock: Clock
) -> None:
    config = msgspec.structs.replace(config, max_queued=1)
    store = JobStore(stores.database, config)
    processor = BatchProcessor(msgspec.structs.replace(stores, jobs=store), SubmissionParser(config, TIERS), config)
    batch = await batch_of(client, line("a"), line("b"), line("c"))
    for _ in range(12):
        await processor.step()
        clock.now += 1.0
        for record in (await store.claim("w", "large", ["bulk"])).records:
            await store.succeed(record.id, record.fence, b"{}")
    assert (await client.batches.retrieve(batch.id)).status == "completed"


async def test_another_owner_sees_no_files_or_batches(client: openai.AsyncOpenAI, url: str) -> None:
    batch = await batch_of(client, line("a"))
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="thief", max_retries=0) as thief:
        for call in (
            thief.files.retrieve(batch.input_file_id),
            thief.files.delete(batch.input_file_id),
            thief.files.content(batch.input_file_id),
            thief.batches.retrieve(batch.id),
            thief.batches.cancel(batch.id),
            thief.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/chat/completions", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert [file async for file in thief.files.list()] == []
        assert [one async for one in thief.batches.list()] == []


async def test_files_are_downloaded_and_deleted(client: openai.AsyncOpenAI, processor: BatchProcessor) -> None:
    """A batch outlives its input file."""
    batch = await batch_of(client, line("a"))
    data = await client.files.content(batch.input_file_id)
    assert data.text == line("a")
    assert (await client.files.delete(batch.input_file_id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.files.content(batch.input_file_id)
    await processor.step()
    assert (await client.batches.retrieve(batch.id)).status == "in_progress"
    assert [file async for file in client.files.list()] == []


async def test_batches_are_listed_in_pages_newest_first(client: openai.AsyncOpenAI, clock: Clock) -> None:
    names = []
    for at in range(3):
        clock.now += 1
        names.append((await batch_of(client, line(str(at)))).id)
    assert [batch.id async for batch in client.batches.list(limit=2)] == names[::-1]


async def test_invalid_uploads_are_refused(client: openai.AsyncOpenAI, url: str) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await client.files.create(file=("in.jsonl", b"x" * 30_000), purpose="batch")
    assert caught.value.status_code == 413
    with pytest.raises(openai.BadRequestError):
        await client.files.create(file=("in.jsonl", b"x"), purpose="fine-tune")
    headers = {"authorization": "Bearer kiosk"}
    async with aiohttp.ClientSession(url, headers=headers) as http:
        for sent, kind, status in (
            (b"x", "application/json", 415),
            (b"nonsense", "multipart/form-data; boundary=b", 400),
            (b"x", "multipart/form-data", 400),
            (NO_FILE, "multipart/form-data; boundary=b", 400),
        ):
            async with http.post("/v1/files", data=sent, headers={"content-type": kind}) as response:
                assert response.status == status, await response.text()


@pytest.mark.parametrize(
    "changes",
    [
        {"endpoint": "/v1/images/generations"},
        {"completion_window": "1h"},
        {"metadata": {"k": "v" * 600}},
        {"window": "off_peak"},
        {"input_file_id": "file-nowhere"},
        {"input_file_id": None},
    ],
)
async def test_an_invalid_batch_names_the_parameter(
    url: str, client: openai.AsyncOpenAI, changes: dict[str, object]
) -> None:
    file = await client.files.create(file=("in.jsonl", b"x"), purpose="batch")
    ask = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    async with (
        aiohttp.ClientSession(url, headers={"authorization": "Bearer kiosk"}) as http,
        http.post("/v1/batches", json=ask | changes) as response,
    ):
        assert response.status in (400, 404)
        assert (await response.json())["error"]["param"].startswith(next(iter(changes)))


async def test_an_idempotency_key_gives_one_batch(client: openai.AsyncOpenAI) -> None:
    """Another request under the key is a conflict."""
    file = await client.files.create(file=("in.jsonl", line("a").encode()), purpose="batch")

    async def made(endpoint: str) -> openai.types.Batch:
        return await client.batches.create(
            input_file_id=file.id,
            endpoint=endpoint,  # type: ignore[arg-type]
            completion_window="24h",
            extra_headers={"idempotency-key": "k"},
        )

    assert (await made("/v1/chat/completions")).id == (await made("/v1/chat/completions")).id
    with pytest.raises(openai.ConflictError):
        await made("/v1/completions")


def test_final_batch_states_have_no_transitions() -> None:
    for state, targets in BATCH_TRANSITIONS.items():
        assert is_final(state) == (not targets)
        assert all(state in source_states(target) for target in targets)
    assert {state for state in BATCH_TRANSITIONS if is_final(state)} == {"failed", "completed", "expired", "cancelled"}


@given(st.binary(max_size=300))
def test_any_bytes_are_lines_or_errors(data: bytes) -> None:
    def check(_body: bytes) -> tuple[str, float]:
        raise ModelNotFound("none", param="model")

    whole = InputCheck("/v1/chat/completions", check, max_lines=5, max_line_bytes=100)
    splitter = LineSplitter(0, 100)
    whole.check(splitter.feed(data) + splitter.finish())
    whole.finish()
    assert whole.refused
    assert whole.errors


@given(st.lists(st.binary(max_size=30), max_size=20), st.integers(1, 20))
def test_lines_do_not_depend_on_how_the_file_arrives(rows: list[bytes], size: int) -> None:
    """Each line says where the next one begins; of a line that is too long only the beginning is kept."""
    data = b"\n".join(rows)

    def split(begin: int, size: int) -> list[tuple[bytes, int]]:
        splitter = LineSplitter(begin, 10)
        lines = [line for at in range(begin, len(data), size) for line in splitter.feed(data[at : at + size])]
        return [(line.data, line.end) for line in lines + splitter.finish()]

    lines = split(0, size)
    assert lines == split(0, len(data) + 1)
    expected = [row[:11] for row in data.split(b"\n")]
    assert [line for line, _ in lines] == [row for row in expected if row.strip() or len(row) == 11]
    for at, (_, end) in enumerate(lines):
        assert split(end, size) == lines[at + 1 :]


async def test_a_batchs_lines_use_the_models_and_content_of_its_token_only(url: str, processor: BatchProcessor) -> None:
    """The token is not there when the lines are read: the batch remembers what it granted."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="limited", max_retries=0) as client:
        fine = await batch_of(client, line("a"))
        batch = await batch_of(
            client,
            line("a", body=BODY | {"model": "small"}),
            line("b", body=BODY | {"messages": [{"role": "user", "content": [image]}]}),
        )
        while await processor.step():
            pass
        assert (await client.batches.retrieve(fine.id)).status == "in_progress"
        refused = await client.batches.retrieve(batch.id)
        assert refused.status == "failed"
        assert refused.errors is not None
        assert [error.code for error in refused.errors.data or []] == ["model_not_found", "permission_denied"]
