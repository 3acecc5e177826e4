"""The detectors in a server: a failure, a late answer and what cannot be read count as hits, unless settings differ."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from causeway_server.router.errors import GuardFailed
from causeway_server.router.guard.classes import Found
from causeway_server.router.guard.facts import NOTHING, UNKNOWN, GuardFacts, GuardSettings
from causeway_server.router.serving.guard.runner import GuardRunner
from causeway_server.router.types import ImagePart, Message, Request, TextPart

PLAIN = Request(kind="chat", model="m", messages=(Message("user", "Anna is here"),))
SEEN = Request(
    kind="chat", model="m", messages=(Message("user", (TextPart("hi"), ImagePart("data:image/png;base64,"))),)
)
LARGE = Request(kind="chat", model="m", messages=(Message("user", "a@example.org " * 5000),))
CLEAN = GuardSettings(on_failure="clean")


class Names:
    """A model that knows one name, or breaks."""

    def __init__(self, fault: Exception | None = None) -> None:
        self.fault = fault

    def find(self, text: str) -> Sequence[Found]:
        if self.fault is not None:
            raise self.fault
        at = text.find("Anna")
        return [Found(at, at + 4, "name")] if at >= 0 else []


async def test_a_model_adds_names() -> None:
    runner = GuardRunner(Names())
    assert await runner.facts(PLAIN, GuardSettings()) == GuardFacts(("name",), 1, 0)
    masked = await runner.masked(PLAIN, ("name",), GuardSettings())
    assert masked.request.messages[0].content == "<NAME_1> is here"
    assert await GuardRunner().facts(PLAIN, GuardSettings()) == NOTHING


@pytest.mark.parametrize("fault", [RuntimeError("broken"), TimeoutError()])
async def test_a_detector_that_fails_counts_as_a_hit(fault: Exception) -> None:
    runner = GuardRunner(Names(fault))
    assert await runner.facts(PLAIN, GuardSettings()) == UNKNOWN
    assert await runner.facts(PLAIN, CLEAN) == NOTHING
    with pytest.raises(GuardFailed):
        await runner.masked(PLAIN, ("name",), GuardSettings())
    assert (await runner.masked(PLAIN, ("name",), CLEAN)).request is PLAIN


async def test_a_detector_without_time_counts_as_a_hit() -> None:
    times = iter(range(100))
    runner = GuardRunner(clock=lambda: float(next(times)))
    assert await runner.facts(PLAIN, GuardSettings(timeout_s=0.5)) == UNKNOWN


async def test_a_slow_text_leaves_the_event_loop() -> None:
    """A short one full of numbers takes as long as a large one."""
    threads: set[int] = set()
    times = iter(range(100))

    def clock() -> float:
        threads.add(threading.get_ident())
        return float(next(times))

    assert await GuardRunner(clock=clock).facts(PLAIN, GuardSettings(timeout_s=60.0)) == NOTHING
    assert len(threads) == 2


async def test_what_is_not_text_counts_as_a_hit() -> None:
    runner = GuardRunner()
    assert await runner.facts(SEEN, GuardSettings()) == UNKNOWN
    assert await runner.facts(PLAIN, GuardSettings(), unread=True) == UNKNOWN
    assert await runner.facts(SEEN, CLEAN) == NOTHING
    with pytest.raises(GuardFailed):
        await runner.masked(SEEN, ("email",), GuardSettings())


async def test_a_large_request_is_read_beside_the_event_loop() -> None:
    assert await GuardRunner().facts(LARGE, GuardSettings(timeout_s=60.0)) == GuardFacts(("email",), 1, 0)
