"""Variants behind several gateways: one count, one verdict, and what is left of both without Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import redis.asyncio

from causeway_server.cloud_pool.tiers.config import TierConfig, TierVariantConfig
from causeway_server.cloud_pool.tiers.variants import TierVariants
from causeway_server.router.variants.settings import TrialConfig, VerdictMetric
from tests.cloud_pool.redis.declared_keys import declared
from tests.cloud_pool.upstreams.http_gateway import Gateway, http_tier, serving
from tests.edge_node.scripted import CLOUD_WORDS
from tests.redis_server import RedisServer
from tests.redis_server import redis_server as redis_server  # a fixture
from tests.waiting import until

from .test_variants import TwoModels, ask, cloud, score, variants_of  # noqa: F401  (a fixture)

pytestmark = pytest.mark.redis

TRIAL = TrialConfig(metrics=(VerdictMetric("feedback"),), least=20)
TIER = TierConfig(name="large", model="m", variants=(TierVariantConfig("v2", 50),), trial=TRIAL)


@pytest.fixture
async def client(redis_server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    redis_server.flush()
    async with redis.asyncio.Redis.from_url(redis_server.url, retry=None) as made:
        yield made


@pytest.fixture
def both(client: redis.asyncio.Redis) -> tuple[TierVariants, TierVariants]:
    return TierVariants([TIER], client=client), TierVariants([TIER], client=client)


def count(variants: TierVariants, variant: str, score: float, answers: int) -> None:
    for number in range(answers):
        variants.trials.scored("large", variant, number % 64, score, "")


async def exchange(*gateways: TierVariants) -> None:
    for gateway in gateways:
        assert gateway.shared is not None
        await gateway.shared.exchange()


def answers(variants: TierVariants) -> list[float]:
    """The answers of variant and baseline that a gateway knows."""
    (trial,) = variants.trials
    return [tally.total[1] for tally in trial.arms["feedback"]]


async def test_gateways_have_one_count_and_the_first_verdict_is_that_of_all(
    both: tuple[TierVariants, TierVariants], client: redis.asyncio.Redis
) -> None:
    """Neither has enough answers alone. A third one, started later, knows both counts and verdict."""
    one, other = both
    count(one, "v2", 0.0, 15)
    count(one, "", 1.0, 15)
    count(other, "v2", 0.0, 14)
    count(other, "", 1.0, 15)
    await exchange(one, other)
    assert (answers(one), answers(other)) == ([15, 15], [29, 30])
    assert other.problems[0].startswith("The variant v2 of large is returned")
    await exchange(one)
    assert one.problems == other.problems
    third = TierVariants([TIER], client=client)
    await exchange(third)
    assert (answers(third), third.problems) == ([29, 30], one.problems)
    keys = [key.decode() if isinstance(key, bytes) else key for key in await client.keys("*")]
    assert all(len(declared(key)) == 1 for key in keys)
    assert all([await client.ttl(key) > 0 for key in keys])


async def test_answers_that_come_while_counts_are_exchanged_are_kept(both: tuple[TierVariants, TierVariants]) -> None:
    one, other = both
    for _ in range(3):
        count(one, "v2", 1.0, 2)
        count(other, "", 1.0, 3)
        await exchange(other, one)
        count(one, "v2", 1.0, 1)
    await exchange(one, other)
    assert answers(one) == answers(other) == [9, 9]


async def test_a_variant_that_was_removed_begins_again(both: tuple[TierVariants, TierVariants]) -> None:
    one, _ = both
    count(one, "v2", 0.0, 30)
    count(one, "", 1.0, 30)
    await exchange(one)
    assert one.problems
    one.use([TierConfig(name="large", model="m")])
    await exchange(one)
    one.use([TIER])
    await exchange(one)
    assert (answers(one), one.problems) == ([0, 0], ())


@pytest.mark.slow
async def test_without_redis_each_judges_alone_and_nothing_is_lost_or_counted_twice(
    redis_server: RedisServer, both: tuple[TierVariants, TierVariants]
) -> None:
    one, other = both
    await exchange(one, other)
    redis_server.kill()
    try:
        count(one, "v2", 1.0, 5)
        await exchange(one)
        assert "judged by each process alone" in one.problems[-1]
        count(one, "v2", 1.0, 2)
        await exchange(one)
        assert answers(one) == [7, 0]
    finally:
        redis_server.start()
    for _ in range(3):  # the connections are made again
        await exchange(one, other)
    assert (answers(one), answers(other), one.problems) == ([7, 0], [7, 0], ())


@pytest.mark.slow
async def test_a_variant_that_clients_like_less_is_returned_by_gateways_that_answer_half_each(
    cloud: TwoModels,  # noqa: F811
    tmp_path: Path,
    redis_server: RedisServer,
    client: redis.asyncio.Redis,
) -> None:
    """Usage and the mean of scores name the variant, too."""
    tier = http_tier(cloud.url, variants=TIER.variants, trial=TRIAL)
    async with AsyncExitStack() as stack:
        gateways: list[Gateway] = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            gateways.append(await stack.enter_async_context(serving(tmp_path / name, tier, redis=redis_server.url)))
        for number in range(60):
            answer = await ask(gateways[number % 2], str(number))
            assert answer.text == "".join(CLOUD_WORDS)
            await score(gateways[number % 2], answer, 0.0 if "x-causeway-variant" in answer.headers else 1.0)
        await until(lambda: all(variants_of(gateway).problems for gateway in gateways))
        metrics = gateways[0].app.runtime.metrics.text().decode()
        assert 'causeway_gateway_feedback_score{tier="large",variant="v2"} 0.0' in metrics
        for gateway in gateways:
            found = [(await ask(gateway, str(number))).headers.get("x-causeway-variant") for number in range(10)]
            assert found == [None] * 10


async def test_any_gateway_takes_the_score_of_another_ones_answer(
    cloud: TwoModels,  # noqa: F811
    tmp_path: Path,
    redis_server: RedisServer,
    client: redis.asyncio.Redis,
) -> None:
    """Once, and of no answer that there never was; an offer that no gateway can read stops none."""
    tier = http_tier(cloud.url, variants=TIER.variants, trial=TRIAL)
    async with AsyncExitStack() as stack:
        gateways: list[Gateway] = []
        for name in ("a", "b"):
            (tmp_path / name).mkdir()
            gateways.append(await stack.enter_async_context(serving(tmp_path / name, tier, redis=redis_server.url)))
        one, other = gateways
        answer = await ask(one, "hello")
        await client.xadd("causeway:feedback", {"offer": "{"})
        await client.xadd("causeway:feedback", {"other": "{}"})
        receipts = [(await score(gateway, answer, 1.0)).json["counted"] for gateway in (other, one, other)]
        assert receipts == [True, False, False]
        assert 'result="good"' in one.app.runtime.metrics.text().decode()
        assert (await other.post("/feedback", {"id": "never", "score": 1})).status == 404
        keys = [key.decode() async for key in client.scan_iter("causeway:feedback*")]
        assert len(keys) == 3
        assert all([len(declared(key)) == 1 and await client.ttl(key) > 0 for key in keys])
