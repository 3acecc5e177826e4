"""What a gateway says of the requests that the end of its drain cuts, over each way in."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from grpc import StatusCode, aio

from causeway_server.cloud_pool.http.config import GrpcConfig
from tests.cloud_pool.dispatch.replica import Replica
from tests.cloud_pool.grpc_api.served import chat, connected, rest
from tests.e2e.sessions.gateway import FOREVER, orders, replica, running
from tests.waiting import until

from ..conftest import triton_environment

__all__ = ["replica", "triton_environment"]

pytestmark = [pytest.mark.triton, pytest.mark.slow]
SAID = {"say": "w0 "}


async def test_what_the_drain_cuts_is_recorded_as_cut_by_the_drain(
    replica: Replica, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A whole answer, a stream, a call over gRPC, and a session; none of their clients has left."""

    async def post(mark: str, *, stream: bool) -> tuple[int, str, str]:
        content = orders(mark, SAID, FOREVER)
        body = {"model": "large", "messages": [{"role": "user", "content": content}], "stream": stream}
        headers = {"x-request-id": mark}
        async with session.post(f"{gateway.app.url}/chat/completions", json=body, headers=headers) as answer:
            return answer.status, answer.headers["x-request-id"], await answer.text()

    async with running(replica, tmp_path, grpc=GrpcConfig(port=0)) as gateway, aiohttp.ClientSession() as session:
        assert gateway.app.grpc is not None
        async with connected(gateway.app.grpc.address) as client, gateway.peer() as peer:
            whole = asyncio.ensure_future(post("drain-whole", stream=False))
            stream = asyncio.ensure_future(post("drain-stream", stream=True))
            call = client.call(chat(orders("drain-call", SAID, FOREVER), model="large"))
            content = [{"type": "input_text", "text": orders("drain-live", SAID, FOREVER)}]
            await peer.send("conversation.item.create", item={"type": "message", "role": "user", "content": content})
            await peer.send("response.create")
            marks = ["drain-whole", "drain-stream", "drain-call", "drain-live"]
            await until(lambda: all(replica.noted(mark) for mark in marks))
            await gateway.app.stop()
            status, request_id, text = await whole
            assert (status, request_id, "draining" in text) == (503, "drain-whole", True)
            assert "draining" in (await stream)[2]
            with pytest.raises(aio.AioRpcError) as failed:
                await rest(call)
            assert failed.value.code() == StatusCode.UNAVAILABLE
            await until(lambda: len(gateway.audit) == 4)
    assert {(record["route"], record["outcome"]) for record in gateway.audit} == {
        ("chat", "draining"),
        ("generate", "draining"),
        ("realtime", "draining"),
    }
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_client_that_leaves_is_still_recorded_as_gone(replica: Replica, tmp_path: Path) -> None:
    body: dict[str, Any] = {"model": "large", "messages": [{"role": "user", "content": orders("left", SAID, FOREVER)}]}
    async with running(replica, tmp_path) as gateway, aiohttp.ClientSession() as session:
        leaving = asyncio.ensure_future(session.post(f"{gateway.app.url}/chat/completions", json=body))
        await until(lambda: replica.noted("left"))
        leaving.cancel()
        await until(lambda: [record["outcome"] for record in gateway.audit] == ["client_gone"])
