"""A stream has one end: a finish reason and [DONE], or an error event.

Here the deadline passes, the engine dies or the client leaves after the finish reason, before and after the usage.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from edge_node.backends.backend import BackendRequest
from router.errors import EngineCrashed
from router.types import Chunk, Usage

from .box import running
from .scripted import EDGE_WORDS, ScriptedEngine, until

TEXT = "".join(EDGE_WORDS)
LATER_S = 31.0  # past every request's deadline


class EndlessEngine(ScriptedEngine):
    """After its finish reason, and its usage if `counts`, it raises `error`, or the deadline passes."""

    def __init__(self, *, counts: bool = True, error: Exception | None = None) -> None:
        super().__init__()
        self.counts = counts
        self.error = error
        self.now: float | None = None  # the loop's time, once it has passed the deadline

    async def _answer(self, call: BackendRequest) -> AsyncIterator[Chunk]:
        yield Chunk(text=TEXT, tokens=3)
        yield Chunk(finish_reason="stop")
        if self.counts:
            yield Chunk(usage=Usage(prompt_tokens=5, completion_tokens=3))
        if self.error is not None:
            raise self.error
        self.now = time.monotonic() + LATER_S
        await asyncio.sleep(3600)


@pytest.mark.parametrize("error", [None, EngineCrashed("killed", phase="stream")], ids=["deadline", "crash"])
@pytest.mark.parametrize("temperature", [0, 1], ids=["shared", "alone"])
@pytest.mark.parametrize("counts", [False, True], ids=["before_usage", "before_done"])
async def test_a_fault_after_the_finish_reason_is_no_second_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, temperature: int, counts: bool
) -> None:
    engine = EndlessEngine(counts=counts, error=error)
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: engine.now or time.monotonic())
    async with running(tmp_path, engine=engine) as box:
        usage = {"include_usage": True}
        answer = await box.ask(stream=True, stream_options=usage, temperature=temperature)
        engine.now = None
        assert answer.done
        assert answer.text == TEXT
        assert answer.finish_reasons == ["stop"]
        assert not [event for event in answer.events if "error" in event]
        record = await box.record(answer)
        await until(lambda: box.engine.running == 0)
        box.assert_nothing_leaks()
    assert (record.outcome.status, record.outcome.finish_reason, record.outcome.error) == ("ok", "stop", "")


async def test_a_client_that_leaves_at_the_finish_reason_has_its_answer(tmp_path: Path) -> None:
    body = {"model": "auto", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    async with running(tmp_path, engine=EndlessEngine()) as box:
        async with box.session.post("/v1/chat/completions", json=body, headers={"Connection": "close"}) as response:
            async for line in response.content:
                if b'"finish_reason":"stop"' in line:
                    break
            response.close()
        await until(lambda: box.parts.decisions.memory_count)
        await until(lambda: box.engine.running == 0)
        assert box.newest().outcome.status == "ok"
        box.assert_nothing_leaks()
