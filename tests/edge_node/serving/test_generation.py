"""Single-flight: one generation, any number of subscribers that join and leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import anyio
import anyio.abc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from causeway_server.edge_node.serving.generation import Generation
from causeway_server.edge_node.serving.requests import BUFFER_BYTES, SharedGeneration, SharedGenerations, Subscriber
from causeway_server.router.errors import CausewayError, CloudFailed, DeadlineExceeded
from causeway_server.router.policy.compiled import parse_policy
from causeway_server.router.serving.reply import AnswerHead
from causeway_server.router.types import Chunk, Embeddings, Request, Snapshot
from tests.waiting import until

POLICY = parse_policy("version: 1\nname: p\ntargets: {s: {at: edge, model: m}}\nroutes: [{name: r, use: [s]}]\n")
HEAD = AnswerHead(id="1", policy="p@1", route="edge", target="s", model="m", reason="r", cache="miss")


def generation() -> Generation:
    return Generation("1", Request(kind="chat", model="auto"), POLICY, Snapshot(), arrived=0.0, deadline=1e9)


def soon(seconds: float = 5.0) -> float:
    return asyncio.get_running_loop().time() + seconds


@pytest.fixture
async def shared() -> AsyncIterator[SharedGenerations]:
    shared = SharedGenerations()
    stop = asyncio.Event()

    async def run_tasks() -> None:
        async with anyio.create_task_group() as tasks:
            shared.start(tasks)
            await stop.wait()
            tasks.cancel_scope.cancel()

    root = asyncio.ensure_future(run_tasks())
    await asyncio.sleep(0)
    yield shared
    stop.set()
    await root


class Script:
    """Produces one word per permit, and notes whether it was cancelled."""

    def __init__(self, words: int = 3, error: CausewayError | None = None) -> None:
        self.words = words
        self.error = error
        self.permits = asyncio.Semaphore(0)
        self.runs = 0
        self.cancelled = False

    async def __call__(self, one: SharedGeneration) -> None:
        self.runs += 1
        try:
            for at in range(self.words):
                await self.permits.acquire()
                if at == 0:
                    await one.commit(HEAD)
                await one.send(Chunk(text=f"{at} "))
            if self.error is not None:
                raise self.error
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    def permit(self, count: int) -> None:
        for _ in range(count):
            self.permits.release()


async def read_all(subscriber: Subscriber, deadline: float | None = None) -> str:
    text = ""
    while (piece := await subscriber.shared.read(subscriber, deadline or soon())) is not None:
        assert isinstance(piece, Chunk)
        text += piece.text
    return text


async def subscribe(shared: SharedGenerations, script: Script, key: bytes = b"k") -> str:
    with shared.join(key, generation(), script) as (subscriber, _):
        return await read_all(subscriber)


async def test_identical_requests_share_one_generation_whenever_they_join(shared: SharedGenerations) -> None:
    script = Script()
    with shared.join(b"k", generation(), script) as (first, started):
        assert started
        script.permit(2)
        assert (await first.shared.read(first, soon()), await first.shared.read(first, soon())) == (
            Chunk(text="0 "),
            Chunk(text="1 "),
        )
        with shared.join(b"k", generation(), script) as (second, started_again):
            assert not started_again
            assert await second.shared.read(second, soon()) == Chunk(text="0 ")
            script.permit(1)
            assert await read_all(first) == "2 "
            assert await read_all(second) == "1 2 "
    assert script.runs == 1
    await until(lambda: len(shared) == 0)


async def test_different_keys_do_not_share(shared: SharedGenerations) -> None:
    first, second = Script(words=1), Script(words=1)
    first.permit(1)
    second.permit(1)
    await asyncio.gather(subscribe(shared, first, b"1"), subscribe(shared, second, b"2"))
    assert (first.runs, second.runs) == (1, 1)


async def test_the_first_subscriber_may_leave_and_the_rest_get_the_answer(shared: SharedGenerations) -> None:
    script = Script()
    leader = asyncio.ensure_future(subscribe(shared, script))
    await until(lambda: script.runs == 1)
    follower = asyncio.ensure_future(subscribe(shared, script))
    await until(lambda: shared.subscribers == 2)
    leader.cancel()
    script.permit(3)
    assert await follower == "0 1 2 "
    assert not script.cancelled


async def test_the_last_subscriber_that_leaves_cancels_the_generation(shared: SharedGenerations) -> None:
    """A new request does not join the cancelled generation."""
    script = Script()
    tasks = [asyncio.ensure_future(subscribe(shared, script)) for _ in range(2)]
    await until(lambda: script.runs == 1 and shared.subscribers == 2)
    for task in tasks:
        task.cancel()
    await until(lambda: script.cancelled)
    await until(lambda: len(shared) == 0)
    fresh = Script(words=1)
    fresh.permit(1)
    assert await subscribe(shared, fresh) == "0 "


async def test_a_failure_reaches_every_subscriber(shared: SharedGenerations) -> None:
    script = Script(words=1, error=CloudFailed("it broke"))
    tasks = [asyncio.ensure_future(subscribe(shared, script)) for _ in range(3)]
    await until(lambda: script.runs == 1 and shared.subscribers == 3)
    script.permit(1)
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(end) for end in ends] == [CloudFailed] * 3
    assert script.runs == 1
    assert len(shared) == 0


async def test_an_unexpected_failure_is_an_error_and_not_the_end_of_the_daemon(shared: SharedGenerations) -> None:
    """A bug in one generation is an internal error; other generations continue."""

    async def broken(one: SharedGeneration) -> None:
        raise ValueError("the secret prompt")

    with (
        shared.join(b"k", generation(), broken) as (subscriber, _),
        pytest.raises(CausewayError, match="Internal error"),
    ):
        await read_all(subscriber)
    script = Script(words=1)
    script.permit(1)
    assert await subscribe(shared, script) == "0 "


async def test_each_subscriber_has_its_own_deadline(shared: SharedGenerations) -> None:
    script = Script()
    with shared.join(b"k", generation(), script) as (patient, _), shared.join(b"k", generation(), script) as (hasty, _):
        with pytest.raises(DeadlineExceeded, match="while an identical request was being answered"):
            await read_all(hasty, soon(0.01))
        with pytest.raises(DeadlineExceeded, match="before the answer was complete"):
            await read_all(patient, soon(0.01))
        script.permit(3)
        assert await read_all(patient) == "0 1 2 "


async def test_a_large_answer_waits_for_the_slowest_subscriber_in_bounded_memory(shared: SharedGenerations) -> None:
    """The producer waits, no request can join any more, and each subscriber gets the complete answer."""
    sent = 0
    size = 200_000

    async def flood(one: SharedGeneration) -> None:
        nonlocal sent
        for _ in range(40):
            sent += 1
            await one.send(Chunk(text="x" * size))

    with shared.join(b"k", generation(), flood) as (fast, _), shared.join(b"k", generation(), flood) as (slow, _):
        for _ in range(6):
            await fast.shared.read(fast, soon())
        await asyncio.sleep(0)
        assert sent * size <= BUFFER_BYTES + 2 * size
        assert not fast.shared.joinable
        rest = asyncio.ensure_future(read_all(fast))
        assert len(await read_all(slow)) == 40 * size
        assert len(await rest) == 34 * size
        assert not fast.shared.whole
        assert fast.shared.buffered_bytes <= BUFFER_BYTES + 2 * size


async def test_the_producer_continues_when_the_slowest_subscriber_leaves(shared: SharedGenerations) -> None:
    async def flood(one: SharedGeneration) -> None:
        for _ in range(20):
            await one.send(Chunk(text="x" * 200_000))

    with shared.join(b"k", generation(), flood) as (reader, _):
        with shared.join(b"k", generation(), flood) as (stuck, _):
            await stuck.shared.read(stuck, soon())
            reading = asyncio.ensure_future(read_all(reader))
            await until(lambda: reader.shared.buffered_bytes > BUFFER_BYTES)
            assert not reading.done()
        assert len(await reading) == 20 * 200_000


def test_the_buffer_counts_the_bytes_of_embeddings() -> None:
    async def play() -> None:
        one = SharedGeneration(generation())
        await one.send(Embeddings(((0.0,) * 100, (0.0,) * 100)))
        assert one.buffered_bytes >= 200 * 8

    asyncio.run(play())


@pytest.mark.slow
@given(st.lists(st.sampled_from(["join", "leave", "word", "step"]), max_size=60))
@settings(max_examples=60, deadline=None)
def test_every_subscriber_that_stays_gets_the_complete_answer(steps: list[str]) -> None:
    async def play() -> None:
        shared, stop = SharedGenerations(), asyncio.Event()
        script = Script(words=5)

        async def run_tasks() -> None:
            async with anyio.create_task_group() as tasks:
                shared.start(tasks)
                await stop.wait()
                tasks.cancel_scope.cancel()

        root = asyncio.ensure_future(run_tasks())
        await asyncio.sleep(0)
        subscribers = [asyncio.ensure_future(subscribe(shared, script))]
        left: set[asyncio.Future[str]] = set()
        for at, step in enumerate(steps):
            if step == "join":
                subscribers.append(asyncio.ensure_future(subscribe(shared, script)))
            elif step == "leave" and len(subscribers) > 1 and at % len(subscribers):
                subscribers[at % len(subscribers)].cancel()
                left.add(subscribers[at % len(subscribers)])
            elif step == "word":
                script.permit(1)
            await asyncio.sleep(0)
        script.permit(5 * (len(subscribers) + 1))
        ends = await asyncio.gather(*subscribers, return_exceptions=True)
        for task, end in zip(subscribers, ends, strict=True):
            assert end == "0 1 2 3 4 " or task in left
        stop.set()
        await root
        assert len(shared) == 0

    asyncio.run(play())
