"""`Prefer: respond-async` (RFC 7240) at a whole gateway: a request that takes longer than `wait` becomes a job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import anyio.abc
import grpc
import msgspec
import pytest
from tritonclient.grpc import service_pb2_grpc

from causeway_server.cloud_pool.app import build
from causeway_server.cloud_pool.background import run_worker
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.http.config import ServerConfig
from causeway_server.cloud_pool.redis.config import RedisAddress
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.tiers.config import TierConfig
from tests.cloud_pool.unreachable import unreachable_tier
from tests.cloud_pool.upstreams.http_gateway import http_tier
from tests.cloud_pool.upstreams.test_triton_client import FakeTriton, Reply, Script, piece
from tests.edge_node.scripted import ScriptedCloud

from .conftest import until

pytestmark = [pytest.mark.redis, pytest.mark.slow]
CHAT: dict[str, Any] = {"model": "large", "messages": [{"role": "user", "content": "a question"}]}
CHATS, JOBS = "/v1/chat/completions", "/v1/jobs"


async def answers(_request: object, _context: object) -> AsyncIterator[Reply]:
    yield piece("an answer", "stop", final=True)


async def breaks(request: Any, _context: object) -> AsyncIterator[Reply]:
    yield piece("a", "stop", final=True) if request.id == "probe" else Reply(error_message="engine_crashed: it crashed")


class Bed:
    """A gateway before a scripted Triton, and a worker once it is started."""

    def __init__(self, http: aiohttp.ClientSession, config: Config, tasks: anyio.abc.TaskGroup) -> None:
        self.http = http
        self._config = config
        self._tasks = tasks
        self._stop = asyncio.Event()

    def start_worker(self) -> None:
        self._tasks.start_soon(run_worker, self._config, self._stop)

    def stop_worker(self) -> None:
        self._stop.set()

    async def post(
        self, prefer: str, path: str = CHATS, body: dict[str, Any] = CHAT, key: str = ""
    ) -> tuple[int, dict[str, Any], Mapping[str, str]]:
        headers = {"Prefer": prefer} | ({"Idempotency-Key": key} if key else {})
        async with self.http.post(path, json=body, headers=headers) as answer:
            return answer.status, await answer.json(), answer.headers

    async def job(self, name: str) -> dict[str, Any]:
        async with self.http.get(f"{JOBS}/{name}") as answer:
            return dict(await answer.json())


@asynccontextmanager
async def running(
    redis: RedisAddress, config: JobsConfig, script: Script = answers, tiers: tuple[TierConfig, ...] = ()
) -> AsyncIterator[Bed]:
    triton = grpc.aio.server()
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(FakeTriton(script), triton)
    tier = unreachable_tier()
    address = f"127.0.0.1:{triton.add_insecure_port('127.0.0.1:0')}"
    await triton.start()
    settings = Config(
        server=ServerConfig(port=0),
        tiers=(msgspec.structs.replace(tier, triton=address), *tiers),
        redis=redis,
        jobs=config,
    )
    async with anyio.create_task_group() as tasks:
        app = build(settings, tasks)
        await app.start()
        async with aiohttp.ClientSession(app.url.removesuffix("/v1")) as http:
            bed = Bed(http, settings, tasks)
            yield bed
            bed.stop_worker()
        await app.stop()
    await app.close()
    await triton.stop(None)


@pytest.fixture
def jobs_config(config: JobsConfig) -> JobsConfig:
    return JobsConfig(key_prefix=config.key_prefix, lease_check_s=0.02, max_attempts=1, backoff_s=0.01)


async def test_a_request_becomes_a_job_if_it_takes_longer(config: JobsConfig, jobs_config: JobsConfig) -> None:
    async with running(config.redis, jobs_config) as bed:
        status, job, headers = await bed.post("respond-async, wait=0", key="one")
        assert (status, job["object"], job["status"]) == (202, "job", "queued")
        assert (headers["Location"], headers["Preference-Applied"]) == (f"{JOBS}/{job['id']}", "respond-async")
        bed.start_worker()
        status, chat, headers = await bed.post("respond-async, wait=60")
        assert (status, chat["choices"][0]["message"]["content"]) == (200, "an answer")
        assert (headers["x-causeway-tier"], headers["Preference-Applied"]) == ("large", "respond-async")
        assert headers["x-request-id"]
        status, again, headers = await bed.post("wait=60, respond-async", key="one")
        assert (status, again["object"], headers["Idempotent-Replayed"]) == (200, "chat.completion", "true")
        assert (await bed.job(job["id"]))["status"] == "succeeded"
        status, text, _ = await bed.post(
            "respond-async, wait=60", "/v1/completions", {"model": "large", "prompt": "x", "max_tokens": 5}
        )
        assert (status, text["object"]) == (200, "text_completion")


async def test_a_job_that_fails_within_the_wait_answers_with_its_error(
    config: JobsConfig, jobs_config: JobsConfig
) -> None:
    async with running(config.redis, jobs_config, breaks) as bed:
        bed.start_worker()
        status, body, headers = await bed.post("respond-async, wait=60")
        assert (status, body["error"]["code"]) == (502, "engine_crashed")
        assert headers["x-request-id"]


async def test_a_job_that_is_cancelled_within_the_wait_is_a_conflict(
    config: JobsConfig, jobs_config: JobsConfig
) -> None:
    async with running(config.redis, jobs_config) as bed:
        waiting = asyncio.ensure_future(bed.post("respond-async, wait=300"))

        async def is_cancelled() -> bool:
            async with bed.http.get(JOBS) as answer:
                found = (await answer.json())["data"]
            if not found:
                return False
            async with bed.http.delete(f"{JOBS}/{found[0]['id']}") as answer:
                return answer.status == 200

        await until(is_cancelled)
        status, body, _ = await waiting
        assert (status, body["error"]["code"]) == (409, "job_cancelled")


async def test_a_client_that_leaves_while_it_waits_has_its_job(config: JobsConfig, jobs_config: JobsConfig) -> None:
    async with running(config.redis, jobs_config) as bed:
        leaving = asyncio.ensure_future(bed.post("respond-async, wait=300"))

        async def is_queued() -> bool:
            async with bed.http.get(JOBS) as answer:
                return len((await answer.json())["data"]) == 1

        await until(is_queued)
        leaving.cancel()
        bed.start_worker()
        async with bed.http.get(JOBS) as answer:
            (job,) = (await answer.json())["data"]

        async def has_ended() -> bool:
            return bool((await bed.job(job["id"]))["status"] == "succeeded")

        await until(has_ended)


async def test_a_caller_with_too_many_waits_has_its_job_at_once(config: JobsConfig, jobs_config: JobsConfig) -> None:
    async with running(config.redis, msgspec.structs.replace(jobs_config, max_event_streams=1)) as bed:
        waiting = asyncio.ensure_future(bed.post("respond-async, wait=300"))

        async def waits() -> bool:
            async with bed.http.get(JOBS) as answer:
                return len((await answer.json())["data"]) == 1

        await until(waits)
        status, job, _ = await bed.post("respond-async, wait=300")
        assert (status, job["status"]) == (202, "queued")
        assert not waiting.done()
        bed.start_worker()
        status, chat, _ = await waiting
        assert (status, chat["choices"][0]["message"]["content"]) == (200, "an answer")


@pytest.mark.parametrize("status", [200, 400], ids=["made", "refused"])
async def test_vectors_are_made_by_a_job_on_a_tier_that_makes_them(
    config: JobsConfig, jobs_config: JobsConfig, status: int
) -> None:
    cloud = await ScriptedCloud().start()
    cloud.status, cloud.error = status, {"message": "no such thing", "code": "invalid_value"}
    async with running(config.redis, jobs_config, tiers=(http_tier(cloud.url, name="vectors"),)) as bed:
        bed.start_worker()
        found, body, _ = await bed.post(
            "respond-async, wait=60", "/v1/embeddings", {"model": "vectors", "input": ["one", "two"]}
        )
        async with bed.http.get(JOBS) as answer:
            (job,) = (await answer.json())["data"]
    await cloud.stop()
    assert (found, job["status"]) == ((200, "succeeded") if status == 200 else (400, "failed"))
    assert [vector["index"] for vector in body.get("data", [])] == ([0, 1] if status == 200 else [])


async def test_what_is_no_job_ignores_the_preference(config: JobsConfig, jobs_config: JobsConfig) -> None:
    """Other preferences and paths; a streamed answer cannot become one."""
    async with running(config.redis, jobs_config) as bed:
        status, body, headers = await bed.post("return=minimal")
        assert (status, body["object"], "Preference-Applied" in headers) == (200, "chat.completion", False)
        status, body, _ = await bed.post("respond-async", body={**CHAT, "stream": True})
        assert (status, body["error"]["param"]) == (400, "stream")
        async with bed.http.get("/v1/models", headers={"Prefer": "respond-async"}) as answer:
            assert answer.status == 200
        async with bed.http.get(JOBS) as answer:
            assert (await answer.json())["data"] == []


async def test_while_no_job_can_be_accepted_a_request_is_answered_plainly(jobs_config: JobsConfig) -> None:
    async with running("redis://127.0.0.1:1/0", jobs_config) as bed:
        status, body, headers = await bed.post("respond-async, wait=0")
        assert (status, body["object"], "Preference-Applied" in headers) == (200, "chat.completion", False)


async def test_every_response_has_the_request_s_id(config: JobsConfig, jobs_config: JobsConfig) -> None:
    """Answers as well as errors, jobs, lists and streams; the caller's own id, if it sent one."""
    async with running(config.redis, jobs_config) as bed:
        bed.start_worker()
        mine = {"x-request-id": "walk-17"}
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", b"{}\n", filename="in.jsonl")
        async with bed.http.post("/v1/files", data=form, headers=mine) as answer:
            ids = [answer.headers["x-request-id"]]
            file = (await answer.json())["id"]
        async with bed.http.post(JOBS, json=CHAT, headers=mine) as answer:
            ids.append(answer.headers["x-request-id"])
            job = (await answer.json())["id"]
        paths = (f"{JOBS}/{job}", f"{JOBS}/{job}/events", JOBS, f"/v1/files/{file}/content", "/v1/models", "/healthz")
        for path in (*paths, "/v1/webhooks/secret", "/v1/nothing"):
            async with bed.http.get(path, headers=mine) as answer:
                ids.append(answer.headers["x-request-id"])
                await answer.read()
        async with bed.http.post(CHATS, json=CHAT, headers=mine) as answer:
            ids.append(answer.headers["x-request-id"])
        assert ids == ["walk-17"] * 11
        async with bed.http.get(JOBS) as answer:
            assert len(answer.headers["x-request-id"]) == 16
