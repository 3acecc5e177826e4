"""What clients may use: tokens a minute, USD a day, and priorities, in a whole daemon. An answer has 8 or 10 tokens."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from causeway_server.edge_node.clock import Clock, system_clock
from causeway_server.edge_node.config.schema import ClientLimits, KeyConfig, LimitsConfig, NamedLimits, ServerConfig
from causeway_server.edge_node.http.api import bounded_priority
from causeway_server.router.errors import ConfigError
from causeway_server.router.types import Priority
from tests.waiting import until

from ..device import Answer, Device, running
from ..jobs.cloud import JobCloud
from ..jobs.support import PROMPT, request, submit
from .test_direct import Watched

DAY_S = 86_400
SERVER = ServerConfig(
    port=0, keys=tuple(KeyConfig(name, hashlib.sha256(name.encode()).hexdigest()) for name in ("till", "office"))
)


def of_till(**limits: Any) -> LimitsConfig:
    return LimitsConfig(overrides=(NamedLimits(name="till", **limits),))


async def ask(device: Device, key: str = "till", tags: str = "cloud", **body: Any) -> Answer:
    """Ask for an answer that is not cached."""
    return await device.ask(tags=tags, headers={"Authorization": f"Bearer {key}"}, **{"temperature": 0.7, **body})


def clock_at(now: list[float]) -> Clock:
    return Clock(monotonic=system_clock().monotonic, unix=lambda: now[0])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("way", ["direct", "cloud", "edge"])
async def test_a_client_in_debt_waits(tmp_path: Path, way: str, stream: bool) -> None:
    """Two answers exceed a minute's worth; another key goes on."""
    async with running(tmp_path, server=SERVER, limits=of_till(tokens_per_minute=12)) as device:
        watched = Watched.of(device)
        watched.is_off = way != "direct"
        tags = "edge" if way == "edge" else "cloud"
        for _ in range(2):
            assert (await ask(device, tags=tags, stream=stream)).status == 200
        assert bool(watched.begun) == (way == "direct")
        refused = await ask(device, tags=tags, stream=stream)
        assert (refused.status, refused.code) == (429, "rate_limit_exceeded")
        assert refused.message == "Your limit is 12 tokens a minute."
        assert 0 < int(refused.headers["Retry-After"]) <= 60
        assert (await ask(device, "office", tags=tags, stream=stream)).status == 200
        device.assert_nothing_leaks()


async def test_what_the_cache_answers_costs_nothing(tmp_path: Path) -> None:
    async with running(tmp_path, server=SERVER, limits=of_till(tokens_per_minute=12)) as device:
        for _ in range(4):
            assert (await ask(device, temperature=0.0)).status == 200
        assert device.newest().outcome.route == "cache"


async def test_an_abandoned_answer_counts(tmp_path: Path) -> None:
    """The prompt, by this device's count, and what was received."""
    async with running(tmp_path, server=SERVER, limits=of_till(tokens_per_minute=12)) as device:
        device.cloud.fault = "drip"
        body = {"model": "large", "stream": True, "messages": [{"role": "user", "content": "x" * 200}]}
        headers = {"Authorization": "Bearer till"}
        async with device.session.post("/v1/chat/completions", json=body, headers=headers) as response:
            await response.content.readline()
        await until(lambda: device.parts.decisions.newest is not None)
        device.cloud.fault = "none"
        assert (await ask(device)).status == 429


async def test_a_budget_lasts_until_midnight_and_survives_a_restart(tmp_path: Path) -> None:
    """An answer costs a cent. The file does not name the client."""
    now, limits = [1_780_000_000.0], of_till(usd_per_day=0.015)
    async with running(tmp_path, server=SERVER, limits=limits, clock=clock_at(now)) as device:
        for _ in range(2):
            assert (await ask(device)).status == 200
    async with running(tmp_path, server=SERVER, limits=limits, clock=clock_at(now)) as device:
        refused = await ask(device)
        assert (refused.status, refused.message) == (429, "Your budget of 0.015 USD a day is spent.")
        assert int(refused.headers["Retry-After"]) == DAY_S - now[0] % DAY_S
        assert (await ask(device, "office")).status == 200
        now[0] += DAY_S
        assert (await ask(device)).status == 200
        now[0] -= DAY_S  # a clock that is set back
        assert (await ask(device)).status == 429
    assert not any(b"till" in path.read_bytes() for path in (tmp_path / "state").glob("spend-1.sqlite*"))


async def test_a_job_waits_for_its_clients_budget(tmp_path: Path) -> None:
    """The job was accepted before the budget was spent."""
    limits = of_till(usd_per_day=0.015)
    headers = {"Authorization": "Bearer till"}
    async with running(tmp_path, server=SERVER, limits=limits, cloud=JobCloud(), jobs=PROMPT) as device:
        accepted = await submit(device, model="large", not_before_ms=500, headers=headers)
        assert accepted.status == 202
        for _ in range(2):
            assert (await ask(device)).status == 200
        await until(lambda: device.newest().outcome.error == "rate_limit_exceeded")
        job = await request(device, "GET", f"/v1/jobs/{accepted.json['id']}", headers=headers)
        assert job.json["status"] == "queued"
        assert (await submit(device, headers=headers)).status == 429


@pytest.mark.parametrize(
    ("most", "asked", "stream", "told"),
    [
        ("interactive", None, True, "interactive"),
        ("interactive", None, False, "standard"),
        ("interactive", "interactive", False, "interactive"),
        ("standard", None, True, "standard"),
        ("standard", "interactive", True, "standard"),
        ("standard", "bulk", True, "bulk"),
        ("bulk", None, False, "bulk"),
    ],
)
async def test_the_cloud_is_told_a_priority_within_what_the_client_may_have(
    tmp_path: Path, most: Priority, asked: Priority | None, stream: bool, told: str
) -> None:
    async with running(tmp_path, server=SERVER, limits=of_till(priority=most)) as device:
        headers = {"Authorization": "Bearer till", **({"x-causeway-priority": asked} if asked else {})}
        await device.ask(tags="cloud", headers=headers, stream=stream)
        assert device.cloud.request_headers[0]["x-causeway-priority"] == told


def test_limits_are_a_clients_own_its_tenants_or_the_default() -> None:
    limits = LimitsConfig(ClientLimits(tokens_per_minute=5), (NamedLimits(name="acme"), NamedLimits(name="acme/olga")))
    assert [limits.of(name)[0] for name in ("acme/olga", "acme/pia", "acme", "till", "2001:db8::7")] == [
        *("acme/olga", "acme", "acme", "till", "2001:db8::/64")
    ]
    assert limits.of("till")[1] is limits.default
    with pytest.raises(ConfigError, match="'acme' is listed twice"):
        LimitsConfig(overrides=(NamedLimits(name="acme"), NamedLimits(name="acme"))).check()


def test_a_priority_is_lowered_never_raised() -> None:
    assert bounded_priority(None, "interactive") is None
    assert bounded_priority("bulk", "standard") == "bulk"
    assert bounded_priority("interactive", "standard") == "standard"
