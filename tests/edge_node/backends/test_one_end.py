"""A stream has one end: a finish reason and [DONE], or an error event.

Here the deadline passes, the engine dies or the client leaves after the finish reason, before and after the usage.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from causeway_server.edge_node.backends.backend import BackendRequest
from causeway_server.router.errors import EngineCrashed
from causeway_server.router.types import Chunk, Usage
from tests.jumping_loop import JumpingLoop, run_jumping
from tests.waiting import until

from ..device import running
from ..scripted import EDGE_WORDS, ScriptedEngine

TEXT = "".join(EDGE_WORDS)


class EndlessEngine(ScriptedEngine):
    """After its finish reason, and its usage if `counts`, it raises `error`, or calls `later` and hangs."""

    def __init__(
        self, *, counts: bool = True, error: Exception | None = None, later: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self.counts = counts
        self.error = error
        self.later = later

    async def _answer(self, call: BackendRequest) -> AsyncIterator[Chunk]:
        yield Chunk(text=TEXT, tokens=3)
        yield Chunk(finish_reason="stop")
        if self.counts:
            yield Chunk(usage=Usage(prompt_tokens=5, completion_tokens=3))
        if self.error is not None:
            raise self.error
        self.later()
        await asyncio.sleep(3600)


@pytest.mark.parametrize("error", [None, EngineCrashed("killed", phase="stream")], ids=["deadline", "crash"])
@pytest.mark.parametrize("temperature", [0, 1], ids=["shared", "alone"])
@pytest.mark.parametrize("counts", [False, True], ids=["before_usage", "before_done"])
def test_a_fault_after_the_finish_reason_is_no_second_end(
    tmp_path: Path, error: Exception | None, temperature: int, counts: bool
) -> None:
    async def test(loop: JumpingLoop) -> None:
        engine = EndlessEngine(counts=counts, error=error, later=loop.jump)
        await assert_one_end(tmp_path, engine, temperature)

    run_jumping(test)


async def assert_one_end(folder: Path, engine: EndlessEngine, temperature: int) -> None:
    async with running(folder, engine=engine) as device:
        usage = {"include_usage": True}
        answer = await device.ask(stream=True, stream_options=usage, temperature=temperature)
        assert answer.done
        assert answer.text == TEXT
        assert answer.finish_reasons == ["stop"]
        assert not [event for event in answer.events if "error" in event]
        record = await device.record(answer)
        await until(lambda: device.engine.running == 0)
        device.assert_nothing_leaks()
    assert (record.outcome.status, record.outcome.finish_reason, record.outcome.error) == ("ok", "stop", "")


class HalfEngine(ScriptedEngine):
    """Of two choices the first finishes, then the engine dies."""

    async def _answer(self, call: BackendRequest) -> AsyncIterator[Chunk]:
        for index in (0, 1):
            yield Chunk(text=TEXT, index=index, tokens=3)
        yield Chunk(finish_reason="stop")
        raise EngineCrashed("killed", phase="stream")


async def test_one_finished_choice_of_two_is_no_end_of_the_stream(tmp_path: Path) -> None:
    """A finish reason ends its choice; an error event ends the stream, and the answer counts as failed."""
    async with running(tmp_path, engine=HalfEngine()) as device:
        answer = await device.ask(stream=True, n=2, temperature=1)
        assert answer.finish_reasons == ["stop"]
        assert "error" in answer.events[-1]
        assert not answer.done
        assert (await device.record(answer)).outcome.status == "error"
        device.assert_nothing_leaks()


async def test_a_client_that_leaves_at_the_finish_reason_has_its_answer(tmp_path: Path) -> None:
    body = {"model": "auto", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with running(tmp_path, engine=EndlessEngine()) as device:
        async with device.session.post("/v1/chat/completions", json=body, headers={"Connection": "close"}) as response:
            async for line in response.content:
                if b'"finish_reason":"stop"' in line:
                    break
            response.close()
        await until(lambda: len(device.parts.decisions.memory))
        await until(lambda: device.engine.running == 0)
        assert device.newest().outcome.status == "ok"
        device.assert_nothing_leaks()
