"""A gateway before a real vLLM, as a tier over OpenAI's HTTP API."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from causeway_server.cloud_pool.accounts.tenants.config import TenantsConfig, TierPrice
from causeway_server.cloud_pool.dispatch.config import LoadBalancingConfig
from causeway_server.cloud_pool.upstreams.config import UpstreamConfig
from tests.cloud_pool.upstreams.http_gateway import Gateway, http_tier, serving
from tests.openai_servers import OpenAIServer, post, running, vllm_server
from tests.own_task import in_own_task
from tests.waiting import until

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
PRICE = TierPrice(tier="large", input=0.31, cached_input=0.07, output=1.3)  # USD for a million tokens
PATIENT = LoadBalancingConfig(silent_before_probe_s=30.0, probe_timeout_s=60.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIServer]:
    with running(vllm_server(tmp_path_factory.mktemp("vllm"), "--enable-prompt-tokens-details")) as found:
        yield found


@pytest.fixture
async def gateway(server: OpenAIServer, tmp_path: Path) -> AsyncIterator[Gateway]:
    """It asks vLLM for logprobs and schemas at its start."""
    upstream = UpstreamConfig(kind="openai", urls=(server.url,), without=("tools",))
    tier = http_tier(upstream=upstream, model=server.model, can=("chat", "completion"), context_tokens=2048)
    tenants = TenantsConfig(prices=(PRICE,))
    async with in_own_task(serving(tmp_path, tier, load_balancing=PATIENT, tenants=tenants)) as gateway:
        yield gateway


async def running_at(gateway: Gateway, server: OpenAIServer) -> int:
    """Return vLLM's own count of running and waiting requests."""
    async with gateway.session.get(f"http://127.0.0.1:{server.port}/metrics") as response:
        text = await response.text()
    found = re.findall(r"^vllm:num_requests_(?:running|waiting)\{.*\} (\S+)$", text, re.MULTILINE)
    assert len(found) == 2, text
    return int(sum(map(float, found)))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("words", [0, 600], ids=["short", "cached"])
async def test_an_answer_and_its_cost_are_vllms_own(
    gateway: Gateway, server: OpenAIServer, words: int, stream: bool
) -> None:
    messages = [{"role": "user", "content": f"{'word ' * words}{QUESTION[0]['content']}"}]
    fields: dict[str, Any] = {"messages": messages, "temperature": 0, "max_tokens": 24}
    for _ in range(2):  # its prompt is in the cache then
        direct: dict[str, Any] = await asyncio.to_thread(post, server, "/chat/completions", fields)
    answer = await gateway.ask(**fields, stream=stream)
    assert (answer.status, answer.text) == (200, direct["choices"][0]["message"]["content"]), answer.body
    prompt, tokens = direct["usage"]["prompt_tokens"], direct["usage"]["completion_tokens"]
    cached = (direct["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    assert (cached > words // 2) is (words > 0), direct["usage"]
    await until(lambda: bool(gateway.audit))
    (record,) = gateway.audit
    assert [record[f"{kind}_tokens"] for kind in ("prompt", "cached", "completion")] == [prompt, cached, tokens]
    assert record["pico_usd"] == (prompt - cached) * 310_000 + cached * 70_000 + tokens * 1_300_000


async def test_logprobs_spell_the_answer(gateway: Gateway) -> None:
    answer = await gateway.ask(messages=QUESTION, temperature=0, max_tokens=8, logprobs=True, top_logprobs=2)
    content = answer.json["choices"][0]["logprobs"]["content"]
    assert "".join(token["token"] for token in content).startswith(answer.text)
    assert all(len(token["top_logprobs"]) >= 2 for token in content)


async def test_a_schema_is_kept(gateway: Gateway) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
    answer = await gateway.ask(messages=QUESTION, temperature=0, max_tokens=64, response_format=wanted)
    assert answer.status == 200, answer.body
    assert json.loads(answer.text)["n"] in (1, 2)


async def test_a_prompt_that_does_not_fit_is_the_clients_error(gateway: Gateway) -> None:
    answer = await gateway.ask(messages=[{"role": "user", "content": "word " * 4000}])
    assert (answer.status, answer.json["error"]["type"]) == (400, "invalid_request_error"), answer.body


async def test_a_client_that_leaves_ends_vllms_work(gateway: Gateway, server: OpenAIServer) -> None:
    body = {"model": "large", "prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    asking = asyncio.create_task(gateway.post("/completions", body))
    async with asyncio.timeout(60):
        while not await running_at(gateway, server):
            pass
        asking.cancel()
        while await running_at(gateway, server):
            pass
    scheduler = gateway.app.runtime.admissions["large"].scheduler
    await until(lambda: scheduler.running == 0)
