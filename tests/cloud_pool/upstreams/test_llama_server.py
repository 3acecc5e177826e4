"""A gateway before a real `llama_cpp.server`, as a tier over OpenAI's HTTP API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from causeway_server.cloud_pool.dispatch.config import RetryBudgetConfig
from causeway_server.cloud_pool.upstreams.config import UpstreamConfig
from tests.edge_node.scripted import ScriptedCloud
from tests.openai_servers import OpenAIServer, llama_server, post, running
from tests.own_task import in_own_task
from tests.waiting import until

from .http_gateway import Gateway, http_tier, serving

pytestmark = [pytest.mark.engine, pytest.mark.slow]
QUESTION = [{"role": "user", "content": "wake me up at six am"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAIServer]:
    with running(llama_server(tmp_path_factory.mktemp("llama"), "--logits_all=True")) as found:
        yield found


@pytest.fixture
async def gateway(server: OpenAIServer, tmp_path: Path) -> AsyncIterator[Gateway]:
    """At its start the gateway asks the server for every feature but tools. Its permits are the server's slots."""
    upstream = UpstreamConfig(kind="openai", urls=(server.url,), without=("tools",))
    tier = http_tier(upstream=upstream, model=server.model, can=("chat", "completion"), concurrency=1)
    async with in_own_task(serving(tmp_path, tier)) as gateway:
        yield gateway


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_an_answer_is_the_servers_own(gateway: Gateway, server: OpenAIServer, stream: bool) -> None:
    """The server reports no usage in streams: the gateway counts events and estimates the prompt."""
    direct = await asyncio.to_thread(
        post, server, "/chat/completions", {"messages": QUESTION, "temperature": 0, "max_tokens": 24}
    )
    expected = direct["choices"][0]["message"]["content"]  # type: ignore[index]
    answer = await gateway.ask(messages=QUESTION, temperature=0, max_tokens=24, stream=stream)
    assert (answer.status, answer.text) == (200, expected), answer.body
    await until(lambda: bool(gateway.audit))
    (record,) = gateway.audit
    assert record["completion_tokens"] == direct["usage"]["completion_tokens"]  # type: ignore[index]
    assert record["estimated"] is True


async def test_completions_are_the_servers_own(gateway: Gateway, server: OpenAIServer) -> None:
    asked = {"prompt": "turn on the", "temperature": 0, "max_tokens": 5}
    direct = await asyncio.to_thread(post, server, "/completions", asked)
    answer = await gateway.post("/completions", {"model": "large", **asked})
    assert answer.json["choices"][0]["text"] == direct["choices"][0]["text"]  # type: ignore[index]
    assert answer.json["choices"][0]["finish_reason"] == "length"


async def test_logprobs_spell_the_answer(gateway: Gateway) -> None:
    answer = await gateway.ask(messages=QUESTION, temperature=0, max_tokens=24, logprobs=True, top_logprobs=2)
    content = answer.json["choices"][0]["logprobs"]["content"]
    assert "".join(token["token"] for token in content) == answer.text
    assert all(len(token["top_logprobs"]) == 2 for token in content)


async def test_an_answer_in_json_is_json(gateway: Gateway) -> None:
    wanted = {"type": "json_object"}
    answer = await gateway.ask(messages=QUESTION, temperature=0, max_tokens=24, response_format=wanted)
    assert answer.status == 200, answer.body
    assert isinstance(json.loads(answer.text), dict)


async def test_a_schema_is_an_error_of_the_server(gateway: Gateway) -> None:
    """llama_cpp.server answers 500 to `json_schema`; an operator names `schemas` in `without`."""
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    answer = await gateway.ask(messages=QUESTION, max_tokens=24, response_format=wanted)
    assert (answer.status, answer.code) == (502, "cloud_failed"), answer.body


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_prompt_that_does_not_fit_is_an_error(gateway: Gateway, stream: bool) -> None:
    """The server ends its stream without a word, so the gateway cannot say why."""
    answer = await gateway.ask(messages=[{"role": "user", "content": "word " * 4000}], stream=stream)
    assert (answer.status, answer.code) == (502, "stream_broken"), answer.body


async def test_a_client_that_leaves_frees_the_server(gateway: Gateway) -> None:
    """It serves one request at a time: the next one is answered only if the work of the first has ended."""
    long = {"prompt": "turn on the", "temperature": 0, "max_tokens": 2000}
    asking = asyncio.create_task(gateway.post("/completions", {"model": "large", **long, "stream": True}))
    running_now = gateway.app.runtime.admissions["large"].scheduler
    await until(lambda: running_now.running == 1)
    asking.cancel()
    answer = await gateway.ask(messages=QUESTION, temperature=0, max_tokens=4)
    assert answer.status == 200, answer.body
    await until(lambda: running_now.running == 0)


async def test_a_server_that_is_killed_is_replaced_by_the_next(tmp_path: Path) -> None:
    """Requests that wait there for their first token are answered by the other server of the tier."""
    other = await ScriptedCloud().start()
    server = llama_server(tmp_path)
    server.start()
    await asyncio.to_thread(server.wait_until_ready)
    tier = http_tier(server.url, other.url, model=server.model, retry_budget=RetryBudgetConfig(share=1.0))
    async with serving(tmp_path, tier) as gateway:
        asked = [asyncio.create_task(gateway.ask(messages=QUESTION, temperature=0, max_tokens=8)) for _ in range(20)]
        await until(lambda: bool(other.bodies))
        await asyncio.to_thread(server.kill)
        answers = await asyncio.gather(*asked)
    await other.stop()
    failed = [answer for answer in answers if answer.status != 200]
    assert {answer.code for answer in failed} <= {"stream_broken"}
    assert len(failed) <= 1, "The server makes one answer at a time: no other one had begun."
