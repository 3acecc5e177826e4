"""The real gateway with no Triton behind it: what the daemon reports, and how it routes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from causeway_server.cloud_pool.app import build
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.http.config import ServerConfig
from tests.cloud_pool.unreachable import unreachable_tier

from ..device import Device, running

TIER = unreachable_tier("m-large")


class Gateway:
    """What `running` needs of a cloud."""

    def __init__(self) -> None:
        self.url = ""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


@asynccontextmanager
async def without_replicas(folder: Path) -> AsyncIterator[Device]:
    gateway = Gateway()
    async with anyio.create_task_group() as tasks:
        app = build(Config(server=ServerConfig(port=0), tiers=(TIER,)), tasks)
        await app.start()
        gateway.url = app.url
        async with running(folder, cloud=gateway) as device:  # type: ignore[arg-type]
            yield device
        await app.stop()
    await app.close()


async def test_the_device_answers_and_the_reason_is_precise(tmp_path: Path) -> None:
    """Neither "saturated" nor "unreachable": the gateway is reachable, but no replica behind it."""
    async with without_replicas(tmp_path) as device:
        answer = await device.ask(tags="cloud")
        assert (answer.status, answer.headers["x-causeway-route"]) == (200, "edge")
        assert answer.headers["x-causeway-reason"] == "fallback: cloud_unavailable"
        assert answer.headers["x-causeway-degraded"] == "true"
        first, second = (await device.record(answer)).outcome.attempts
        assert (first.target, first.error) == ("large", "cloud_unavailable")
        assert (second.target, second.error) == ("small", "")


async def test_the_next_request_skips_the_cloud(tmp_path: Path) -> None:
    """Until the gateway's `Retry-After` has passed; the breaker stays closed."""
    async with without_replicas(tmp_path) as device:
        await device.ask(tags="cloud")
        answer = await device.ask("another", tags="cloud")
        record = await device.record(answer)
        assert [attempt.target for attempt in record.outcome.attempts] == ["small"]
        assert answer.headers["x-causeway-degraded"] == "true"
        assert record.decision is not None
        assert any((reason.code, reason.target) == ("target_down", "large") for reason in record.decision.reasons)
        assert (record.snapshot.cloud.unavailable_models, record.snapshot.cloud.breaker) == (("m-large",), "closed")
        assert record.snapshot.cloud.reachable


async def test_readyz_and_the_log_name_the_model_until_it_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with without_replicas(tmp_path) as device:
        await device.ask(tags="cloud")
        await device.ask("another", tags="cloud")
        (problem,) = (await device.get("/readyz")).json["problems"]
        assert "has no server for m-large (large answered HTTP 503" in problem
        assert [record.getMessage() for record in caplog.records].count(problem) == 1
        assert device.parts.clouds.first is not None
        device.parts.clouds.first.health.model_answered("m-large")
        assert (await device.get("/readyz")).json["problems"] == []


async def test_only_cloud_is_a_503_with_retry_after(tmp_path: Path) -> None:
    """503 with the reason and the gateway's own `Retry-After`, also for an immediate retry."""
    async with without_replicas(tmp_path) as device:
        for _ in range(2):
            answer = await device.ask(headers={"x-causeway-prefer": "only_cloud"})
            assert (answer.status, answer.code) == (503, "all_attempts_failed")
            assert "cloud_unavailable" in answer.message
            assert answer.headers["X-Request-ID"] == answer.headers["x-causeway-decision"]
            assert 1 <= int(answer.headers["Retry-After"]) <= 5
