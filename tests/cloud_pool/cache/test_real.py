"""Two real gateways with a real Triton behind them and a real Redis between them."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NewType

import aiohttp
import pytest

from tests.cloud_pool.conftest import Command, Pool
from tests.cloud_pool.conftest import triton_environment as triton_environment  # a fixture
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.redis, pytest.mark.triton, pytest.mark.engine, pytest.mark.slow]
TTL_S = 2.0
CONFIG = """
server: {{port: 0}}
redis: {url}
cache: {{enabled: true, key_prefix: {prefix}, ttl_s: {ttl}, redis_timeout_s: 0.5}}
"""
Two = tuple[str, str]
Operators = NewType("Operators", tuple[str, ...])


def ask(text: str, **changes: object) -> dict[str, Any]:
    return {"model": "assistant-large", "messages": [{"role": "user", "content": text}], "max_tokens": 32, **changes}


@pytest.fixture(scope="module")
def triton(triton_environment: Path) -> Iterator[Pool]:
    """A Triton of this module's own, which is killed in the end."""
    ports = ("--grpc-port", "0", "--metrics-port", "0")
    flags = (*ports, "--threads", "1", "--drain-s", "1", "--no-restart")
    command = Command("triton", *flags, CAUSEWAY_TRITON_ENV=str(triton_environment))
    try:
        yield Pool(command)
    finally:
        command.stop_triton()


@pytest.fixture(scope="module")
def ready(
    triton: Pool, redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[dict[str, str]]]:
    """The ready lines of two gateways."""
    path = tmp_path_factory.mktemp("gateways") / "gateway.yaml"
    path.write_text(CONFIG.format(url=redis_server.url, prefix=f"r{time.monotonic_ns()}", ttl=TTL_S))
    commands = [Command("serve", "--config", str(path), "--triton", triton.grpc) for _ in range(2)]
    try:
        yield [command.ready() for command in commands]
        assert [command.stop() for command in commands] == [0, 0]
    finally:
        for command in commands:
            command.process.kill()


@pytest.fixture(scope="module")
def two(ready: list[dict[str, str]]) -> Two:
    """Two gateways' URLs, without a path."""
    one, other = (fields["url"].removesuffix("/v1") for fields in ready)
    return one, other


@pytest.fixture(scope="module")
def operators(ready: list[dict[str, str]]) -> Operators:
    """The URLs of their operators."""
    return Operators(tuple(fields["operator"] for fields in ready))


async def generated(session: aiohttp.ClientSession, urls: Operators) -> float:
    """Tokens that Triton generated for both."""
    total = 0.0
    for url in urls:
        async with session.get(f"{url}/metrics") as answer:
            found = re.search(r'causeway_gateway_tokens_total{.*type="output"} (\S+)', await answer.text())
            total += float(found[1]) if found else 0.0
    return total


async def test_ten_requests_at_two_gateways_are_generated_once(two: Two, operators: Operators) -> None:
    async with aiohttp.ClientSession() as session:

        async def one_of(at: int) -> tuple[str, str, int]:
            async with session.post(f"{two[at % 2]}/v1/chat/completions", json=ask("wake me up at six am")) as answer:
                body = await answer.json()
                usage = body["usage"]["completion_tokens"]
                return answer.headers["x-causeway-cache"], body["choices"][0]["message"]["content"], usage

        found = await asyncio.gather(*(one_of(at) for at in range(10)))
        assert [status for status, _, _ in found].count("miss") == 1
        assert len({text for _, text, _ in found}) == 1
        assert await generated(session, operators) == found[0][2]


async def test_hit_on_the_other_gateway_is_the_same_text(two: Two) -> None:
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{two[0]}/v1/chat/completions", json=ask("lights off", stream=True)) as streamed:
            text = await streamed.text()
        async with session.post(f"{two[1]}/v1/chat/completions", json=ask("lights off")) as whole:
            body = await whole.json()
        assert whole.headers["x-causeway-cache"] in ("hit", "coalesced")
        text = "".join(
            chunk["choices"][0]["delta"].get("content") or ""
            for chunk in map(json.loads, re.findall(r"data: ({.*})", text))
        )
        assert text == body["choices"][0]["message"]["content"]


async def test_stale_answer_while_triton_is_dead(two: Two, triton: Pool) -> None:
    """It is marked; another question is refused, and so is a critical request."""
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{two[0]}/v1/chat/completions", json=ask("play some jazz")) as fresh:
            text = (await fresh.json())["choices"][0]["message"]["content"]
        made_at = time.monotonic()
        triton.server.kill()
        await asyncio.sleep(max(0.0, made_at + TTL_S + 0.3 - time.monotonic()))
        async with session.post(f"{two[1]}/v1/chat/completions", json=ask("play some jazz")) as old:
            assert old.status == 200, await old.text()
            assert (await old.json())["choices"][0]["message"]["content"] == text
        assert (old.headers["x-causeway-cache"], old.headers["x-causeway-degraded"]) == ("stale", "true")
        assert int(old.headers["age"]) >= TTL_S
        critical = {"x-causeway-critical": "true"}
        for body, headers in ((ask("another question"), {}), (ask("play some jazz"), critical)):
            async with session.post(f"{two[1]}/v1/chat/completions", json=body, headers=headers) as refused:
                assert refused.status >= 500
