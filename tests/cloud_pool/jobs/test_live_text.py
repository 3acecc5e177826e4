"""The text of a running job in its events: from a real worker through a real Redis to clients of the HTTP API."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from causeway_server.cloud_pool.jobs.http.job_api import JobApi, JobCallers
from causeway_server.cloud_pool.jobs.submission import SubmissionParser
from causeway_server.cloud_pool.jobs.worker.runner import JobRun
from causeway_server.cloud_pool.jobs.worker.worker import MAX_CHARACTERS
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.record import LiveText, NewJob
from causeway_server.cloud_pool.storage.redis_client import RedisClient, as_int
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.cloud_pool.tiers.config import TierConfig
from causeway_server.cloud_pool.tiers.tier import ChatFormat, Tier
from causeway_server.router.errors import CloudFailed
from causeway_server.router.jobs.job import JobState
from causeway_server.router.openai.upstream.decode import Event, SSEParser
from causeway_server.router.types import Chunk, Usage

from .conftest import until
from .gateway import identify, serving
from .scripted_worker import RunningWorker, ScriptedRunner, answers

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[3]
OWNER = "acme/1"
MakeJob = Callable[..., NewJob]


@pytest_asyncio.fixture
async def url(config: JobsConfig, stores: JobStores) -> AsyncIterator[str]:
    tiers = {"large": Tier(TierConfig(name="large", max_sequences=4), ChatFormat("{{ messages }}"))}
    api = JobApi(config, stores, SubmissionParser(config, tiers), JobCallers(identify))
    async with serving(api.handler) as address:
        yield address


class Steps:
    """A runner's script that yields one of `parts` for each step that the test takes."""

    def __init__(self, *parts: str, fails: bool = False) -> None:
        self._parts = parts
        self._fails = fails
        self._steps = asyncio.Semaphore(0)

    def take(self, steps: int = 1) -> None:
        for _ in range(steps):
            self._steps.release()

    async def __call__(self, _at: int, _run: JobRun) -> AsyncGenerator[Chunk, None]:
        for part in self._parts:
            await self._steps.acquire()
            yield Chunk(text=part, tokens=1)
        await self._steps.acquire()
        if self._fails:
            raise CloudFailed("broken")
        yield Chunk(finish_reason="stop")
        yield Chunk(usage=Usage(5, 2))


class Follower:
    """A client of a job's events."""

    def __init__(self, url: str, job: str, last: str = "", token: str = "acme") -> None:
        self._path = f"{url}/v1/jobs/{job}/events"
        self._headers = {"authorization": f"Bearer {token}"} | ({"last-event-id": last} if last else {})
        self.events: list[Event] = []
        self.status = 0

    @property
    def names(self) -> list[str]:
        return [event.type.decode() for event in self.events if event.type != b"progress"]

    @property
    def text(self) -> str:
        """Of the last run that has begun."""
        text = ""
        for event in self.events:
            text = "" if event.type == b"running" else text + str(json.loads(event.data).get("text", ""))
        return text

    async def read(self, enough: Callable[[], bool] = lambda: False) -> Follower:
        """Read until the stream ends or there is enough; then leave."""
        parser = SSEParser()
        async with aiohttp.ClientSession(headers=self._headers) as http, http.get(self._path) as response:
            self.status = response.status
            async for data in response.content.iter_any():
                for event in parser.feed(data) if response.status == 200 else []:
                    self.events.append(event)
                    if enough():
                        return self
        return self

    async def read_to(self, text: str) -> str:
        """Read until the text is there, and leave. Returns the last event's id."""
        await self.read(lambda: self.text == text)
        assert self.text == text, self.events
        return self.events[-1].id.decode()


async def test_a_cut_client_continues_amid_the_text(
    url: str, store: JobStore, config: JobsConfig, new_job: MakeJob
) -> None:
    """The text comes while the worker makes it; another client has all of it, and so has one that comes at the end."""
    job = (await store.accept(new_job(owner=OWNER))).id
    script = Steps("Zürich ", "is ", "a town.")
    async with RunningWorker(store, ScriptedRunner(script), config), asyncio.TaskGroup() as tasks:
        other = tasks.create_task(Follower(url, job).read())
        script.take()
        follower = Follower(url, job)
        last = await follower.read_to("Zürich ")
        assert follower.names == ["queued", "running", "delta"]
        assert (await store.get(job, OWNER)).state is JobState.RUNNING
        script.take()
        second = Follower(url, job, last)
        last = await second.read_to("is ")
        assert second.names == ["delta"]
        script.take(2)
        third = await Follower(url, job, last).read()
        assert (third.names, third.text) == (["delta", "succeeded"], "a town.")
        assert (await other).text == "Zürich is a town."
    late = await Follower(url, job).read()
    assert (late.names, late.text) == (["queued", "running", "delta", "succeeded"], "Zürich is a town.")
    assert (await Follower(url, job, late.events[2].id.decode()).read()).names == ["succeeded"]
    assert (await Follower(url, job, late.events[3].id.decode()).read()).names == []


@pytest.mark.parametrize("name", ["job.revised", "job.not_revised"])
async def test_an_event_of_an_earlier_version_is_not_sent_and_ends_the_stream(
    url: str, store: JobStore, database: RedisClient, config: JobsConfig, new_job: MakeJob, name: str
) -> None:
    job = (await store.accept(new_job(owner=OWNER))).id
    async with RunningWorker(store, ScriptedRunner(), config):
        await until(lambda: _is(store, job, JobState.SUCCEEDED))
    entry = ("event", name, "data", b'{"revision":1}', "run", "")
    await database.command("XADD", database.key("events", job), "*", *entry)
    follower = Follower(url, job)
    await follower.read(lambda: name in follower.names)
    assert follower.names == ["queued", "running", "delta", "succeeded"]


async def test_without_a_client_no_text_is_stored(
    url: str, store: JobStore, database: RedisClient, config: JobsConfig, new_job: MakeJob
) -> None:
    """Nor for a caller of another tenant, or for an answer of several texts."""
    job = (await store.accept(new_job(owner=OWNER))).id
    script = Steps("secret")
    async with RunningWorker(store, ScriptedRunner(script), config):
        script.take()
        stranger = await Follower(url, job, token="rival").read()
        assert stranger.status == 404
        assert await database.command("EXISTS", database.key("followed", job), database.key("text", job)) == 0
        script.take()
        await until(lambda: _is(store, job, JobState.SUCCEEDED))
    body = b'{"model":"large","n":2,"messages":[{"role":"user","content":"q"}]}'
    several = (await store.accept(new_job(owner=OWNER, body=body))).id
    async with RunningWorker(store, ScriptedRunner(_two_answers), config):
        assert (await Follower(url, several).read()).names == ["queued", "running", "succeeded"]
    assert await database.command("EXISTS", database.key("text", several)) == 0


async def test_the_text_of_a_failed_run_begins_again(
    url: str, store: JobStore, config: JobsConfig, new_job: MakeJob
) -> None:
    job = (await store.accept(new_job(owner=OWNER, deadline_ms=10**15))).id
    script = Steps("wrong", fails=True)
    fallible = ScriptedRunner(lambda at, run: (script if at == 0 else answers)(at, run))
    async with RunningWorker(store, fallible, config), asyncio.TaskGroup() as tasks:
        follower = Follower(url, job)
        reading = tasks.create_task(follower.read())
        script.take()
        await until(lambda: _holds(follower, "wrong"))
        script.take()
        await reading
    runs = [json.loads(event.data).get("run") for event in follower.events if event.type == b"running"]
    assert runs == [1, 2]
    assert follower.names == ["queued", "running", "delta", "waiting", "queued", "running", "delta", "succeeded"]
    assert follower.text == "an answer"
    resumed = await Follower(url, job, follower.events[2].id.decode()).read()
    assert resumed.events == follower.events[3:]


async def test_a_killed_workers_text_gives_way_to_the_next_runs(
    url: str, store: JobStore, database: RedisClient, config: JobsConfig, new_job: MakeJob
) -> None:
    job = (await store.accept(new_job(owner=OWNER))).id
    command = [sys.executable, "-m", "tests.cloud_pool.jobs.worker_process", str(config.redis), config.key_prefix, "2"]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=subprocess.PIPE)
    follower = Follower(url, job)
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(follower.read())
        await until(lambda: _holds(follower, "half an"))
        process.kill()
        await process.wait()
        # What the dead worker sent at last is too late: its fence is outdated once another one has the job.
        short = msgspec.structs.replace(config, lease_s=2.0)
        async with RunningWorker(JobStore(database, short), ScriptedRunner(), short):
            await reading
    assert follower.names == ["queued", "running", "delta", "queued", "running", "delta", "succeeded"]
    assert follower.text == "an answer"
    assert await store.texts.append([LiveText(OWNER, job, 1, len("half an"), " answer")]) == [-1]


async def test_text_that_redis_lost_is_sent_again(
    url: str, store: JobStore, database: RedisClient, config: JobsConfig, new_job: MakeJob
) -> None:
    job = (await store.accept(new_job(owner=OWNER))).id
    text, script = database.key("text", job), Steps("one ", "two ", "three ", "four")
    async with RunningWorker(store, ScriptedRunner(script), config):
        script.take(2)
        last = await Follower(url, job).read_to("one two ")
        await database.command("DEL", text)
        script.take()
        assert await Follower(url, job).read_to("one two three ")
        await database.command("DEL", text)
        script.take()
        resumed = Follower(url, job, last)
        await resumed.read_to("three four")
        script.take()
        assert (await Follower(url, job).read()).text == "one two three four"


async def test_a_client_that_stops_reading_holds_back_nothing(
    url: str, store: JobStore, database: RedisClient, config: JobsConfig, new_job: MakeJob
) -> None:
    """Its job's text in Redis is bounded, and goes with the end of the run."""
    job = (await store.accept(new_job(owner=OWNER))).id
    part = "x" * (MAX_CHARACTERS // 4)
    script = Steps(*[part] * 6)
    address, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((address, int(port))) as stalled:
        request = f"GET /v1/jobs/{job}/events HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer acme\r\n\r\n"
        stalled.sendall(request.encode())
        async with RunningWorker(store, ScriptedRunner(script), config):
            script.take(6)
            await Follower(url, job).read_to(part * 4)
            length = as_int(await database.command("MEMORY", "USAGE", database.key("text", job)))
            assert MAX_CHARACTERS <= length < 2 * MAX_CHARACTERS
            script.take()
            await until(lambda: _is(store, job, JobState.SUCCEEDED))
            assert await database.command("EXISTS", database.key("text", job)) == 0
            assert (await Follower(url, job).read()).text == part * 6


async def _is(store: JobStore, job: str, state: JobState) -> bool:
    return (await store.get(job, OWNER)).state is state


async def _holds(follower: Follower, text: str) -> bool:
    return follower.text == text


async def _two_answers(_at: int, _run: JobRun) -> AsyncGenerator[Chunk, None]:
    for index in range(2):
        yield Chunk(text="an answer", tokens=2, index=index)
        yield Chunk(finish_reason="stop", index=index)
    yield Chunk(usage=Usage(5, 4))
