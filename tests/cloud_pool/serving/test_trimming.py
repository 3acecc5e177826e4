"""A tier with `context_overflow: trim_middle`, before a server whose context is small: a device of ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from causeway_server.cloud_pool.accounts.identity.config import IdentityConfig
from causeway_server.cloud_pool.background import run_worker
from causeway_server.cloud_pool.grpc_api.messages import InputChunk
from causeway_server.cloud_pool.http.config import GrpcConfig
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.models.chat.overflow import NOTE
from tests.cloud_pool.grpc_api.served import connected, rest
from tests.cloud_pool.upstreams.http_gateway import Gateway, http_tier, serving
from tests.e2e.sessions.peer import Peer, done, text_of
from tests.edge_node.device import Answer, Device, running
from tests.edge_node.scripted import EDGE_WORDS
from tests.edge_node.serving.test_overflow import BODY, SmallContext, ask_at_length
from tests.own_task import in_own_task
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]


@asynccontextmanager
async def gateway_before(
    folder: Path, *, sections: Mapping[str, Any] = {}, **fields: Any
) -> AsyncIterator[tuple[Gateway, Device]]:
    """Yield the gateway, and the device behind it."""
    async with AsyncExitStack() as stack:
        device = await stack.enter_async_context(running(folder, engine=SmallContext()))
        tier = http_tier(f"http://127.0.0.1:{device.app.port}/v1", model="small", **fields)
        served = await stack.enter_async_context(in_own_task(serving(folder, tier, **sections)))
        yield served, device


@asynccontextmanager
async def gateway(folder: Path, **fields: Any) -> AsyncIterator[tuple[str, Device]]:
    """Yield the gateway's address, and the device behind it."""
    async with gateway_before(folder, **fields) as (served, device):
        yield served.app.url.removesuffix("/v1"), device


async def post(url: str, path: str, body: dict[str, Any], tags: str = "") -> Answer:
    headers = {"x-causeway-tags": tags} if tags else {}
    body = {"model": "large", **body}
    async with aiohttp.ClientSession(headers=headers) as http, http.post(url + path, json=body) as reply:
        return Answer(reply.status, dict(reply.headers), await reply.read())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_chat_is_answered_without_its_oldest_turns(tmp_path: Path, stream: bool) -> None:
    async with gateway(tmp_path, context_overflow="trim_middle") as (url, device):
        answer = await post(url, "/v1/chat/completions", {**BODY, "stream": stream})
        assert (answer.status, answer.text) == (200, "".join(EDGE_WORDS))
        asked = device.engine.calls[-1].request.messages
        assert int(answer.headers["x-causeway-trimmed"]) == len(BODY["messages"]) - len(asked)
        assert (asked[0].content, asked[-1].content) == (f"rule\n\n{NOTE}", "last")


async def test_messages_and_responses_are_trimmed_too(tmp_path: Path) -> None:
    system, *messages = BODY["messages"]
    async with gateway(tmp_path, context_overflow="trim_middle") as (url, _):
        message = {"max_tokens": 9, "system": system["content"], "messages": messages}
        response = {"instructions": system["content"], "input": messages}
        for path, body in (("/v1/messages", message), ("/v1/responses", response)):
            answer = await post(url, path, body)
            assert (answer.status, int(answer.headers["x-causeway-trimmed"]) > 0) == (200, True)


@pytest.mark.parametrize(
    "body", [BODY, {"messages": [{"role": "user", "content": "word " * 80}]}], ids=["chat", "long"]
)
async def test_what_is_not_trimmed_is_a_400(tmp_path: Path, body: dict[str, Any]) -> None:
    """By default, and where the last message alone is too long."""
    overflow = "refuse" if body is BODY else "trim_middle"
    async with gateway(tmp_path, context_overflow=overflow) as (url, _):
        answer = await post(url, "/v1/chat/completions", body)
        assert (answer.status, answer.code) == (400, "context_length_exceeded")


async def test_tokens_come_from_the_server_of_the_tier(tmp_path: Path) -> None:
    async with gateway(tmp_path) as (url, _):
        answer = await post(url, "/v1/tokenize", {"messages": [{"role": "user", "content": "one three"}]})
        assert answer.json == {"count": 2, "max_model_len": 60, "tokens": [3, 5]}
        answer = await post(url, "/v1/tokenize", {"prompt": "one", "add_special_tokens": False})
        assert answer.json["tokens"] == [3]
        assert (await post(url, "/v1/detokenize", {"tokens": [2]})).json == {"prompt": "ww"}
        wrong = await post(url, "/v1/tokenize", {"prompt": "one", "chat_template": "x"})
        assert (wrong.status, wrong.json["error"]["param"]) == (400, "chat_template")


@pytest.mark.parametrize("path", ["/v1/tokenize", "/v1/messages/count_tokens"])
async def test_nothing_bound_to_regions_is_counted_outside_them(tmp_path: Path, path: str) -> None:
    """Neither the gateway nor the tier's server is in a region."""
    chat = {"messages": [{"role": "user", "content": "one three"}]}
    async with gateway(tmp_path) as (url, _):
        assert (await post(url, path, chat)).status == 200
        bound = await post(url, path, chat, tags="in-region:eu-central")
        assert bound.status == 503
        assert b"outside_region" in bound.body


async def test_a_tier_outside_the_regions_counts_nothing(tmp_path: Path) -> None:
    """The gateway itself may have the request."""
    chat = {"messages": [{"role": "user", "content": "one three"}]}
    here = IdentityConfig(region="eu-central")
    async with gateway(tmp_path, sections={"identity": here}, region="us-east") as (url, _):
        bound = await post(url, "/v1/tokenize", chat, tags="in-region:eu-central")
        assert (bound.status, bound.code) == (503, "outside_region")
        assert "the tier large" in bound.message
    async with gateway(tmp_path, sections={"identity": here}, region="eu-central") as (url, _):
        assert (await post(url, "/v1/tokenize", chat, tags="in-region:eu-central")).status == 200


def trimmed(device: Device) -> int:
    """The number of messages that the device was not given."""
    asked = device.engine.calls[-1].request.messages
    assert (asked[0].content, asked[-1].content) == (f"rule\n\n{NOTE}", "last")
    return len(BODY["messages"]) - len(asked)


async def test_a_live_session_is_trimmed(tmp_path: Path) -> None:
    async with gateway(tmp_path, context_overflow="trim_middle") as (url, device):
        peer = await Peer.connect(int(url.rpartition(":")[2]), "model=large")
        events = await ask_at_length(peer)
        assert (text_of(events), done(events)["status"]) == ("".join(EDGE_WORDS), "completed")
        assert trimmed(device) > 0
        peer.cut()


async def test_a_call_is_trimmed(tmp_path: Path) -> None:
    """The head of its answer says how much was left out."""
    sections = {"grpc": GrpcConfig(port=0)}
    async with gateway_before(tmp_path, context_overflow="trim_middle", sections=sections) as (served, device):
        assert served.app.grpc is not None
        async with connected(served.app.grpc.address) as client:
            call = client.call(InputChunk(request={"model": "large", **BODY}))
            assert "".join(output.delta.text for output in await rest(call)) == "".join(EDGE_WORDS)
            metadata = dict(await call.initial_metadata())
        assert int(metadata["x-causeway-trimmed"]) == trimmed(device) > 0


@pytest.mark.redis
@pytest.mark.slow
async def test_a_job_is_trimmed(tmp_path: Path, redis_server: RedisServer) -> None:
    jobs = JobsConfig(redis=redis_server.url, durability="warn", key_prefix="{trimming}", drain_s=0.0)
    async with gateway_before(tmp_path, context_overflow="trim_middle", sections={"jobs": jobs}) as (served, device):
        stop = asyncio.Event()
        worker = asyncio.ensure_future(run_worker(served.app.config, stop))
        body = {"model": "large", **BODY}
        answer = await served.post("/chat/completions", body, {"Prefer": "respond-async, wait=60"})
        assert (answer.status, answer.text) == (200, "".join(EDGE_WORDS))
        assert trimmed(device) > 0
        stop.set()
        await worker
