"""The real gateway with no living Triton behind it: what the daemon says, and what it does."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from cloud_pool.app import build
from cloud_pool.config.schema import Config, ServerConfig, TierConfig

from .box import POLICY, Box, running

TIER = TierConfig(name="m-large", artifact="assistant-large", triton="127.0.0.1:1")
SLOW = POLICY.replace("200ms", "20s").replace("350ms", "20s")


class Gateway:
    """What `running` asks of a cloud."""

    def __init__(self) -> None:
        self.url = ""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


@asynccontextmanager
async def before_nobody(folder: Path) -> AsyncIterator[Box]:
    gateway = Gateway()
    async with anyio.create_task_group() as tasks:
        app = build(Config(server=ServerConfig(port=0), tiers=(TIER,)), tasks)
        await app.start()
        gateway.url = app.url
        async with running(folder, policy=SLOW, cloud=gateway) as box:  # type: ignore[arg-type]
            yield box
        await app.stop()
    await app.close()


async def test_the_device_answers_and_the_reason_is_true(tmp_path: Path) -> None:
    """Not "saturated" and not "unreachable": the way to the cloud is well, and nobody is there who could answer."""
    async with before_nobody(tmp_path) as box:
        answer = await box.ask(tags="cloud")
        assert (answer.status, answer.headers["x-causeway-route"]) == (200, "edge")
        assert answer.headers["x-causeway-reason"] == "fallback: cloud_unavailable"
        assert answer.headers["x-causeway-degraded"] == "true"
        first, second = (await box.record(answer)).outcome.attempts
        assert (first.target, first.error) == ("large", "cloud_unavailable")
        assert (second.target, second.error) == ("small", "")


async def test_the_next_request_does_not_ask_again(tmp_path: Path) -> None:
    """Until the gateway's `Retry-After` is over the target is down, and passed over; the breaker has no part in it."""
    async with before_nobody(tmp_path) as box:
        await box.ask(tags="cloud")
        answer = await box.ask("another", tags="cloud")
        record = await box.record(answer)
        assert [attempt.target for attempt in record.outcome.attempts] == ["small"]
        assert answer.headers["x-causeway-degraded"] == "true"
        assert record.decision is not None
        assert any((reason.code, reason.target) == ("target_down", "large") for reason in record.decision.reasons)
        assert (record.snapshot.cloud.unavailable_models, record.snapshot.cloud.breaker) == (("m-large",), "closed")
        assert record.snapshot.cloud.reachable


async def test_who_wants_the_cloud_only_is_told_when_to_come_back(tmp_path: Path) -> None:
    """503 with the reason and the gateway's own `Retry-After`; asked again at once, the same."""
    async with before_nobody(tmp_path) as box:
        for _ in range(2):
            answer = await box.ask(headers={"x-causeway-prefer": "only_cloud"})
            assert (answer.status, answer.code) == (503, "all_attempts_failed")
            assert "cloud_unavailable" in answer.message
            assert 1 <= int(answer.headers["Retry-After"]) <= 5
