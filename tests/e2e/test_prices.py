"""Costs from a device through a gateway to a server that caches: records add up to tokens times prices."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import redis.asyncio

from causeway_server.cloud_pool.accounts.tenants.config import TenantsConfig, TierPrice
from causeway_server.cloud_pool.accounts.tenants.usage import UsageRow, read_usage, tenant_key
from causeway_server.cloud_pool.core.principal import DEFAULT_TENANT
from causeway_server.edge_node.config.schema import CloudServer
from causeway_server.models.parts.process.messages import WorkerSpec
from causeway_server.router.prices import PICO_USD
from causeway_server.router.types import DecisionRecord, Modality
from tests.cloud_pool.upstreams.http_gateway import Gateway, http_tier, serving
from tests.dialects import HI
from tests.edge_node.device import POLICY, Device, running
from tests.edge_node.parts.test_fusion import PATIENT, ask, audio, encoder, text
from tests.edge_node.raw_upstream import RawUpstream, events, reply
from tests.models.parts.files import tone, wav
from tests.redis_server import RedisServer
from tests.redis_server import redis_server as redis_server  # a fixture
from tests.waiting import until

pytestmark = [pytest.mark.redis, pytest.mark.slow]

AT_THE_EDGE = (
    "{input: 0.15, output: 0.6, cached_input: 0.0375, per_request: 0.002, audio_second: 0.0001, of: v/m, table: t 7}"
)
CAN = "can: [chat, completion, embedding, tools, json, logprobs]\nconstraints"
PRICED = POLICY.replace("price: {input: 1000, output: 1000}", f"price: {AT_THE_EDGE}").replace(
    CAN, "can: [chat, completion, audio]\nconstraints"
)
PRICE = TierPrice(tier="m-large", input=0.1, output=0.37, cached_input=0.0125, per_request=0.001)
SECOND = audio(wav(tone(1.5)))
# The parts of each request, and its prompt's tokens, those of them that were cached, and its answer's.
REQUESTS = [
    ((text("one"),), 101, 0, 7),
    ((text("two"),), 1_003, 640, 13),
    ((text("three"), SECOND), 77, 64, 29),
    ((text("four"), SECOND, SECOND), 9, 0, 1),
    ((text("five"),), 12_345, 12_288, 999),
]


def reported(prompt: int, cached: int, answer: int) -> bytes:
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    usage = {"prompt_tokens": prompt, "completion_tokens": answer, **details}
    return events(*HI, {"choices": [], "usage": usage})


async def usage_of_all_days(database: RedisServer) -> list[UsageRow]:
    """Return the usage of the gateway's only tenant, and forget it."""
    client = redis.asyncio.Redis.from_url(database.url)
    days = [str(key).rstrip("'").rpartition(":")[2] for key in await client.keys(tenant_key(DEFAULT_TENANT, "usage:*"))]
    rows = [row for day in sorted(days) for row in await read_usage(client, DEFAULT_TENANT, day)]
    await client.flushall()
    await client.aclose()
    return rows


@asynccontextmanager
async def both(folder: Path, database: RedisServer, upstream: RawUpstream) -> AsyncIterator[tuple[Device, Gateway]]:
    """A device, whose cloud is a gateway before the upstream."""
    (folder / "gateway").mkdir()
    tier = http_tier(upstream.url, name="m-large", can=("chat", "completion", "audio"))
    gateways = serving(folder / "gateway", tier, tenants=TenantsConfig(prices=(PRICE,)), redis=database.url)
    async with gateways as gateway:
        cloud = {"main": CloudServer(url=gateway.app.url)}
        encoders: dict[Modality, WorkerSpec] = {"audio": encoder("unused")}
        async with running(folder / "device", policy=PRICED, clouds=cloud, encoders=encoders, parts=PATIENT) as device:
            yield device, gateway


async def test_every_record_is_right_to_the_token_and_they_add_up(tmp_path: Path, redis_server: RedisServer) -> None:
    upstream = await RawUpstream().start()
    upstream.replies = [reported(*tokens) for _, *tokens in REQUESTS]
    records: list[DecisionRecord] = []
    async with both(tmp_path, redis_server, upstream) as (device, gateway):
        for parts, *_ in REQUESTS:
            answer = await ask(device, *parts, tags="cloud")
            assert answer.status == 200, answer.body
            records.append(await device.record(answer))
        spent = device.parts.spend.current.usd_today
        await until(lambda: len(gateway.audit) == len(REQUESTS))
    await upstream.stop()
    at_edge, at_gateway = [], []
    for parts, prompt, cached, tokens in REQUESTS:
        audio_s = 1.5 * (len(parts) - 1)
        new = prompt - cached
        at_edge.append(round(new * 150_000 + cached * 37_500 + tokens * 600_000 + 2 * 10**9 + audio_s * 10**8))
        at_gateway.append(new * 100_000 + cached * 12_500 + tokens * 370_000 + 10**9)
    assert [round(record.outcome.usd * PICO_USD) for record in records] == at_edge
    assert [record.outcome.estimated for record in records] == [False] * len(records)
    assert round((spent or 0.0) * PICO_USD) == sum(at_edge)
    decision = records[0].decision
    assert decision is not None
    assert (decision.attempts[0].target.price.of, decision.attempts[0].target.price.table) == ("v/m", "t 7")
    assert [record["pico_usd"] for record in gateway.audit] == at_gateway
    (row,) = await usage_of_all_days(redis_server)
    prompts, cached, tokens = (sum(column) for column in list(zip(*REQUESTS, strict=True))[1:])
    assert row == UsageRow(
        "m-large", "chat", len(REQUESTS), prompts, tokens, sum(at_gateway) / PICO_USD, cached_tokens=cached
    )


@pytest.mark.parametrize(
    ("reply", "estimated", "least", "most"),
    [
        (reply(b"<html>", status="500 Internal Server Error"), False, 0, 0),
        (events(*HI), True, 2 * 10**9 + 2 * 600_000, 2 * 10**9 + 100 * 600_000),  # without usage
        (events(HI[0], end=b""), True, 2 * 10**9, 2 * 10**9 + 100 * 600_000),  # cut off
    ],
    ids=["refused", "no usage", "cut"],
)
async def test_what_a_server_does_not_report_is_estimated_and_what_it_refuses_is_free(
    tmp_path: Path, reply: bytes, estimated: bool, least: int, most: int
) -> None:
    """The device pays for what its cloud began."""
    upstream = await RawUpstream().start()
    upstream.replies = [reply]
    async with running(tmp_path, policy=PRICED, clouds={"main": CloudServer(url=upstream.url)}) as device:
        answer = await ask(device, text("one"), tags="cloud", stream=True)
        outcome = (await device.record(answer)).outcome
        assert (outcome.estimated, least <= round(outcome.usd * PICO_USD) <= most) == (estimated, True), outcome
        assert device.parts.spend.current.usd_today == outcome.usd
    await upstream.stop()
