"""The cache over HTTP: headers, streams, tenants, billing and records, on two gateways and one Redis."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import redis
import redis.asyncio
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from causeway_server.cloud_pool.accounts.tenants.config import TenantsConfig, TierPrice
from causeway_server.cloud_pool.accounts.tenants.usage import read_usage
from causeway_server.cloud_pool.cache.config import CacheConfig
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.core.request_context import answer_head
from causeway_server.router.errors import CloudFailed
from tests.cloud_pool.accounts.identity.token_issuer import Issuer
from tests.redis_server import RedisServer
from tests.waiting import until

from .gateways import Clock
from .served import ASK, HEAD, Headers, Served, served

pytestmark = pytest.mark.redis
Two = tuple[Served, Served]
MODEL = {
    "gen_ai_operation_name": "chat",
    "gen_ai_request_model": "assistant-large",
    "gen_ai_response_model": "assistant-large",
}


@pytest.fixture
def issuer(tmp_path: Path) -> Issuer:
    return Issuer(tmp_path)


def token(issuer: Issuer, tenant: str = "acme", device: str = "kiosk-17") -> str:
    now = time.time()
    return issuer.sign({"tenant": tenant, "sub": device, "iat": now, "nbf": now, "exp": now + 3600})


@pytest.fixture
def whole_config(issuer: Issuer, redis_server: RedisServer, config: CacheConfig, tmp_path: Path) -> Config:
    prices = (TierPrice(tier="assistant-large", input=1000, output=1000),)
    return Config(
        identity=issuer.config,
        redis=redis_server.url,
        cache=config,
        tenants=TenantsConfig(prices=prices, usage_flush_s=0.05),
        audit_file=str(tmp_path / "audit.jsonl"),
    )


@pytest.fixture
async def two(whole_config: Config, clock: Clock) -> AsyncIterator[Two]:
    async with served(whole_config, now_ms=clock) as one, served(whole_config, now_ms=clock) as other:
        yield one, other


def lines_of(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


async def audited(config: Config, count: int) -> list[dict[str, Any]]:
    """Return the audit records, by outcome of the cache, once there are `count`."""
    ends = time.monotonic() + 60.0
    while True:
        lines = lines_of(config.audit_file)
        if len(lines) >= count:
            return sorted((json.loads(line) for line in lines), key=lambda record: record["cache"])
        assert time.monotonic() < ends, lines
        await asyncio.sleep(0.01)


def events(text: str) -> list[str]:
    assert text.endswith("\n\n")
    return [event.removeprefix("data: ") for event in text[:-2].split("\n\n")]


async def stored(config: Config) -> None:
    """Wait until an answer is in the cache, which may be after its client has it."""
    assert isinstance(config.redis, str)
    async with redis.asyncio.Redis.from_url(config.redis) as client:
        while not await client.keys(f"{config.cache.key_prefix}:*:entry"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_whole_answer_streams_from_the_cache(
    two: Two, issuer: Issuer, clock: Clock, whole_config: Config
) -> None:
    """The hit has its own id and time, and its usage is all cached."""
    one, other = two
    one.script.permit(9)
    async with one.post(token(issuer)) as made:
        first = ChatCompletion.model_validate(await made.json())
    assert (made.headers["x-causeway-cache"], "age" in made.headers) == ("miss", False)
    await until(lambda: bool(one.metric("causeway_gateway_cache_requests_total", outcome="miss")))
    await stored(whole_config)
    clock.move(3.0)
    async with other.post(token(issuer), stream=True, stream_options={"include_usage": True}) as found:
        text = await found.text()
    assert found.headers["content-type"].startswith("text/event-stream")
    assert (found.headers["x-causeway-cache"], found.headers["age"]) == ("hit", "3")
    assert (found.headers["x-causeway-tier"], found.headers["x-causeway-tier-reason"]) == (
        "assistant-large",
        "requested",
    )
    *data, done = events(text)
    assert done == "[DONE]"
    chunks = [ChatCompletionChunk.model_validate_json(event) for event in data]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == first.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == "stop"
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (20, 3)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 20
    assert len({chunk.id for chunk in chunks} | {first.id}) == 2


async def test_streamed_answer_is_whole_from_the_cache(two: Two, issuer: Issuer) -> None:
    one, other = two
    one.script.permit(9)
    async with one.post(token(issuer), stream=True) as made:
        await made.text()
    async with other.post(token(issuer)) as found:
        answer = ChatCompletion.model_validate(await found.json())
    assert found.headers["x-causeway-cache"] in ("hit", "coalesced")
    assert answer.choices[0].message.content == "one two three"
    assert answer.choices[0].finish_reason == "stop"


async def test_completions_are_cached_apart_from_chats(two: Two, issuer: Issuer) -> None:
    one, other = two
    one.script.permit(9)
    bearer = {"authorization": f"Bearer {token(issuer)}"}
    body = {"model": "assistant-large", "prompt": "my secret question"}
    async with one.session.post(f"{one.url}/v1/completions", json=body, headers=bearer) as made:
        assert made.headers["x-causeway-cache"] == "miss"
        text = (await made.json())["choices"][0]["text"]
    async with other.session.post(f"{other.url}/v1/completions", json=body, headers=bearer) as found:
        assert found.headers["x-causeway-cache"] in ("hit", "coalesced")
        assert (await found.json())["choices"][0]["text"] == text == "one two three"
    other.script.permit(9)
    async with other.post(token(issuer)) as chat:
        assert chat.headers["x-causeway-cache"] == "miss"


async def test_one_of_three_sharing_requests_is_billed(two: Two, issuer: Issuer, whole_config: Config) -> None:
    """Usage, metrics and audit records agree."""
    one, other = two
    one.script.permit(1)
    async with one.post(token(issuer), stream=True) as leading:
        await leading.content.readuntil(b"one ")
        async with other.post(token(issuer), stream=True) as following:
            await following.content.readuntil(b"one ")
            one.script.permit(9)
            assert "three" in await following.text()
        await leading.text()
    await until(lambda: bool(one.metric("causeway_gateway_cache_requests_total", outcome="miss")))
    async with other.post(token(issuer)) as hit:
        assert hit.headers["x-causeway-cache"] == "hit"
    coalesced, kept, paid = await audited(whole_config, 3)
    assert (coalesced["cache"], kept["cache"], paid["cache"]) == ("coalesced", "hit", "miss")
    for record in (coalesced, kept):
        assert (record["outcome"], record["tier"]) == ("ok", "assistant-large")
        assert (record["prompt_tokens"], record["completion_tokens"], record["pico_usd"]) == (0, 0, 0)
    assert (paid["prompt_tokens"], paid["completion_tokens"], paid["pico_usd"]) == (20, 3, 23 * 10**9)
    await until(lambda: other.metric("causeway_gateway_requests_total", tier="assistant-large", outcome="ok") == 2)
    for gateway, tokens, tokened in ((one, 3, 1), (other, 0, 0)):
        assert gateway.metric("causeway_gateway_tokens_total", tier="assistant-large", type="output") == tokens
        assert gateway.metric("gen_ai_server_time_to_first_token_count", **MODEL) == tokened


async def test_client_that_left_is_billed_for_the_whole_generation(
    two: Two, issuer: Issuer, whole_config: Config, redis_server: RedisServer
) -> None:
    """In one record, while a follower on another gateway reads it."""
    one, other = two
    tenant = f"payer{time.monotonic_ns()}"
    session = aiohttp.ClientSession()
    one.script.permit(1)
    leading = await session.post(
        f"{one.url}/v1/chat/completions",
        json={"model": "assistant-large", "messages": [{"role": "user", "content": "x"}], "stream": True},
        headers={"authorization": f"Bearer {token(issuer, tenant)}"},
    )
    await leading.content.readuntil(b"one ")
    following = other.post(token(issuer, tenant), messages=[{"role": "user", "content": "x"}], stream=True)
    async with following as follower:
        await follower.content.readuntil(b"one ")
        await session.close()
        await until(lambda: bool(one.metric("causeway_gateway_cache_requests_total", outcome="miss")))
        one.script.permit(9)
        assert "three" in await follower.text()
    coalesced, left = await audited(whole_config, 2)
    assert (coalesced["outcome"], coalesced["completion_tokens"]) == ("ok", 0)
    assert (left["outcome"], left["prompt_tokens"], left["completion_tokens"]) == ("client_gone", 20, 3)
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    async with redis.asyncio.Redis.from_url(redis_server.url) as client:
        used: list[int] = []
        while sum(used) < 3:
            used = [row.completion_tokens for row in await read_usage(client, tenant, day)]
    assert used == [3]


async def test_leaving_follower_is_billed_nothing(two: Two, issuer: Issuer, whole_config: Config) -> None:
    """Not even its prompt."""
    one, other = two
    one.script.permit(1)
    async with one.post(token(issuer), stream=True) as leading:
        await leading.content.readuntil(b"one ")
        session = aiohttp.ClientSession()
        body = {"model": "assistant-large", "messages": [{"role": "user", "content": "my secret question"}]}
        headers = {"authorization": f"Bearer {token(issuer)}"}
        following = await session.post(
            f"{other.url}/v1/chat/completions", json={**body, "stream": True}, headers=headers
        )
        await following.content.readuntil(b"one ")
        await session.close()
        (gone,) = await audited(whole_config, 1)
        one.script.permit(9)
        assert "three" in await leading.text()
    assert (gone["cache"], gone["outcome"], gone["prompt_tokens"], gone["pico_usd"]) == (
        "coalesced", "client_gone", 0, 0)  # fmt: skip


async def test_devices_of_a_tenant_share_and_tenants_do_not(two: Two, issuer: Issuer) -> None:
    one, other = two
    one.script.permit(9)
    async with one.post(token(issuer, "acme", "kiosk-1")) as made:
        await made.read()
    await until(lambda: bool(one.metric("causeway_gateway_cache_requests_total", outcome="miss")))
    async with other.post(token(issuer, "acme", "kiosk-2")) as found:
        assert found.headers["x-causeway-cache"] == "hit"
    other.script.permit(9)
    async with other.post(token(issuer, "emca", "kiosk-1")) as stranger:
        assert stranger.headers["x-causeway-cache"] == "miss"
    assert len(other.script.requests) == 1


@pytest.mark.parametrize(
    ("headers", "changes"),
    [
        ({"cache-control": "no-store"}, {}),
        ({"cache-control": "max-age=0, No-Cache"}, {}),
        ({"x-causeway-tags": "staff,private"}, {}),
        ({"x-causeway-tags": "Private"}, {}),
        ([("x-causeway-tags", "staff"), ("x-causeway-tags", "PRIVATE")], {}),
        ([("cache-control", "max-stale=5"), ("cache-control", "no-store")], {}),
        ({}, {"causeway": {"tags": ["Private"]}}),
        ({}, {"causeway": {"tags": ["private"]}}),
        ({}, {"temperature": 0.5}),
    ],
)
async def test_marked_requests_bypass_the_cache_both_ways(
    two: Two, issuer: Issuer, headers: Headers, changes: dict[str, object]
) -> None:
    one, _ = two
    one.script.permit(99)
    async with one.post(token(issuer)) as plain:
        assert plain.headers["x-causeway-cache"] == "miss"
    for _ in range(2):
        async with one.post(token(issuer), headers=headers, **changes) as marked:
            assert marked.headers["x-causeway-cache"] == "bypass"
    assert len(one.script.requests) == 3


async def test_malformed_tag_is_refused(two: Two, issuer: Issuer) -> None:
    """It may be a wish for privacy."""
    async with two[0].post(token(issuer), headers={"x-causeway-tags": "priv\tate"}) as refused:
        assert refused.status == 400
    async with two[0].post(token(issuer), causeway={"tags": ["a\x01b"]}) as refused:
        assert refused.status == 400
    assert not two[0].script.requests


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("x-causeway-priority", "bulk", "interactive"),
        ("x-causeway-critical", "true", "false"),
        ("x-causeway-deadline-ms", "1000", "2000"),
        ("x-causeway-policy", "a", "b"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_header_with_two_values_is_a_400_that_names_it(
    two: Two, issuer: Issuer, path: str, name: str, first: str, second: str
) -> None:
    headers = [("authorization", f"Bearer {token(issuer)}"), (name, first), (name, second)]
    async with two[0].session.post(two[0].url + path, json=ASK, headers=headers) as refused:
        assert refused.status == 400
        assert (await refused.json())["error"]["param"] == name
    assert not two[0].script.requests


async def test_a_configured_private_tag_has_no_case(whole_config: Config, clock: Clock, issuer: Issuer) -> None:
    cache = msgspec.structs.replace(whole_config.cache, private_tags=("Medical",))
    config = msgspec.structs.replace(whole_config, cache=cache)
    async with served(config, now_ms=clock) as one:
        one.script.permit(9)
        async with one.post(token(issuer), headers={"x-causeway-tags": "mediCAL"}) as marked:
            assert marked.headers["x-causeway-cache"] == "bypass"


async def test_stale_answer_is_marked_and_neither_billed_nor_stored(
    two: Two, issuer: Issuer, whole_config: Config
) -> None:
    one, other = two
    one.script.head = answer_head("assistant-large", "stale", degraded=True, stale_s=400.0)
    one.script.permit(9)
    async with one.post(token(issuer)) as old:
        body = await old.json()
    assert (old.headers["x-causeway-cache"], old.headers["age"]) == ("stale", "400")
    assert old.headers["x-causeway-degraded"] == "true"
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 20
    (record,) = await audited(whole_config, 1)
    assert (record["cache"], record["completion_tokens"]) == ("stale", 0)
    other.script.permit(9)
    async with other.post(token(issuer)) as fresh:
        assert fresh.headers["x-causeway-cache"] == "miss"


async def test_error_is_not_stored(two: Two, issuer: Issuer) -> None:
    one, _ = two
    one.script.error = CloudFailed("boom")
    one.script.permit(4)
    async with one.post(token(issuer)) as broken:
        assert (broken.status, (await broken.json())["error"]["code"]) == (502, "cloud_failed")
    one.script.error = None
    one.script.permit(9)
    async with one.post(token(issuer)) as made:
        assert (made.status, made.headers["x-causeway-cache"]) == (200, "miss")


async def test_without_a_cache_there_is_no_cache_header(issuer: Issuer, whole_config: Config) -> None:
    off = msgspec.structs.replace(whole_config, cache=CacheConfig())
    async with served(off) as gateway:
        gateway.script.permit(9)
        async with gateway.post(token(issuer)) as answer:
            assert "x-causeway-cache" not in answer.headers
        await until(lambda: gateway.metric("gen_ai_server_time_to_first_token_count", **MODEL) == 1)
    (record,) = await audited(off, 1)
    assert (record["cache"], record["completion_tokens"]) == ("", 3)


@contextmanager
def monitored(url: str) -> Iterator[list[str]]:
    """Record every command that reaches Redis."""
    commands: list[str] = []
    with redis.Redis.from_url(url) as client, client.monitor() as monitor:

        def listen() -> None:
            for command in monitor.listen():
                commands.append(command["command"])
                if "the end" in command["command"]:
                    return

        thread = threading.Thread(target=listen)
        thread.start()
        try:
            yield commands
        finally:
            with redis.Redis.from_url(url) as other:
                other.echo("the end")
            thread.join()


async def test_prompt_never_reaches_redis(two: Two, issuer: Issuer, redis_server: RedisServer) -> None:
    """Not while an answer is generated, followed, stored or found."""
    one, other = two
    with monitored(redis_server.url) as commands:
        one.script.permit(1)
        async with one.post(token(issuer), stream=True) as leading:
            await leading.content.readuntil(b"one ")
            async with other.post(token(issuer), stream=True) as following:
                await following.content.readuntil(b"one ")
                one.script.permit(9)
                await following.text()
            await leading.text()
        await until(lambda: bool(one.metric("causeway_gateway_cache_requests_total", outcome="miss")))
        async with other.post(token(issuer)) as hit:
            assert hit.headers["x-causeway-cache"] == "hit"
    text = "\n".join(commands)
    assert "three" in text, "the answer is kept, so it must be there"
    assert not re.search("secret|question", text)
    assert HEAD.model in text
