"""Jobs through the real commands: gateway, workers, Redis and Triton, each killed once."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import openai
import pytest

from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.redis_client import RedisClient, as_fields, as_list
from causeway_server.cloud_pool.storage.stores import SCRIPTS
from tests.cloud_pool.conftest import Command, Pool

from .conftest import until
from .redis_server import RedisServer

ROOT = Path(__file__).parents[3]
CONFIG = """
server: {port: 0, token_file: tokens}
jobs: {lease_s: 1.0, backoff_s: 0.1, reclaim_interval_s: 0.1, drain_s: 1.0, max_attempts: 50}
"""
CHAT = {"model": "assistant-large", "messages": [{"role": "user", "content": "Say something long."}], "max_tokens": 200}


class Deployment:
    """All services on loopback, with a Triton of this test's own, because the test kills it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tokens").write_text("kiosk kiosk-secret\nother other-secret\n")
        (folder / "gateway.yaml").write_text(CONFIG)
        self.redis = RedisServer(folder)
        self.commands: list[Command] = []
        environment = os.environ.get("CAUSEWAY_TRITON_ENV", str(ROOT / ".venv-triton"))
        ports = ("--grpc-port", "0", "--metrics-port", "0", "--threads", "1", "--drain-s", "1")
        self.pool = Pool(self._begun(Command("triton", *ports, CAUSEWAY_TRITON_ENV=environment)))

    def start(self, *what: str) -> Command:
        config = ("--config", str(self.folder / "gateway.yaml"), "--redis", self.redis.url)
        return self._begun(Command(*what, *config, "--triton", self.pool.grpc))

    def _begun(self, command: Command) -> Command:
        self.commands.append(command)
        return command

    def close(self) -> None:
        for command in reversed(self.commands):
            if command.process.poll() is None:
                command.stop()
        self.redis.kill()


@pytest.fixture
def bed(redis_server: RedisServer) -> Iterator[Deployment]:
    if not (Path(os.environ.get("CAUSEWAY_TRITON_ENV", ROOT / ".venv-triton")) / "triton.json").is_file():
        pytest.skip("no Triton environment: `make setup` makes it")
    with tempfile.TemporaryDirectory(prefix="jobs-") as folder:
        made = Deployment(Path(folder))
        try:
            yield made
        finally:
            made.close()


async def request(
    url: str, method: str, path: str, token: str = "kiosk-secret", **more: object
) -> tuple[int, dict[str, object]]:
    headers = {"authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(headers=headers) as http, http.request(method, url + path, **more) as response:  # type: ignore[arg-type]
        return response.status, await response.json()


@pytest.mark.triton
@pytest.mark.redis
async def test_accepted_jobs_survive_every_kill(bed: Deployment) -> None:
    """kill -9 of gateway, Redis, worker and Triton in turn: each accepted job succeeds once."""
    gateway = bed.start("serve")
    url = gateway.ready()["url"]
    jobs = []
    for _ in range(4):
        status, accepted = await request(url, "POST", "/jobs", json=CHAT)
        assert status == 202, accepted
        jobs.append(str(accepted["id"]))
    gateway.process.kill()
    gateway.process.wait()
    bed.redis.kill()
    bed.redis.start()
    first = bed.start("worker")
    first.ready()
    database = RedisClient(JobsConfig(redis=bed.redis.url), SCRIPTS)

    async def state(job: str) -> str:
        fields = as_fields(await database.command("HGETALL", database.key("job", job)))
        return fields["state"].decode()

    async def begun() -> bool:
        return any([await state(job) == "running" for job in jobs])

    await until(begun)
    first.process.kill()
    first.process.wait()
    second = bed.start("worker", "--operator-port", "0")
    operator = second.ready()["operator"]
    await until(begun)
    bed.pool.server.kill()
    bed.pool.wait_ready()
    url = bed.start("serve").ready()["url"]

    async def done() -> bool:
        return all([await state(job) == "succeeded" for job in jobs])

    await until(done)
    for job in jobs:
        status, view = await request(url, "GET", f"/jobs/{job}")
        assert view["status"] == "succeeded"
        assert view["result"]["object"] == "chat.completion"  # type: ignore[index]
        assert (await request(url, "GET", f"/jobs/{job}", "other-secret"))[0] == 404
        entries = as_list(await database.command("XRANGE", database.key("events", job), "-", "+"))
        ends = [as_fields(as_list(entry)[1])["event"] for entry in entries]
        assert ends.count(b"succeeded") == 1
    async with aiohttp.ClientSession() as http, http.get(f"{operator}/metrics") as response:
        text = await response.text()
    assert 'causeway_jobs_runs_total{outcome="succeeded",tier="assistant-large"}' in text
    for command in bed.commands:
        assert "Say something" not in "".join(command.log)
    await database.close()
    # A batch with OpenAI's own client, and the operator's command, on the same processes.
    async with openai.AsyncOpenAI(base_url=url, api_key="kiosk-secret", max_retries=0) as client:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT | {"max_tokens": 4}}
        file = await client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )

        async def completed() -> bool:
            return (await client.batches.retrieve(batch.id)).status == "completed"

        await until(completed)
    assert second.stop() == 0
    listed = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "causeway_server.cloud_pool", "dlq", "--redis", bed.redis.url, "list"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    assert listed.stdout == b""
