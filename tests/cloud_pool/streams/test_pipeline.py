"""A pipeline on real brokers and a real Redis, with a scripted runner: one outcome for each message, whatever happens.

The load: messages of a few keys beside others, the same message twice, messages that nobody can read, models that fail,
and processes that are killed between any two steps.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from typing import Any

import anyio
import msgspec
import pytest

from causeway_server.cloud_pool.brokers.port import BrokerUnavailable, OutgoingMessage, TopicLag
from causeway_server.cloud_pool.jobs.worker.runner import JobRun
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.redis_client import RedisClient
from causeway_server.router.errors import CloudFailed, CloudUnreachable
from tests.cloud_pool.jobs.conftest import until

from .brokers import RealBroker
from .pipelines import ActingRunner, RunningPipeline, Topics, encoded, question

pytestmark = pytest.mark.slow
Start = Callable[..., RunningPipeline]
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
async def topics(broker: RealBroker) -> Topics:
    return await Topics.create(broker)


@pytest.fixture
def start(topics: Topics, database: RedisClient, jobs: JobsConfig) -> Start:
    def make(runner: ActingRunner | None = None, **changes: Any) -> RunningPipeline:
        return RunningPipeline(topics, database, jobs, runner or ActingRunner(), **changes)

    return make


async def test_a_message_is_answered_with_its_id_key_and_trace(start: Start, topics: Topics) -> None:
    await topics.send(encoded("q1", partitionkey="k", traceparent=TRACEPARENT, causewaytags="private, night"))
    runner = ActingRunner()
    async with start(runner):
        await topics.until(1)
    (answer,) = await topics.answers()
    (run,) = runner.runs
    assert (answer["id"], answer["partitionkey"], answer["traceparent"]) == ("q1", "k", TRACEPARENT)
    assert (answer["type"], answer["requestsource"]) == ("causeway.answered", "/line/1")
    assert answer["data"]["choices"][0]["message"]["content"] == "q1"
    assert (run.record.owner, run.record.priority, run.record.traceparent) == ("factory/stream", "bulk", TRACEPARENT)
    assert set(run.request.hints.tags) == {"private", "night"}


@pytest.mark.parametrize("region", ["eu", "us", ""])
async def test_a_bound_message_is_answered_only_by_brokers_of_its_region(
    topics: Topics, database: RedisClient, jobs: JobsConfig, region: str
) -> None:
    """Elsewhere no model sees it, and its outcome names the region alone."""
    await topics.send(encoded("q1", causewaytags="in-region:eu"), encoded("q2"))
    runner, is_home = ActingRunner(), region == "eu"
    jobs = msgspec.structs.replace(jobs, region="eu")
    async with RunningPipeline(topics, database, jobs, runner, region=region):
        await topics.until(2 if is_home else 1, dead=0 if is_home else 1)
    assert sorted(runner.names) == (["q1", "q2"] if is_home else ["q2"])
    for letter in await topics.dead():
        assert (letter["id"], letter["data"]["error"]["code"]) == ("q1", "outside_region")
        assert "a secret question" not in letter["data"]["error"]["message"]


async def test_messagepack_is_answered_in_messagepack(start: Start, topics: Topics) -> None:
    await topics.send(msgspec.msgpack.encode(question("q1")), content_type="application/cloudevents+msgpack")
    async with start():
        await until(lambda: _stored(topics))
    (body,) = await topics.broker.read(topics.sink)
    assert msgspec.msgpack.decode(body)["data"]["choices"][0]["message"]["content"] == "q1"


async def test_the_token_of_a_message_says_whose_it_is(start: Start, topics: Topics) -> None:
    """Its grants bound the priority; without a token and a configured tenant it is a dead letter."""
    await topics.send(encoded("q1", causewaypriority="interactive"), Authorization="Bearer acme")
    await topics.send(encoded("q2"))
    runner = ActingRunner()
    async with start(runner, tenant=None):
        await topics.until(1, dead=1)
    assert [(run.record.owner, run.record.priority) for run in runner.runs] == [("acme/sensor", "standard")]
    assert [letter["data"]["error"]["code"] for letter in await topics.dead()] == ["invalid_api_key"]


async def test_the_same_message_twice_has_one_effect(start: Start, topics: Topics) -> None:
    """Beside each other, and one long after the other."""
    runner = ActingRunner()
    async with start(runner) as pipeline:
        await topics.send(encoded("q1"), encoded("q1"))
        await until(lambda: _counted(pipeline, "duplicate", 1))
        await topics.send(encoded("q1"), encoded("q2"))
        await until(lambda: _counted(pipeline, "duplicate", 2))
        await topics.until(2)
    assert sorted(await topics.names()) == ["q1", "q2"]
    assert sorted(runner.names) == ["q1", "q2"]


async def test_tags_are_in_the_event_and_a_header_of_ours_is_refused(start: Start, topics: Topics) -> None:
    """A broker's client may keep one of two headers, so that a tag would be lost."""
    await topics.send(encoded("q1"), X_Causeway_Tags="private")
    await topics.send(encoded("q2", causewaytags="Night,,PRIVATE"))
    await topics.send(encoded("q3", causewaytags="a b"))
    runner = ActingRunner()
    async with start(runner):
        await topics.until(1, dead=2)
    assert [run.request.hints.tags for run in runner.runs] == [("night", "private")]
    errors = [letter["data"]["error"] for letter in await topics.dead()]
    assert {error["code"] for error in errors} == {"invalid_value"}
    assert any("causewaytags" in error["message"] for error in errors)


async def test_another_producers_event_with_the_same_id_suppresses_none(start: Start, topics: Topics) -> None:
    """Neither by other content nor with a token that is refused: each has an outcome of its own, and so has mine."""
    await topics.send(encoded("q1"))  # without a token: refused
    await topics.send(encoded("q1", data={"user": "theirs"}), Authorization="Bearer acme")
    await topics.send(encoded("q1"), Authorization="Bearer acme")
    runner = ActingRunner()
    async with start(runner, tenant=None):
        await topics.until(2, dead=1)
    answers = await topics.answers()
    assert sorted(answer["data"]["choices"][0]["message"]["content"] for answer in answers) == ["q1", "theirs"]
    assert {answer["id"] for answer in answers} == {"q1"}
    assert len({answer["source"] for answer in answers}) == 2  # `source` and `id` name one outcome


async def test_what_cannot_be_answered_is_a_dead_letter_with_the_reason(start: Start, topics: Topics) -> None:
    """It comes once, with the message, and the others go on. The model never sees it."""
    poison = [b"", b"\xff{", b"[1]", b'{"specversion":"1.0","id":"a","source":"s","type":"t"}', b"{" * 5000]
    poison += [encoded("p1", data={"model": "absent"}), encoded("p2", data={"messages": "no"})]
    poison += [encoded("p3", data={"webhook": "https://example.com"}), encoded("p4", data={"deadline_ms": 5})]
    poison += [encoded("p6", data={"not_before_ms": 5}), encoded("p7", data={"window": "off_peak"})]
    named = [{"role": "user", "content": [{"type": "file", "file": {"file_id": "file-1"}}]}]
    poison += [encoded("p8", data={"revise_within_ms": 5}), encoded("p9", data={"messages": named})]
    runner = ActingRunner()
    async with start(runner):
        await topics.send(*poison, encoded("q1"))
        await topics.send(encoded("p5"), content_type="text/plain")
        await topics.until(1, dead=len(poison) + 1)
    letters = await topics.dead()
    assert sorted(base64.b64decode(letter["data"].get("message", "")) for letter in letters) == sorted(
        [*poison, encoded("p5")]
    )
    codes = {letter["id"]: letter["data"]["error"]["code"] for letter in letters if letter["id"].startswith("p")}
    assert (codes["p1"], codes["p9"]) == ("model_not_found", "unsupported_feature")
    assert {codes[name] for name in ("p3", "p4", "p6", "p7", "p8")} == {"invalid_value"}
    assert {letter["data"]["error"]["code"] for letter in letters} >= {"unsupported_media_type", "invalid_value"}
    assert (runner.names, await topics.names()) == (["q1"], ["q1"])


async def test_a_failing_run_is_repeated_until_its_attempts_are_used_up(start: Start, topics: Topics) -> None:
    async def act(name: str, run: JobRun) -> None:
        if name == "always" or (name == "twice" and run.record.attempts < 3):
            raise CloudFailed("the model raised")

    runner = ActingRunner(act)
    async with start(runner, max_attempts=3):
        await topics.send(encoded("always"), encoded("twice"))
        await topics.until(1, dead=1)
    assert await topics.names() == ["twice"]
    (letter,) = await topics.dead()
    assert (letter["id"], letter["data"]["attempts"]) == ("always", 3)
    assert letter["data"]["error"]["code"] == CloudFailed.code
    assert sorted(runner.names) == ["always"] * 3 + ["twice"] * 3


async def test_a_tier_that_is_away_uses_up_no_attempts(start: Start, topics: Topics) -> None:
    refusals = 20

    async def act(_name: str, _run: JobRun) -> None:
        if len(runner.runs) <= refusals:
            raise CloudUnreachable("refused", phase="connect")

    runner = ActingRunner(act)
    async with start(runner, max_attempts=1):
        await topics.send(encoded("q1"))
        await topics.until(1)
    assert await topics.dead() == []
    assert {run.record.attempts for run in runner.runs} == {1}


async def test_an_expired_message_is_told_and_not_answered(start: Start, topics: Topics) -> None:
    """By its `expirytime`, or by its age; one that expires while it waits for its tier, too."""
    old = datetime.fromtimestamp(1_700_000_000, UTC).isoformat()
    now = [1_800_000_000.0]

    async def act(_name: str, _run: JobRun) -> None:
        now[0] += 1000.0
        raise CloudUnreachable("refused", phase="connect")

    runner = ActingRunner(act)
    soon = datetime.fromtimestamp(now[0] + 500, UTC).isoformat()
    async with start(runner, max_age_s=60.0, wall_clock=lambda: now[0]):
        await topics.send(encoded("late", expirytime=old), encoded("old", time=old), encoded("soon", expirytime=soon))
        await topics.until(3)
    answers = await topics.answers()
    assert {answer["type"] for answer in answers} == {"causeway.expired"}
    assert {answer["data"]["error"]["code"] for answer in answers} <= {"deadline_exceeded", "cloud_unreachable"}
    assert (runner.names, await topics.dead()) == (["soon"], [])


async def test_a_key_is_answered_in_order_and_others_go_on(start: Start, topics: Topics) -> None:
    """A slow message, and one that is repeated, hold back their own key alone."""
    release = anyio.Event()

    async def act(name: str, run: JobRun) -> None:
        if name == "a1":
            await release.wait()
        if name == "b1" and run.record.attempts < 3:
            raise CloudFailed("the model raised")

    runner = ActingRunner(act)
    async with start(runner):
        for name in ("a1", "b1", "a2", "b2", "c1", "a3", "b3"):
            await topics.send(encoded(name, partitionkey=name[0]))
        await topics.send(encoded("free"))
        await topics.until(5)
        assert not [name for name in await topics.names() if name[0] == "a"]
        assert {"a2", "a3"} <= set(runner.names)
        release.set()
        await topics.until(8)
    names = await topics.names()
    assert [name for name in names if name[0] == "a"] == ["a1", "a2", "a3"]
    assert [name for name in names if name[0] == "b"] == ["b1", "b2", "b3"]


async def test_so_many_messages_run_at_once_and_the_lag_is_shown(start: Start, topics: Topics) -> None:
    release = anyio.Event()

    async def act(_name: str, _run: JobRun) -> None:
        await release.wait()

    runner = ActingRunner(act)
    await topics.send(*(encoded(f"q{number}") for number in range(7)))
    async with start(runner, in_flight=3, batch=2) as pipeline:
        await until(lambda: _reached(pipeline, "in_flight", 3.0))
        await until(lambda: _reached(pipeline, "lag", 7.0))
        assert pipeline.value("active") == 1.0
        assert len(runner.runs) == 3
        pipeline.source.lag = no_broker  # type: ignore[method-assign]
        await until(lambda: _reached(pipeline, "active", 0.0))
        assert pipeline.value("lag") == 7.0
        release.set()
        await topics.until(7)


async def test_draining_ends_what_runs_and_leaves_the_rest(
    topics: Topics, database: RedisClient, jobs: JobsConfig
) -> None:
    """What does not end in time runs again in the next process, and has used up no attempt."""

    async def act(name: str, _run: JobRun) -> None:
        if name == "stuck":
            await anyio.sleep_forever()

    runner, impatient = ActingRunner(act), msgspec.structs.replace(jobs, drain_s=0.2)
    await topics.send(encoded("stuck"), encoded("q1"))
    async with RunningPipeline(topics, database, impatient, runner, max_attempts=1):
        await topics.until(1)
    again = ActingRunner()
    async with RunningPipeline(topics, database, jobs, again, max_attempts=1):
        await topics.until(2)
    assert (sorted(await topics.names()), await topics.dead()) == (["q1", "stuck"], [])
    assert [run.record.attempts for run in again.runs] == [1]


async def test_a_process_killed_between_two_steps_leaves_one_effect(
    broker: RealBroker, database: RedisClient, jobs: JobsConfig
) -> None:
    """Before each step, and, for those that another machine carries out, after it: all at once, each on its topics."""

    async def kill(step: str, *, after: bool) -> None:
        topics, hit = await Topics.create(broker), anyio.Event()
        names = [f"{step}-{after}", f"{step}-{after}-next"]
        async with RunningPipeline(topics, database, jobs, ActingRunner()) as pipeline:
            parts = {"make_outcome": pipeline.settler, "publish": pipeline.sink, "acknowledge": pipeline.source}
            part: object = parts.get(step, pipeline.effects)
            setattr(part, step, dying(getattr(part, step), hit, after=after))
            await topics.send(*(encoded(name, partitionkey="k") for name in names))
            await hit.wait()
            await pipeline.crash()
        async with RunningPipeline(topics, database, jobs, ActingRunner()):
            await topics.until(2)
        assert await topics.names() == names

    async with anyio.create_task_group() as cases:
        for step in ("make_outcome", "record", "publish", "published", "acknowledge"):
            for after in (False, True):
                cases.start_soon(partial(kill, step, after=after))


async def test_a_redis_that_forgot_an_effect_loses_no_message(
    broker: RealBroker, database: RedisClient, jobs: JobsConfig
) -> None:
    """The answer was published and not acknowledged. NATS drops a second one by its id; Kafka knows no ids."""
    topics, hit = await Topics.create(broker), anyio.Event()
    async with RunningPipeline(topics, database, jobs, ActingRunner()) as pipeline:
        step = "acknowledge"
        setattr(pipeline.source, step, dying(getattr(pipeline.source, step), hit, after=False))
        await topics.send(encoded("q1", partitionkey="k"))
        await hit.wait()
        await pipeline.crash()
    await database.command("FLUSHALL")
    async with RunningPipeline(topics, database, jobs, ActingRunner()) as pipeline:
        await until(lambda: _has_answered(pipeline))
    names = await topics.names()
    assert set(names) == {"q1"}
    assert len(names) == 1 or not broker.drops_repeated_ids


async def _has_answered(pipeline: RunningPipeline) -> bool:
    return pipeline.count("answered") == 1.0


async def test_a_message_that_kills_every_process_ends_as_a_dead_letter(start: Start, topics: Topics) -> None:
    await topics.send(encoded("poison"), encoded("q1"))
    for _ in range(2):
        hit = anyio.Event()

        async def act(name: str, _run: JobRun, hit: anyio.Event = hit) -> None:
            if name == "poison":
                hit.set()
                await anyio.sleep_forever()

        async with start(ActingRunner(act), max_attempts=2) as pipeline:
            await hit.wait()
            await topics.until(1)
            await pipeline.crash()
    async with start(max_attempts=2):
        await topics.until(1, dead=1)
    (letter,) = await topics.dead()
    assert (letter["id"], letter["data"]["error"]["code"]) == ("poison", "worker_lost")
    assert json.loads(base64.b64decode(letter["data"]["message"]))["id"] == "poison"


async def test_one_process_receives_and_the_other_takes_over(start: Start, topics: Topics) -> None:
    """A process that lost its lease without knowing it publishes nothing any more."""
    release = anyio.Event()

    async def act(_name: str, _run: JobRun) -> None:
        await release.wait()

    first, second = ActingRunner(act), ActingRunner()
    async with start(first, lease_s=0.6) as old:
        if not old.source.needs_lease:
            pytest.skip("this broker divides the lanes itself")
        await topics.send(encoded("q1", partitionkey="k"), encoded("q2", partitionkey="k"))
        await until(lambda: _ran(first, 2))
        await until(lambda: _reached(old, "in_flight", 2.0))
        for part, method in ((old.effects, "hold"), (old.source, "receive"), (old.source, "extend_ack")):
            setattr(part, method, paused(getattr(part, method), release))
        async with start(second, lease_s=0.6):
            await topics.until(2)
            release.set()
            await until(lambda: _reached(old, "active", 0.0))
            assert [old.value(name) for name in ("lag", "in_flight", "oldest_seconds")] == [0.0] * 3
    assert await topics.names() == ["q1", "q2"]


async def test_a_rebalance_in_mid_answer_leaves_one_effect(start: Start, topics: Topics) -> None:
    """Lanes that move run again elsewhere, in order; the process that lost them stops working on them."""
    release = anyio.Event()

    async def act(_name: str, _run: JobRun) -> None:
        await release.wait()

    first, second = ActingRunner(act), ActingRunner()
    names = [f"{key}{number}" for number in (1, 2) for key in "abcdefgh"]
    async with start(first) as old:
        if old.source.needs_lease:
            pytest.skip("this broker has no lanes")
        await topics.send(*(encoded(name, partitionkey=name[0]) for name in names))
        await until(lambda: _ran(first, len(names)))
        async with start(second):
            await until(lambda: _ran(second, 1))
            release.set()
            await topics.until(len(names))
    published = await topics.names()
    assert sorted(published) == sorted(names)
    assert all(published.index(f"{key}1") < published.index(f"{key}2") for key in "abcdefgh")
    assert 0 < len(second.runs) < len(names)
    assert len(first.runs) == len(names), "what stayed went on"


async def test_a_killed_broker_costs_nothing(start: Start, topics: Topics) -> None:
    """Messages that run while it is away are published once it is back, in order, and new ones follow."""
    release = anyio.Event()

    async def act(_name: str, _run: JobRun) -> None:
        await release.wait()

    runner = ActingRunner(act)
    names = [f"q{number}" for number in range(1, 6)]
    async with start(runner):
        await topics.send(*(encoded(name, partitionkey="k") for name in names[:4]))
        await until(lambda: _ran(runner, 4))
        topics.broker.kill()
        release.set()
        topics.broker.start()
        await topics.send(encoded(names[4], partitionkey="k"))
        await topics.until(5)
    assert await topics.names() == names
    assert runner.names == names


async def test_answers_wait_for_a_full_broker(start: Start, topics: Topics, caplog: pytest.LogCaptureFixture) -> None:
    """The log says so; no message runs again, and the order stays."""
    release = anyio.Event()

    async def act(_name: str, _run: JobRun) -> None:
        await release.wait()

    runner = ActingRunner(act)
    names = [f"q{number}" for number in range(1, 5)]
    async with start(runner) as pipeline:
        await topics.send(*(encoded(name, partitionkey="k") for name in names))
        await until(lambda: _ran(runner, len(names)))
        await topics.broker.set_full(topics.sink, True)
        try:
            tries = counted(pipeline)
            release.set()
            await until(lambda: _are(tries, 3))
            await until(lambda: _lags(pipeline, len(names)))
            assert await topics.names() == []
        finally:
            await topics.broker.set_full(topics.sink, False)
        await topics.until(len(names))
    assert await topics.names() == names
    assert runner.names == names
    told = [
        record.message
        for record in caplog.records
        if "The outcome of a message cannot be published yet" in record.message
    ]
    assert len(told) == 1
    if topics.broker.drops_repeated_ids:
        assert told == ["The outcome of a message cannot be published yet: NATS refuses: maximum bytes exceeded"]


def counted(pipeline: RunningPipeline) -> list[str]:
    """Return the ids of the outcomes that it tries to publish from now on."""
    tries, publish = list[str](), pipeline.sink.publish

    async def note(message: OutgoingMessage, *arguments: Any, **options: Any) -> bool:
        tries.append(message.id)
        return await publish(message, *arguments, **options)

    setattr(pipeline.sink, "publish", note)  # noqa: B010 -- mypy takes no other method in its place
    return tries


async def _lags(pipeline: RunningPipeline, count: int) -> bool:
    return pipeline.value("lag") == count


async def _are(found: list[str], count: int) -> bool:
    return len(found) >= count


def dying(step: Callable[..., Awaitable[object]], hit: anyio.Event, *, after: bool) -> Callable[..., Awaitable[object]]:
    """Return a step at which its process ends."""

    async def dies(*arguments: object, **options: object) -> object:
        if after:
            await step(*arguments, **options)
        hit.set()
        await anyio.sleep_forever()
        return None

    return dies


def paused(step: Callable[..., Awaitable[object]], release: anyio.Event) -> Callable[..., Awaitable[object]]:
    """Return a step of a process that is stopped until `release`."""

    async def waits(*arguments: object) -> object:
        await release.wait()
        return await step(*arguments)

    return waits


async def no_broker() -> TopicLag:
    raise BrokerUnavailable("it is away")


async def _stored(topics: Topics) -> bool:
    return bool(await topics.broker.read(topics.sink))


async def _counted(pipeline: RunningPipeline, outcome: str, count: int) -> bool:
    return pipeline.count(outcome) >= count


async def _reached(pipeline: RunningPipeline, metric: str, value: float) -> bool:
    return pipeline.value(metric) == value


async def _ran(runner: ActingRunner, count: int) -> bool:
    return len(runner.runs) >= count
