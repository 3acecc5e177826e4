"""The stopwatch keeps the time of nested mechanisms apart, and each function of the table is there."""

from __future__ import annotations

import asyncio
import functools
import importlib
from collections.abc import AsyncIterator, Iterator

import pytest

from .edge_profile import MECHANISMS, OFF, Cost, Measured, Profile, Share, Stopwatch, rows, silent


@pytest.mark.parametrize("path", [path for paths in MECHANISMS.values() for path in paths])
def test_each_function_is_there(path: str) -> None:
    module, _, names = path.partition(":")
    found = functools.reduce(getattr, names.split("."), importlib.import_module(f"causeway_server.{module}"))
    assert callable(found)


class Clock:
    """Moves by hand."""

    def __init__(self) -> None:
        self.ns = 0

    def __call__(self) -> int:
        return self.ns


async def test_a_function_does_not_have_the_time_of_those_that_it_calls() -> None:
    clock = Clock()
    watch = Stopwatch(clock=clock)

    def inner() -> None:
        clock.ns += 3

    async def waiting() -> str:
        clock.ns += 5
        await asyncio.sleep(0)
        clock.ns += 7
        return "answer"

    async def pieces() -> AsyncIterator[int]:
        clock.ns += 11
        yield 1
        clock.ns += 13

    inner_watched, waiting_watched = watch.wrap("inner", inner), watch.wrap("waiting", waiting)
    pieces_watched = watch.wrap("pieces", pieces)

    async def outer() -> tuple[str, list[int]]:
        clock.ns += 100
        inner_watched()
        return await waiting_watched(), [piece async for piece in pieces_watched()]

    assert await watch.wrap("outer", outer)() == ("answer", [1])
    assert {name: share.ns for name, share in watch.shares.items()} == {
        "inner": 3,
        "waiting": 12,
        "pieces": 24,
        "outer": 100,
        "": 0,
    }


@pytest.mark.parametrize("raised", [ValueError("a fault"), asyncio.CancelledError()])
async def test_faults_and_cancellations_pass_through(raised: BaseException) -> None:
    watch = Stopwatch()

    async def fails() -> None:
        try:
            await asyncio.sleep(0)
        finally:
            raise raised

    with pytest.raises(type(raised)):
        await watch.wrap("fails", fails)()
    assert watch.shares["fails"].calls == 2


async def test_a_cancelled_task_ends_what_it_runs() -> None:
    watch, ended = Stopwatch(), asyncio.Event()

    async def hangs() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    task = asyncio.ensure_future(watch.wrap("hangs", hangs)())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


def test_first_requests_and_interrupted_calls_do_not_count() -> None:
    clock = Clock()
    watch = Stopwatch(first=1, clock=clock)

    def work(ns: int) -> None:
        clock.ns += ns

    watched = watch.wrap("work", work)
    watched(1_000)
    watch.requests = 3
    for ns in (2_000, 4_000_000, 4_000):
        watched(ns)
    share = watch.shares["work"]
    assert (share.calls, share.interrupted, share.ns) == (3, 1, 6_000)
    assert share.scaled(watch.profile.requests) == (4.5, 0.0)


def test_the_stopwatches_cost_what_the_daemon_takes_more() -> None:
    """10 of 20 µs are decide's raw time; the stopwatches cost 4 µs, twice what they should."""
    shares = {"decide": Share(calls=1, ns=10_000, cost_ns=1_000), "": Share(calls=1, cost_ns=1_000)}
    lines = dict(_first_figures({"forwarded request": Measured(Profile(1, shares), total_us=20.0, watched_us=24.0)}))
    assert lines["decide"] == "8.0"
    assert lines["total"] == "20.0"
    assert next(text for name, text in lines.items() if name.startswith("everything else")) == "12.0"


def _first_figures(measured: dict[str, Measured]) -> Iterator[tuple[str, str]]:
    yield from ((line[0], line[1]) for line in rows(measured))


def test_cost_is_counted_where_it_falls() -> None:
    watch = Stopwatch(call=Cost(inside=2.0, around=3.0))
    inner = watch.wrap("inner", lambda: None)
    watch.wrap("outer", inner)()
    assert {name: share.cost_ns for name, share in watch.shares.items()} == {"inner": 2.0, "outer": 5.0, "": 3.0}


def test_a_mechanism_that_no_request_passes_is_named() -> None:
    shares = {name: Share(calls=1) for name in MECHANISMS if name not in ("decide", OFF)}
    assert silent({"forwarded request": Measured(Profile(1, shares), 1.0, 1.0)}) == ["decide"]
