"""Answers of the gateway's jobs that are revised: a real Redis, real workers, and encoders that wait for the test.

The load: jobs whose audio or image takes longer than its branch may, more of them than a worker keeps in memory.
The faults: the worker drains or is lost between answer and revision, or after the revision and before its webhook; the
part is never read; the job is cancelled or erased; the run fails.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from causeway_server.cloud_pool.core.late import DeferredParts
from causeway_server.cloud_pool.jobs.http.job_api import JobApi, JobCallers
from causeway_server.cloud_pool.jobs.submission import SubmissionParser
from causeway_server.cloud_pool.jobs.worker.runner import JobRun
from causeway_server.cloud_pool.parts.request_parts import FORGETS, JobMemory
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.encryption import rotate_keys
from causeway_server.cloud_pool.storage.record import JobRecord
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.cloud_pool.tiers.config import TierConfig
from causeway_server.cloud_pool.tiers.tier import ChatFormat, Tier
from causeway_server.models.parts.graph.branch import PLAIN, ReadPart
from causeway_server.models.parts.graph.graph import EncoderGraph
from causeway_server.models.parts.process.messages import AudioTerms, Found
from causeway_server.models.parts.process.parent import Tell, WorkerTimeout
from causeway_server.router.errors import CloudFailed
from causeway_server.router.jobs.job import MAX_LATE, JobState
from causeway_server.router.parts.reading import fuse
from causeway_server.router.serving.at_rest.sealing import MAGIC
from causeway_server.router.serving.webhooks import WebhookSender
from causeway_server.router.types import Chunk, Fact, Modality, TextPart, Usage
from tests.cloud_pool.storage.redis_contents import contents
from tests.edge_node.parts.test_fusion import audio, image, text

from .billing import RUN_PICO_USD, Books
from .conftest import Clock, until
from .gateway import identify, serving
from .scripted_worker import RunningWorker, ScriptedRunner
from .test_api import TIER
from .test_billing import Bills
from .test_live_text import Follower
from .test_webhooks import LOOPBACK
from .webhook_receiver import receiving

OWNER = "acme/1"
HEARD, SEEN = "turn on the lights", "Total 99.50 EUR"
WITHIN_MS = 100_000
NEVER_MS = 1


class Encoders:
    """Branches that read when the test lets them."""

    def __init__(self) -> None:
        self._ready: dict[Modality, asyncio.Event] = {"audio": asyncio.Event(), "image": asyncio.Event()}
        self.reading = 0

    def go_on(self, kind: Modality = "audio") -> None:
        self._ready[kind].set()

    def read_late(self, job_run: JobRun, by: float) -> DeferredParts:
        branches = {
            kind: _Branch(self, ready, words)
            for (kind, ready), words in zip(self._ready.items(), (HEARD, SEEN), strict=True)
        }
        graph = EncoderGraph(branches, JobMemory(FORGETS, 8), max_parts=8, clock=time.monotonic)
        return DeferredParts(graph, job_run.request, by)


class _Branch:
    timeout_s = 0.0  # each part is late at once

    def __init__(self, encoders: Encoders, ready: asyncio.Event, words: str) -> None:
        self._encoders = encoders
        self._ready = ready
        self._words = words

    async def run(self, part: bytes, deadline: float, terms: AudioTerms = PLAIN, tell: Tell | None = None) -> ReadPart:
        self._encoders.reading += 1
        try:
            async with asyncio.timeout_at(deadline):
                await self._ready.wait()
        except TimeoutError:
            raise WorkerTimeout("it took too long") from None
        finally:
            self._encoders.reading -= 1
        return ReadPart(Found(Fact(self._words, 0.875)))


async def repeats(_at: int, job_run: JobRun) -> AsyncGenerator[Chunk, None]:
    """Answers with the prompt's words, those of its parts among them."""
    request = job_run.request
    if job_run.late is not None:
        found = await job_run.late.facts(job_run.deadline)
        request = fuse(request, found.facts, found.kinds)
    content = request.messages[-1].content
    assert isinstance(content, tuple)
    words = "\n".join(part.text for part in content if isinstance(part, TextPart))
    yield Chunk(text=words, tokens=2)
    yield Chunk(finish_reason="stop")
    yield Chunk(usage=Usage(5, 2))


class Bed:
    """Jobs with parts over HTTP, and workers that run them."""

    def __init__(self, stores: JobStores, config: JobsConfig, url: str, http: aiohttp.ClientSession) -> None:
        self.stores = stores
        self.encoders = Encoders()
        self._config = config
        self.url = url
        self._http = http

    def worker(self, runner: ScriptedRunner | None = None, slots: int = 4, books: Books | None = None) -> RunningWorker:
        runner = ScriptedRunner(repeats) if runner is None else runner
        runner.read_late = self.encoders.read_late
        run = runner if books is None else books.metered(runner)
        return RunningWorker(self.stores.jobs, run, self._config, slots)

    async def ask(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, Any]]:
        async with self._http.request(method, self.url + path, json=body) as response:
            return response.status, await response.json()

    async def submit(self, *parts: dict[str, object], within_ms: int = WITHIN_MS, **fields: object) -> str:
        content = [text("hello"), *(parts or (audio(),))]
        body = {"model": "large", "messages": [{"role": "user", "content": content}], "revise_within_ms": within_ms}
        status, found = await self.ask("POST", "/v1/jobs", body | fields)
        assert status == 202, found
        return str(found["id"])

    async def view(self, job: str) -> dict[str, Any]:
        status, found = await self.ask("GET", f"/v1/jobs/{job}")
        assert status == 200
        return found

    async def record(self, job: str) -> JobRecord:
        return await self.stores.jobs.get(job, OWNER)

    async def answered(self, *jobs: str) -> None:
        """Wait for the first answers."""

        async def done() -> bool:
            return all([(await self.record(job)).state is JobState.SUCCEEDED for job in jobs])

        await until(done)

    async def settled(self, job: str) -> dict[str, Any]:
        """Wait until no revision follows any more."""

        async def done() -> bool:
            record = await self.record(job)
            return record.state is JobState.SUCCEEDED and not record.late

        await until(done)
        return await self.view(job)

    async def events(self, job: str, last: str = "") -> list[tuple[str, dict[str, Any]]]:
        """What follows an event, until the stream ends; without what comes before the job's end."""
        follower = await Follower(self.url, job, last).read()
        found = [(event.id.decode(), json.loads(event.data)) for event in follower.events]
        return [one for one in found if one[1]["event"] in ("succeeded", "job.revised", "job.not_revised")]

    async def deliver(self, clock: Clock) -> int:
        """Send the webhooks that are due. Returns how many."""
        sender = WebhookSender(self.stores.outbox, LOOPBACK, clock=clock)
        try:
            return await sender.deliver_due()
        finally:
            await sender.close()

    async def has_body(self, job: str) -> bool:
        return bool(await self.stores.database.command("HEXISTS", self.stores.database.key("job", job), "body"))


async def counted(worker: RunningWorker, outcome: str, count: int = 1) -> None:
    """Wait until the metric says so."""
    await until(lambda: _async(worker.revisions(outcome) == count))


def answer_of(view: dict[str, Any]) -> str:
    return str(view["result"]["choices"][0]["message"]["content"])


@pytest.fixture
def settings(config: JobsConfig, tmp_path: Path) -> JobsConfig:
    """Encrypted, and with webhooks to loopback."""
    rotate_keys(tmp_path / "keys", 0.0, time.time())
    return msgspec.structs.replace(config, encryption_key_file=str(tmp_path / "keys"), webhooks=LOOPBACK)


@pytest_asyncio.fixture
async def bed(settings: JobsConfig, clock: Clock) -> AsyncIterator[Bed]:
    stores = JobStores.open(settings, clock)
    encoders = (TierConfig("speech", can=("audio",)), TierConfig("images", can=("image",)))
    tiers = {"large": TIER} | {one.name: Tier(one, ChatFormat("")) for one in encoders}
    api = JobApi(settings, stores, SubmissionParser(settings, tiers), JobCallers(identify))
    async with serving(api.handler) as url, aiohttp.ClientSession(headers={"authorization": "Bearer acme"}) as http:
        yield Bed(stores, settings, url, http)
    await stores.close()


async def test_an_answer_is_revised_once_its_late_part_was_read(bed: Bed, clock: Clock) -> None:
    """In results, events and webhooks; encrypted; the request goes with the last revision."""
    async with receiving() as receiver, bed.worker() as worker:
        job = await bed.submit(webhook=f"http://127.0.0.1:{receiver.port}/")
        await bed.answered(job)
        found = await bed.view(job)
        assert (found["status"], found["revision"], found["late_parts"]) == ("succeeded", 0, ["audio"])
        assert answer_of(found) == "hello\n[An audio clip that could not be read.]"
        assert await bed.has_body(job)
        follower = Follower(bed.url, job)
        following = asyncio.ensure_future(follower.read())
        await until(lambda: _async("succeeded" in follower.names))
        bed.encoders.go_on()
        await following
        assert follower.names[-2:] == ["succeeded", "job.revised"]
        found = await bed.settled(job)
        assert (found["status"], found["late_parts"], found["late_error"]) == ("succeeded", [], None)
        assert (found["revision"], HEARD in answer_of(found)) == (1, True)
        (succeeded, first), (revised, second) = await bed.events(job)
        assert first["event"] == "succeeded"
        assert second == {"event": "job.revised", "revision": 1, "text": answer_of(found)}
        assert [one for one, _ in await bed.events(job, succeeded)] == [revised]
        assert await bed.events(job, revised) == []
        assert not await bed.has_body(job)
        await counted(worker, "made")
        assert bed.encoders.reading == 0
        stored = b"".join((await contents(bed.stores.database)).values())
        assert MAGIC in stored
        assert not any(words in stored for words in (HEARD.encode(), b"choices", b"messages"))
        assert await bed.deliver(clock) == 2
        bodies = [json.loads(body) for _, body in receiver.arrived]
        assert sorted((one["type"], one["data"]["revision"]) for one in bodies) == [
            ("job.revised", 1),
            ("job.succeeded", 0),
        ]
        assert {one["data"]["status"] for one in bodies} == {"succeeded"}
        assert len(receiver.ids_by_job[job]) == 2


async def test_each_late_branch_revises_an_answer_once_and_each_run_is_billed(bed: Bed, settings: JobsConfig) -> None:
    books = Books(str(settings.redis))
    async with bed.worker(books=books):
        job = await bed.submit(audio(), image())
        await bed.answered(job)
        for revision, (kind, words) in enumerate((("image", SEEN), ("audio", HEARD)), 1):
            bed.encoders.go_on(kind)  # type: ignore[arg-type]
            await until(lambda expected=revision: _revised(bed, job, expected))  # type: ignore[misc]
            found = await bed.view(job)
            assert words in answer_of(found)
            assert (found["revision"], found["late_parts"]) == (revision, ["audio"] if revision == 1 else [])
    assert await Bills(bed.stores.database, books, "acme").read() == (3, 3 * RUN_PICO_USD)
    await books.client.aclose()
    told = [(data["event"], data.get("revision")) for _, data in await bed.events(job)]
    assert told == [("succeeded", None), ("job.revised", 2)]


@pytest.mark.parametrize("end", ["cancelled", "never read", "fails", "erased"])
async def test_a_revision_that_will_not_come_is_told(bed: Bed, end: str) -> None:
    """The request goes then, and the answer stays."""

    async def fails(at: int, job_run: JobRun) -> AsyncGenerator[Chunk, None]:
        if at:
            raise CloudFailed("broken")
        async for chunk in repeats(at, job_run):
            yield chunk

    async with bed.worker(ScriptedRunner(fails)) as worker:
        job = await bed.submit(within_ms=NEVER_MS if end == "never read" else WITHIN_MS)
        await bed.answered(job)
        if end == "erased":
            assert await bed.stores.database.run("erase_job", job)
            await counted(worker, "superseded")
            await until(lambda: _async(bed.encoders.reading == 0))
            stored = await contents(bed.stores.database)
            assert not any(job in key or job.encode() in value for key, value in stored.items())
            return
        if end == "cancelled":
            status, found = await bed.ask("DELETE", f"/v1/jobs/{job}")
            assert (status, found["status"]) == (200, "succeeded")
            status, found = await bed.ask("DELETE", f"/v1/jobs/{job}")
            assert (status, found["error"]["code"]) == (409, "job_ended")
        if end == "fails":
            bed.encoders.go_on()
        code, outcome = {
            "cancelled": ("job_cancelled", "superseded"),
            "never read": ("revision_dropped", "too_late"),
            "fails": ("cloud_failed", "failed"),
        }[end]
        view = await bed.settled(job)
        assert (view["revision"], view["late_error"]["code"]) == (0, code)
        assert answer_of(view).startswith("hello")
        assert not await bed.has_body(job)
        (_, first), (last, told) = await bed.events(job)
        assert (first["event"], told["event"], told["error"]["code"]) == ("succeeded", "job.not_revised", code)
        assert await bed.events(job, last) == []
        await counted(worker, outcome)
        await until(lambda: _async(bed.encoders.reading == 0))


async def test_a_worker_that_drains_or_is_lost_leaves_the_answer_to_the_next_one(bed: Bed) -> None:
    async with bed.worker():
        job = await bed.submit()
        await bed.answered(job)
    assert bed.encoders.reading == 0
    assert (await bed.record(job)).late == "audio"
    (lost,) = (await bed.stores.jobs.late.claim(["large"], 1)).answers  # by a worker that dies now
    assert lost.left_s == WITHIN_MS / 1000.0
    await bed.stores.database.command("ZADD", bed.stores.database.key("late"), 0, job)  # its lease ends
    bed.encoders.go_on()
    async with bed.worker() as worker:
        found = await bed.settled(job)
        assert (found["revision"], HEARD in answer_of(found)) == (1, True)
        await counted(worker, "made")
    late = bed.stores.jobs.late
    fence = lost.record.fence
    assert not await late.revise(job, fence, b"stale")
    assert not await late.drop(job, fence, CloudFailed("stale"))


async def test_a_revision_is_one_effect_whenever_its_worker_is_killed(bed: Bed, clock: Clock) -> None:
    """Its webhook is queued with it: a worker that is killed after the commit loses none, and another makes none."""
    async with receiving() as receiver:
        job = await bed.submit(webhook=f"http://127.0.0.1:{receiver.port}/")
        store, late = bed.stores.jobs, bed.stores.jobs.late
        (record,) = (await store.claim("w", "large", ["standard"])).records
        for _ in range(2):  # the reply to a report may be lost
            assert await store.succeed(job, record.fence, b"{}", late=["audio"])
        for _ in range(2):
            assert await late.revise(job, record.fence + 1, store.seal_result(record, b'{"n":1}'))
        async with bed.worker(runner := ScriptedRunner(repeats)):
            assert await bed.deliver(clock) == 2
            assert await bed.deliver(clock) == 0
        assert runner.runs == []
        kinds = sorted(json.loads(body)["type"] for _, body in receiver.arrived)
        assert kinds == ["job.revised", "job.succeeded"]
        found = await bed.view(job)
        assert (found["revision"], found["result"], found["webhook_status"]) == (1, {"n": 1}, "delivered")


@pytest.mark.parametrize("end", ["time", "claims"])
async def test_what_no_worker_takes_on_ends(bed: Bed, clock: Clock, settings: JobsConfig, end: str) -> None:
    job = await bed.submit()
    store, late = bed.stores.jobs, bed.stores.jobs.late
    (record,) = (await store.claim("w", "large", ["standard"])).records
    await store.succeed(job, record.fence, b"{}", late=["audio"])
    assert (await late.claim(["large"], 1)).answers == ()  # its worker lives
    if end == "time":
        clock.now += WITHIN_MS / 1000.0
    command, leases = bed.stores.database.command, bed.stores.database.key("late")
    for _ in range(settings.max_attempts if end == "claims" else 0):
        await command("ZADD", leases, 0, job)
        assert (await late.claim(["small"], 1)).answers == ()  # it has no such tier
        assert len((await late.claim(["large"], 1)).answers) == 1
    await command("ZADD", leases, 0, job)
    found = await late.claim(["large"], 1)
    assert (found.answers, found.too_late, found.lost) == ((), int(end == "time"), int(end == "claims"))
    view = await bed.settled(job)
    assert view["late_error"]["code"] == ("deadline_exceeded" if end == "time" else "revision_dropped")


async def test_no_more_answers_wait_for_parts_than_there_is_room_for(bed: Bed) -> None:
    async with bed.worker(slots=MAX_LATE + 1) as worker:
        jobs = [await bed.submit() for _ in range(MAX_LATE + 1)]
        await bed.answered(*jobs)
        dropped = [view for job in jobs if (view := await bed.view(job))["late_error"] is not None]
        assert [view["late_error"]["code"] for view in dropped] == ["revision_dropped"]
        assert dropped[0]["late_parts"] == []
        await counted(worker, "no_room")
        bed.encoders.go_on()
        for job in jobs:
            await bed.settled(job)
        await counted(worker, "made", MAX_LATE)


async def test_only_jobs_that_wish_it_are_revised(bed: Bed, settings: JobsConfig) -> None:
    async with bed.worker():
        job = await bed.submit(within_ms=0)
        await bed.answered(job)
        found = await bed.view(job)
    assert (found["late_parts"], found["late_error"], found["revision"]) == ([], None, 0)
    body = {"model": "large", "messages": [{"role": "user", "content": "hi"}], "revise_within_ms": -1}
    status, error = await bed.ask("POST", "/v1/jobs", body)
    assert (status, error["error"]["param"]) == (400, "revise_within_ms")
    long = await bed.submit(within_ms=10**9)
    assert (await bed.record(long)).revise == settings.max_revise_s * 1000


async def _async(value: bool) -> bool:
    return value


async def _revised(bed: Bed, job: str, revision: int) -> bool:
    return (await bed.record(job)).revision == revision
