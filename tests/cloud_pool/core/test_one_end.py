"""A stream has one end: a finish reason and [DONE], or an error event. Faults that come after the last finish reason.

The deadline can pass, the call can break and the client can leave at each step between them: while Triton's last
response or the end of its call is awaited, before the usage, and before [DONE].
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import grpc
import pytest

from causeway_server.cloud_pool.admission import AdmissionController
from causeway_server.cloud_pool.cache.caching_service import CachingService
from causeway_server.cloud_pool.config import Config
from causeway_server.cloud_pool.core.request_context import Piece, RequestContext, answer_head
from causeway_server.cloud_pool.http.config import ServerConfig
from causeway_server.router.errors import CloudFailed, DeadlineExceeded
from causeway_server.router.types import Chunk, Request, Usage
from tests.cloud_pool.accounts.identity.gateway import ASK, Gateway, running
from tests.cloud_pool.upstreams.test_triton_client import (
    CHAT,
    PATIENCE_S,
    Reply,
    Script,
    answer,
    answering,
    bed,
    infer_request,
    piece,
)

FINISH = Chunk(text="answer", tokens=9, finish_reason="stop")
USAGE = Chunk(usage=Usage(prompt_tokens=20, completion_tokens=10))
COMMENT = b": \n\n"
FAULTS = [DeadlineExceeded("late"), CloudFailed("gone", phase="stream"), RuntimeError("a bug")]


class Ending:
    """A service whose answers end with `last`: chunks, an error to raise, or None to wait for ever."""

    def __init__(self, *last: Chunk | Exception | None) -> None:
        self.last = last

    async def __call__(self, context: RequestContext) -> AsyncGenerator[Piece, None]:
        yield answer_head(context.tier.name, "asked")
        yield Chunk(text="an ", tokens=1)
        for one in self.last:
            if one is None:
                await anyio.sleep_forever()
            elif isinstance(one, Exception):
                raise one
            else:
                yield one


async def streamed(gateway: Gateway, *, leave: bool = False, n: int = 1) -> list[Any]:
    """Return the stream's events; `leave`: only until the finish reason."""
    events: list[Any] = []
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{gateway.url}/v1/chat/completions",
            json={**ASK, "stream": True, "stream_options": {"include_usage": True}, "n": n},
        ) as reply,
    ):
        async for line in reply.content:
            if line.startswith(b"data: "):
                data = line[6:].strip()
                events.append("[DONE]" if data == b"[DONE]" else json.loads(data))
                if leave and b'"finish_reason":"stop"' in data:
                    break
    return events


async def audited(path: Path) -> dict[str, Any]:
    """Return the one record, once the request has ended."""
    with anyio.fail_after(PATIENCE_S):
        while not path.exists() or not path.read_text().endswith("\n"):  # noqa: ASYNC110, ASYNC240
            await asyncio.sleep(0.01)
    (line,) = path.read_text().splitlines()  # noqa: ASYNC240
    return dict(json.loads(line))


@pytest.mark.parametrize("fault", FAULTS, ids=["deadline", "upstream", "bug"])
@pytest.mark.parametrize("usage", [False, True], ids=["before_usage", "before_done"])
async def test_a_fault_after_the_finish_reason_is_no_second_end(tmp_path: Path, fault: Exception, usage: bool) -> None:
    service = Ending(FINISH, *([USAGE] if usage else []), fault)
    config = Config(audit_file=str(tmp_path / "audit"))
    async with running(config, caching_service=CachingService(None, service)) as gateway:
        events = await streamed(gateway)
        record = await audited(tmp_path / "audit")
    assert not [event for event in events if "error" in event]
    assert events[-1] == "[DONE]"
    assert events[-2]["usage"]["completion_tokens"] == 10
    assert (record["outcome"], record["completion_tokens"]) == ("ok", 10)


async def test_a_fault_before_the_finish_reason_is_the_only_end(tmp_path: Path) -> None:
    config = Config(audit_file=str(tmp_path / "audit"))
    async with running(config, caching_service=CachingService(None, Ending(FAULTS[0]))) as gateway:
        events = await streamed(gateway)
        record = await audited(tmp_path / "audit")
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    assert "[DONE]" not in events
    assert record["outcome"] == "deadline_exceeded"


async def test_one_finished_choice_of_two_is_no_end_of_the_stream(tmp_path: Path) -> None:
    """A finish reason ends its choice; an error event ends the stream, and the answer counts as failed."""
    config = Config(audit_file=str(tmp_path / "audit"))
    async with running(config, caching_service=CachingService(None, Ending(FINISH, FAULTS[1]))) as gateway:
        events = await streamed(gateway, n=2)
        record = await audited(tmp_path / "audit")
    assert [choice["finish_reason"] for event in events[:-1] for choice in event["choices"]][-1] == "stop"
    assert events[-1]["error"]["code"] == FAULTS[1].code  # type: ignore[attr-defined]
    assert record["outcome"] != "ok"


async def test_a_client_that_leaves_at_the_finish_reason_has_its_answer(tmp_path: Path) -> None:
    config = Config(audit_file=str(tmp_path / "audit"))
    async with running(config, caching_service=CachingService(None, Ending(FINISH, USAGE, None))) as gateway:
        await streamed(gateway, leave=True)
        record = await audited(tmp_path / "audit")
    assert (record["outcome"], record["prompt_tokens"], record["completion_tokens"]) == ("ok", 20, 10)


async def test_a_silent_stream_gets_comments_where_the_owner_wants_them() -> None:
    """Before anything is known of the answer, and within it. A fault then is an event of the stream."""
    gate = asyncio.Event()
    fault: list[Exception] = []

    async def late(context: RequestContext) -> AsyncGenerator[Piece, None]:
        await gate.wait()
        if fault:
            raise fault[0]
        yield answer_head(context.tier.name, "asked")
        yield Chunk(text="an ", tokens=1)
        gate.clear()
        await gate.wait()
        yield FINISH

    config = Config(server=ServerConfig(heartbeat_s=0.02))
    async with running(config, caching_service=CachingService(None, late)) as gateway, aiohttp.ClientSession() as http:
        url = f"{gateway.url}/v1/chat/completions"
        async with http.post(url, json={**ASK, "stream": True}, headers={"x-request-id": "mine"}) as response:
            assert (response.status, response.headers["x-request-id"]) == (200, "mine")
            assert await response.content.readexactly(8) == COMMENT * 2
            gate.set()
            assert b'"content":"an "' in await response.content.readuntil(COMMENT * 2)
            gate.set()
            assert (await response.content.read()).endswith(b"data: [DONE]\n\n")
        gate.clear()
        fault.append(FAULTS[0])
        async with http.post(url, json={**ASK, "stream": True}) as response:
            assert await response.content.readexactly(4) == COMMENT
            gate.set()
            rest = await response.content.read()
        assert b"deadline_exceeded" in rest
        assert b"[DONE]" not in rest


# --- Triton's own end ------------------------------------------------------------------------------------------------


async def hangs_after_its_last_response(request: object, context: object) -> AsyncIterator[Reply]:
    yield piece("a")
    yield piece("b", "stop", final=True)
    await asyncio.Event().wait()


async def test_the_last_response_is_the_answers_end() -> None:
    """Whatever becomes of the call: its deadline is at hand, and it never ends by itself."""
    texts = []
    async with bed(hangs_after_its_last_response) as (_, triton), aclosing(triton.generate(infer_request())) as deltas:
        async for delta in deltas:
            texts.append(delta.text)
            if delta.final:
                triton.fail_calls("m", DeadlineExceeded("late"))
    assert texts == ["a", "b"]


async def drops_after_the_finish_reason(request: object, context: grpc.aio.ServicerContext) -> AsyncIterator[Reply]:
    yield piece("a")
    yield piece("b", "stop")
    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")


async def fails_after_the_finish_reason(request: object, context: object) -> AsyncIterator[Reply]:
    yield piece("a")
    yield piece("b", "stop")
    yield Reply(error_message="no")


async def ends_after_the_finish_reason(request: object, context: object) -> AsyncIterator[Reply]:
    yield piece("a")
    yield piece("b", "stop")


async def hangs_after_the_finish_reason(request: object, context: object) -> AsyncIterator[Reply]:
    yield piece("a")
    yield piece("b", "stop")
    await asyncio.Event().wait()


async def test_the_deadline_passes_while_a_stock_backends_last_response_is_awaited() -> None:
    async with (
        bed(hangs_after_the_finish_reason) as (_, triton),
        answering(triton, CHAT, AdmissionController(1, 0)) as chunks,
    ):
        found = []
        async for chunk in chunks:
            found.append(chunk)
            if chunk.finish_reason is not None:
                triton.fail_calls("vllm_model", DeadlineExceeded("late"))
    assert found[-1].usage == Usage(5, 2)


@pytest.mark.parametrize(
    "script", [drops_after_the_finish_reason, fails_after_the_finish_reason, ends_after_the_finish_reason]
)
@pytest.mark.parametrize("n", [1, 2])
async def test_a_stock_backend_may_fail_after_the_finish_reason(script: Script, n: int) -> None:
    """Its last response is one of its own, and empty. The prompt is billed all the same."""
    admission = AdmissionController(2, 0)
    async with bed(script) as (_, triton):
        chunks = await answer(triton, Request(kind="chat", model="stock", messages=CHAT.messages, n=n), admission)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["stop"] * n
    assert chunks[-1].usage == Usage(5, 2 * n)
    assert admission.scheduler.running == 0
