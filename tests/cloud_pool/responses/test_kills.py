"""kill -9 of gateway, worker and Redis in the middle of a chain and of a response in the background."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
import pytest_asyncio

from tests.cloud_pool.conftest import Command
from tests.cloud_pool.upstreams.http_gateway import http_tier
from tests.edge_node.scripted import ScriptedCloud
from tests.redis_server import RedisServer

from .conftest import TOKENS

pytestmark = [pytest.mark.redis, pytest.mark.slow]
ANSWER = "cloud says so"


@pytest.fixture
def killable_redis() -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(Path(folder))
        try:
            yield server
        finally:
            server.kill()


@pytest_asyncio.fixture
async def cloud() -> AsyncIterator[ScriptedCloud]:
    server = await ScriptedCloud().start()
    yield server
    await server.stop()


class Processes:
    """A gateway and a worker, each a process."""

    def __init__(self, folder: Path, cloud: ScriptedCloud, redis: RedisServer) -> None:
        self._path = folder / "gateway.yaml"
        (folder / "tokens").write_text("".join(f"{name} {token}\n" for name, token in TOKENS.items()))
        config = {
            "server": {"port": 0, "token_file": str(folder / "tokens"), "drain_s": 1.0},
            "tiers": [msgspec.to_builtins(http_tier(cloud.url))],
            "jobs": {"redis": redis.url, "lease_s": 2.0, "reclaim_interval_s": 0.05, "lease_check_s": 0.1},
        }
        self._path.write_text(json.dumps(config))
        self._running: list[Command] = []

    async def start(self) -> openai.AsyncOpenAI:
        """Start both, and return a client of the gateway."""
        for kind in ("serve", "worker"):
            self._running.append(Command(kind, "--config", str(self._path)))
        gateway, worker = [await asyncio.to_thread(one.ready) for one in self._running]
        del worker
        return openai.AsyncOpenAI(base_url=gateway["url"], api_key=TOKENS["kiosk"], max_retries=0, timeout=60)

    def kill(self) -> None:
        for command in self._running:
            command.process.kill()
            command.process.wait()
        self._running.clear()


async def test_killed_processes_lose_nothing_and_do_nothing_twice(
    tmp_path: Path, cloud: ScriptedCloud, killable_redis: RedisServer
) -> None:
    processes = Processes(tmp_path, cloud, killable_redis)
    try:
        async with await processes.start() as client:
            first = await client.responses.create(model="large", input="one")
            second = await client.responses.create(model="large", input="two", previous_response_id=first.id)
            cloud.rest = asyncio.Event()
            turn = await client.responses.create(model="large", input="x", previous_response_id=second.id, stream=True)
            begun = await up_to(turn, "says ")
            key: Any = {"Idempotency-Key": "k"}
            fields: Any = {"model": "large", "input": "four", "background": True, "extra_headers": key}
            stream = await client.responses.create(**fields, stream=True)
            events = await up_to(stream, "cloud ")
            processes.kill()
            killable_redis.kill()
        killable_redis.start()
        cloud.rest.set()
        name, number = events[0]["response"]["id"], events[-1]["sequence_number"]
        async with await processes.start() as client:
            for made in (first, second):
                assert (await client.responses.retrieve(made.id)).to_dict() == made.to_dict()
            with pytest.raises(openai.NotFoundError):  # its client never had its end
                await client.responses.retrieve(str(begun[0]["response"]["id"]))
            assert (await client.responses.create(**fields)).id == name
            async with asyncio.timeout(60):
                resumed = await client.responses.retrieve(name, stream=True, starting_after=number)
                events += [event.to_dict() async for event in resumed]
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert "".join(event.get("delta", "") for event in events) == ANSWER
            assert events[-1]["response"] == (await client.responses.retrieve(name)).to_dict()
            third = await client.responses.create(model="large", input="five", previous_response_id=second.id)
            items: list[Any] = [
                item.to_dict() async for item in client.responses.input_items.list(third.id, order="asc")
            ]
            assert [item["content"][0]["text"] for item in items] == ["one", ANSWER, "two", ANSWER, "five"]
            jobs: Any = await client.get("/jobs", cast_to=object)
            assert [job["status"] for job in jobs["data"]] == ["succeeded"]
    finally:
        processes.kill()


async def up_to(stream: Any, delta: str) -> list[dict[str, Any]]:
    """Read events up to the one with this piece of text."""
    events: list[dict[str, Any]] = []
    async with asyncio.timeout(30):
        async for event in stream:
            events.append(event.to_dict())
            if events[-1].get("delta") == delta:
                break
    return events
