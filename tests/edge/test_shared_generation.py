"""Coalescing: one piece of work, any number of listeners, who come and go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import anyio
import anyio.abc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_node.serving.generation import Generation
from edge_node.serving.reply import AnswerHead
from edge_node.serving.shared_generation import BUFFER_BYTES, SharedGeneration, SharedGenerations, Subscriber
from router.errors import CausewayError, CloudFailed, DeadlineExceeded
from router.policy.compiled import parse_policy
from router.types import Chunk, Embeddings, Request, Snapshot

from .scripted import until

POLICY = parse_policy("version: 1\nname: p\ntargets: {s: {at: edge, model: m}}\nroutes: [{name: r, use: [s]}]\n")
HEAD = AnswerHead(id="1", policy="p@1", route="edge", target="s", model="m", reason="r", cache="miss")


def work() -> Generation:
    return Generation("1", Request(kind="chat", model="auto"), POLICY, Snapshot(), arrived=0.0, deadline=1e9)


def soon(seconds: float = 5.0) -> float:
    return asyncio.get_running_loop().time() + seconds


@pytest.fixture
async def flights() -> AsyncIterator[SharedGenerations]:
    flights = SharedGenerations()
    stop = asyncio.Event()

    async def live() -> None:
        async with anyio.create_task_group() as tasks:
            flights.run(tasks)
            await stop.wait()
            tasks.cancel_scope.cancel()

    root = asyncio.ensure_future(live())
    await asyncio.sleep(0)
    yield flights
    stop.set()
    await root


class Script:
    """Work that says one word for each permit, and remembers whether it was stopped."""

    def __init__(self, words: int = 3, error: CausewayError | None = None) -> None:
        self.words = words
        self.error = error
        self.permits = asyncio.Semaphore(0)
        self.runs = 0
        self.cancelled = False

    async def __call__(self, flight: SharedGeneration) -> None:
        self.runs += 1
        try:
            for at in range(self.words):
                await self.permits.acquire()
                if at == 0:
                    await flight.commit(HEAD)
                await flight.send(Chunk(text=f"{at} "))
            if self.error is not None:
                raise self.error
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    def permit(self, count: int) -> None:
        for _ in range(count):
            self.permits.release()


async def hear(listener: Subscriber, deadline: float | None = None) -> str:
    text = ""
    while (piece := await listener.next(deadline or soon())) is not None:
        assert isinstance(piece, Chunk)
        text += piece.text
    return text


async def listen(flights: SharedGenerations, script: Script, key: bytes = b"k") -> str:
    with flights.join(key, work(), script) as (listener, _):
        return await hear(listener)


async def test_all_who_ask_the_same_share_one_work_whenever_they_come(flights: SharedGenerations) -> None:
    """The second listener comes late, gets the answer from its start, and the work ran once."""
    script = Script()
    with flights.join(b"k", work(), script) as (first, started):
        assert started
        script.permit(2)
        assert (await first.next(soon()), await first.next(soon())) == (Chunk(text="0 "), Chunk(text="1 "))
        with flights.join(b"k", work(), script) as (second, started_again):
            assert not started_again
            assert await second.next(soon()) == Chunk(text="0 ")
            script.permit(1)
            assert await hear(first) == "2 "
            assert await hear(second) == "1 2 "
    assert script.runs == 1
    await until(lambda: len(flights) == 0)


async def test_different_questions_do_not_meet(flights: SharedGenerations) -> None:
    """Another key is another work."""
    first, second = Script(words=1), Script(words=1)
    first.permit(1)
    second.permit(1)
    await asyncio.gather(listen(flights, first, b"1"), listen(flights, second, b"2"))
    assert (first.runs, second.runs) == (1, 1)


async def test_the_first_one_may_leave_and_the_rest_get_their_answer(flights: SharedGenerations) -> None:
    """The work is the flight's: whoever started it is no more than a listener."""
    script = Script()
    leader = asyncio.ensure_future(listen(flights, script))
    await until(lambda: script.runs == 1)
    follower = asyncio.ensure_future(listen(flights, script))
    await until(lambda: flights._flights[b"k"].listeners == 2)
    leader.cancel()
    script.permit(3)
    assert await follower == "0 1 2 "
    assert not script.cancelled


async def test_the_last_one_who_leaves_ends_the_work(flights: SharedGenerations) -> None:
    """Nobody listens: the work is cancelled, and a newcomer does not join its ruins."""
    script = Script()
    tasks = [asyncio.ensure_future(listen(flights, script)) for _ in range(2)]
    await until(lambda: script.runs == 1 and flights._flights[b"k"].listeners == 2)
    for task in tasks:
        task.cancel()
    await until(lambda: script.cancelled)
    await until(lambda: len(flights) == 0)
    fresh = Script(words=1)
    fresh.permit(1)
    assert await listen(flights, fresh) == "0 "


async def test_a_failure_reaches_every_listener(flights: SharedGenerations) -> None:
    """What broke the work is what each of them is told, and the next one asks anew."""
    script = Script(words=1, error=CloudFailed("it broke"))
    tasks = [asyncio.ensure_future(listen(flights, script)) for _ in range(3)]
    await until(lambda: script.runs == 1 and flights._flights[b"k"].listeners == 3)
    script.permit(1)
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(end) for end in ends] == [CloudFailed] * 3
    assert script.runs == 1
    assert len(flights) == 0


async def test_an_unexpected_failure_is_an_error_and_not_the_end_of_the_daemon(flights: SharedGenerations) -> None:
    """A bug in one work is told as an internal error; other flights fly on."""

    async def broken(flight: SharedGeneration) -> None:
        raise ValueError("the secret prompt")

    with flights.join(b"k", work(), broken) as (listener, _), pytest.raises(CausewayError, match="internal error"):
        await hear(listener)
    script = Script(words=1)
    script.permit(1)
    assert await listen(flights, script) == "0 "


async def test_one_late_listener_is_not_the_others_problem(flights: SharedGenerations) -> None:
    """Each has a deadline of its own."""
    script = Script()
    with flights.join(b"k", work(), script) as (patient, _), flights.join(b"k", work(), script) as (hasty, _):
        with pytest.raises(DeadlineExceeded):
            await hear(hasty, soon(0.01))
        script.permit(3)
        assert await hear(patient) == "0 1 2 "


async def test_a_flood_waits_for_the_slowest_reader_in_bounded_memory(flights: SharedGenerations) -> None:
    """A large answer is not piled up: the work waits, nobody may join any more, and each reader gets all of it."""
    sent = 0
    size = 200_000

    async def flood(flight: SharedGeneration) -> None:
        nonlocal sent
        for _ in range(40):
            sent += 1
            await flight.send(Chunk(text="x" * size))

    with flights.join(b"k", work(), flood) as (fast, _), flights.join(b"k", work(), flood) as (slow, _):
        for _ in range(6):
            await fast.next(soon())
        await asyncio.sleep(0)
        assert sent * size <= BUFFER_BYTES + 2 * size
        assert not fast.flight.joinable
        rest = asyncio.ensure_future(hear(fast))
        assert len(await hear(slow)) == 40 * size
        assert len(await rest) == 34 * size
        assert not fast.flight.whole
        assert fast.flight._bytes <= BUFFER_BYTES + 2 * size


async def test_a_reader_who_never_reads_is_let_go_and_the_rest_go_on(flights: SharedGenerations) -> None:
    """When the slowest one leaves, the work does not wait for it any more."""

    async def flood(flight: SharedGeneration) -> None:
        for _ in range(20):
            await flight.send(Chunk(text="x" * 200_000))

    with flights.join(b"k", work(), flood) as (reader, _):
        with flights.join(b"k", work(), flood) as (stuck, _):
            await stuck.next(soon())
            hearing = asyncio.ensure_future(hear(reader))
            await until(lambda: reader.flight._bytes > BUFFER_BYTES)
            assert not hearing.done()
        assert len(await hearing) == 20 * 200_000


def test_vectors_are_counted_too() -> None:
    """A flight of embeddings knows its size."""

    async def play() -> None:
        flight = SharedGeneration(work())
        await flight.send(Embeddings(((0.0,) * 100, (0.0,) * 100)))
        assert flight._bytes >= 200 * 8

    asyncio.run(play())


@given(st.lists(st.sampled_from(["join", "leave", "word", "step"]), max_size=60))
@settings(max_examples=60, deadline=None)
def test_whoever_stays_to_the_end_has_the_whole_answer(steps: list[str]) -> None:
    """However listeners come and go, each one that stays hears every word in order, from one and the same work."""

    async def play() -> None:
        flights, stop = SharedGenerations(), asyncio.Event()
        script = Script(words=5)

        async def live() -> None:
            async with anyio.create_task_group() as tasks:
                flights.run(tasks)
                await stop.wait()
                tasks.cancel_scope.cancel()

        root = asyncio.ensure_future(live())
        await asyncio.sleep(0)
        listeners = [asyncio.ensure_future(listen(flights, script))]
        left: set[asyncio.Future[str]] = set()
        for at, step in enumerate(steps):
            if step == "join":
                listeners.append(asyncio.ensure_future(listen(flights, script)))
            elif step == "leave" and len(listeners) > 1 and at % len(listeners):
                listeners[at % len(listeners)].cancel()
                left.add(listeners[at % len(listeners)])
            elif step == "word":
                script.permit(1)
            await asyncio.sleep(0)
        script.permit(5 * (len(listeners) + 1))
        ends = await asyncio.gather(*listeners, return_exceptions=True)
        for task, end in zip(listeners, ends, strict=True):
            assert end == "0 1 2 3 4 " or task in left
        stop.set()
        await root
        assert len(flights) == 0

    asyncio.run(play())
