"""Jobs and messages of a broker, with every action of the guard, on a real Redis and NATS."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from causeway_server.cloud_pool.background import run_pipeline, run_worker
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.http.config import OperatorConfig
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.streams.config import StreamsConfig
from tests.cloud_pool.serving.test_guard import ACTIONS, check_paths, rules
from tests.cloud_pool.upstreams.http_gateway import Gateway, http_tier, serving
from tests.edge_node.echoing import EchoCloud
from tests.edge_node.guard.test_doors import MAIL, SECRET
from tests.nats_server import NatsServer
from tests.ports import free_port

from .brokers import NatsBroker
from .pipelines import Topics, encoded
from .test_process import pipeline_topics

pytestmark = [pytest.mark.redis, pytest.mark.nats, pytest.mark.slow]
MESSAGES = [{"role": "user", "content": SECRET}]


def config_of(cloud: EchoCloud, jobs: JobsConfig, action: str, folder: Path) -> Config:
    return Config(
        tiers=(http_tier(cloud.url),),
        guard=rules(action),
        redis=jobs.redis,
        jobs=msgspec.structs.replace(jobs, durability="warn"),
        streams=StreamsConfig(tenant="factory", batch_wait_s=0.001, in_flight=1),
        operator=OperatorConfig(port=free_port()),
        audit_file=str(folder / "background"),
    )


def check(action: str, cloud: EchoCloud, text: str, code: str) -> None:
    assert (text, code) == (("", "guard_refused") if action == "refuse" else (SECRET, ""))
    assert (MAIL in cloud.asked, "<EMAIL_1>" in cloud.asked) == (action == "audit", action == "mask")


@pytest.mark.parametrize("action", ACTIONS)
async def test_a_message_has_every_action(
    nats_server: NatsServer, jobs: JobsConfig, tmp_path: Path, action: str
) -> None:
    topics, cloud = await Topics.create(NatsBroker(nats_server)), EchoCloud()
    await cloud.start()
    config, stop = config_of(cloud, jobs, action, tmp_path), asyncio.Event()
    await topics.send(encoded("a", data={"messages": MESSAGES}))
    work = asyncio.ensure_future(run_pipeline(config, pipeline_topics(topics), stop))
    refused = action == "refuse"
    await topics.until(int(not refused), dead=int(refused))
    stop.set()
    await work
    await cloud.stop()
    if refused:
        (dead,) = await topics.dead()
        assert "guard_refused" in json.dumps(dead)
        check(action, cloud, "", "guard_refused")
    else:
        (answer,) = await topics.answers()
        check(action, cloud, answer["data"]["choices"][0]["message"]["content"], "")


async def ended(gateway: Gateway, job: str) -> dict[str, Any]:
    async with asyncio.timeout(60.0):
        while True:
            async with gateway.session.get(f"{gateway.app.url}/jobs/{job}") as response:
                found: dict[str, Any] = await response.json()
            if found["status"] not in ("queued", "running"):
                return found
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("action", ACTIONS)
async def test_a_job_has_every_action(jobs: JobsConfig, tmp_path: Path, action: str) -> None:
    cloud = EchoCloud()
    await cloud.start()
    config, stop = config_of(cloud, jobs, action, tmp_path), asyncio.Event()
    sections: dict[str, Any] = {"guard": config.guard, "redis": config.redis, "jobs": config.jobs}
    async with serving(tmp_path, *config.tiers, **sections) as gateway:
        check_paths(gateway.app.paths)
        worker = asyncio.ensure_future(run_worker(config, stop))
        accepted = await gateway.post("/jobs", {"model": "large", "messages": MESSAGES})
        assert accepted.status == 202, accepted.body
        found = await ended(gateway, accepted.json["id"])
        stop.set()
        await worker
    await cloud.stop()
    if found["status"] == "succeeded":
        check(action, cloud, found["result"]["choices"][0]["message"]["content"], "")
    else:
        check(action, cloud, "", found["error"]["code"])
