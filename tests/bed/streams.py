"""A pipeline under load while its parts are killed, and its goodput beside calling the gateway.

    python -m tests.bench streams --rounds 20 [--broker kafka]

1. Producers publish messages of a few keys, and some without one; every tenth message is sent twice.
2. In each round every kind of process is killed once, at random moments, and comes back: the broker, both processes of
   the pipeline, a gateway (beside whose requests the messages run), Redis, Triton.
3. At the end every message has one outcome, an answer, and each key's outcomes are in the order of its messages.
4. Goodput: as many messages through the pipeline, and as many requests to a gateway, in turn, with 32 in flight in
   both processes of the pipeline together, and in the gateway. The median of the pairs is judged (`--ratio`).
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp

from tests.bench.rows import Row, checks
from tests.stack import Process

from .bed import ROOT, Bed, ReplicaSpeed, running_bed
from .client import body_of, new_mark, send
from .figures import quantile, table
from .stream_brokers import SUBJECTS, NatsBroker, Publisher, StreamBroker

TIER = "assistant-large"
VICTIMS = ("broker", "pipeline-1", "pipeline-2", "gateway", "redis", "triton")
SPEED = ReplicaSpeed(slots=32, prefill_s=0.05, step_s=0.01)
IN_FLIGHT = 32
RECEIVERS = {"nats": 1, "kafka": 2}  # of the two processes of the pipeline
TOKENS = 20
KEYS = 6
TIMEOUT_S = 180.0


def message(key: str, number: int) -> tuple[str, bytes]:
    """Return the id and the message."""
    name = f"{key or 'free'}-{number}"
    data = body_of(new_mark(), TIER, TOKENS, stream=False)
    event = {"specversion": "1.0", "id": name, "source": "/bed", "type": "bed", "data": data}
    return name, json.dumps(event | ({"partitionkey": key} if key else {})).encode()


class MessageLoad:
    """Publishes messages at a rate until it is stopped. Each key's messages are published one after the other."""

    def __init__(self, broker: StreamBroker, rng: random.Random) -> None:
        self._broker = broker
        self._rng = rng
        self.sent: list[str] = []
        self._numbers = collections.Counter[str]()
        self._stopped = asyncio.Event()

    def stop(self) -> None:
        self._stopped.set()

    async def run(self, per_s: float) -> None:
        self._stopped.clear()
        keys = [*(f"key{number}" for number in range(KEYS)), ""]
        async with self._broker.publisher() as publisher, asyncio.TaskGroup() as tasks:
            for key in keys:
                tasks.create_task(self._publish(publisher, key, per_s / len(keys)))

    async def _publish(self, publisher: Publisher, key: str, per_s: float) -> None:
        while not self._stopped.is_set():
            name, body = message(key, self._numbers[key])
            self._numbers[key] += 1
            await publisher.publish(body, key)
            self.sent.append(name)
            if self._rng.random() < 0.1:
                await publisher.publish(body, key)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._rng.expovariate(per_s)):
                    await self._stopped.wait()


class Pipelines:
    """The processes of one pipeline."""

    def __init__(self, bed: Bed, broker: StreamBroker) -> None:
        self._bed = bed
        self._broker = broker
        self._processes: dict[str, Process] = {}

    def start(self, name: str) -> Process:
        topic = self._broker.topic
        command = [sys.executable, "-P", "-m", "causeway_server.cloud_pool", "stream"]
        command += ["--config", str(self._bed.folder / "gateway.yaml")]
        command += ["--in", topic(SUBJECTS[0]), "--out", topic(SUBJECTS[1]), "--operator-port", "0"]
        log = self._bed.folder / f"{name}.log"
        process = self._processes[name] = Process(name, command, log, {"PYTHONPATH": str(ROOT)})
        return process

    async def crash(self, name: str) -> None:
        self._processes[name].kill()
        await asyncio.to_thread(self.start(name).ready)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()

    def tails(self) -> str:
        return "\n".join(f"--- {name}\n{process.tail(15)}" for name, process in self._processes.items())


async def kill(bed: Bed, broker: StreamBroker, pipelines: Pipelines, victim: str, rng: random.Random) -> None:
    """Kill a part; it is back on return, or its supervisor brings it back."""
    if victim == "broker":
        await asyncio.to_thread(broker.kill)
        await asyncio.sleep(rng.uniform(0.0, 1.0))
        await asyncio.to_thread(broker.start)
    elif victim.startswith("pipeline"):
        await pipelines.crash(victim)
    elif victim == "gateway":
        await bed.crash("gateway-1")
    elif victim == "redis":
        await bed.crash_redis(rng.uniform(0.0, 1.0))
    elif (server := bed.replicas[0].server) is not None:
        server.kill()


async def killed_round(
    bed: Bed,
    broker: StreamBroker,
    pipelines: Pipelines,
    load: MessageLoad,
    rng: random.Random,
    *,
    per_s: float,
    within_s: float,
) -> tuple[list[str], float]:
    """Return the order of the kills and how long the backlog took afterwards, s."""
    victims = rng.sample(VICTIMS, len(VICTIMS))
    running = asyncio.ensure_future(load.run(per_s))
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        for victim in victims:
            await asyncio.sleep(rng.uniform(0.1, within_s))
            tasks.create_task(kill(bed, broker, pipelines, victim, rng))
            tasks.create_task(_request(session, bed))
    load.stop()
    await running
    began = time.monotonic()
    await until_answered(broker, pipelines, set(load.sent))
    return victims, time.monotonic() - began


async def _request(session: aiohttp.ClientSession, bed: Bed) -> None:
    """An interactive request beside the messages; whatever becomes of it."""
    await send(session, bed.urls[1], profile="beside", tier=TIER, token=bed.token("acme"), tokens=TOKENS)


async def until_answered(broker: StreamBroker, pipelines: Pipelines, names: set[str]) -> None:
    """Wait until each message has an outcome. Raises RuntimeError with the logs' ends."""
    ends = time.monotonic() + TIMEOUT_S
    while missing := names - {outcome["id"] for outcome in await broker.outcomes()}:
        if time.monotonic() > ends:
            raise RuntimeError(f"{len(missing)} messages have no outcome: {sorted(missing)[:5]}\n{pipelines.tails()}")
        await asyncio.sleep(0.3)


def failures(sent: list[str], outcomes: list[dict[str, Any]]) -> list[str]:
    """Return what is wrong with the outcomes."""
    counts = collections.Counter(outcome["id"] for outcome in outcomes)
    answered = {outcome["id"] for outcome in outcomes if outcome["type"] == "causeway.answered"}
    by_key: dict[str, list[int]] = collections.defaultdict(list)
    for outcome in outcomes:
        if "partitionkey" in outcome:
            by_key[outcome["partitionkey"]].append(int(outcome["id"].rpartition("-")[2]))
    checks = {
        "messages lost": len(set(sent) - set(counts)),
        "messages with several outcomes": sum(count > 1 for count in counts.values()),
        "messages without an answer": len(set(sent) - answered),
        "outcomes of no message": len(set(counts) - set(sent)),
        "keys out of order": sum(numbers != sorted(numbers) for numbers in by_key.values()),
    }
    return [f"{count} {what}" for what, count in checks.items() if count]


async def through_pipeline(broker: StreamBroker, pipelines: Pipelines, count: int) -> float:
    """Return messages per second, from the first publication to the last outcome."""
    messages = [message("", 1_000_000 + time.monotonic_ns() // 1000 + number) for number in range(count)]
    async with broker.publisher() as publisher, broker.answers() as answers:
        began, left = time.monotonic(), {name for name, _ in messages}
        sending = asyncio.gather(*(publisher.publish(body) for _, body in messages))
        async with asyncio.timeout(TIMEOUT_S):
            while left:
                left.discard(json.loads(await anext(answers))["id"])
        took = time.monotonic() - began
        await sending
    return count / took


async def through_gateway(session: aiohttp.ClientSession, bed: Bed, count: int) -> float:
    """Return answers per second of `IN_FLIGHT` clients, each of which sends its next request after an answer.

    One that is shed is sent again at once: only answers count.
    """
    token = bed.token("acme")
    headers = {"authorization": f"Bearer {token}", "x-causeway-priority": "interactive"}
    left = iter(range(count))

    async def client() -> None:
        for _ in left:
            body, status = body_of(new_mark(), TIER, TOKENS, stream=False), 0
            while status != 200:
                async with session.post(f"{bed.urls[0]}/v1/chat/completions", json=body, headers=headers) as reply:
                    status = reply.status
                    await reply.read()

    began = time.monotonic()
    async with asyncio.TaskGroup() as tasks:
        for _ in range(IN_FLIGHT):
            tasks.create_task(client())
    return count / (time.monotonic() - began)


async def run(bed: Bed, broker: StreamBroker, pipelines: Pipelines, arguments: argparse.Namespace) -> list[str]:
    """Return the failed checks."""
    rng = random.Random(arguments.seed)
    await broker.create()
    for name in ("pipeline-1", "pipeline-2"):
        await asyncio.to_thread(pipelines.start(name).ready)
    found: list[str] = []
    if arguments.messages:
        ratios = []
        async with aiohttp.ClientSession() as session:
            for _ in range(arguments.pairs):
                # Each after a pause, in which the permits of the other side are free again.
                await asyncio.sleep(arguments.pause_s)
                streamed = await through_pipeline(broker, pipelines, arguments.messages)
                await asyncio.sleep(arguments.pause_s)
                direct = await through_gateway(session, bed, arguments.messages)
                ratios.append(streamed / direct)
                rates = f"{streamed:.1f}/s through the pipeline, {direct:.1f}/s at the gateway"
                print(f"goodput: {rates}: {ratios[-1]:.2f}", flush=True)
        if quantile(ratios, 0.5) < arguments.ratio:
            found.append(f"goodput is {quantile(ratios, 0.5):.2f} of the gateway's")
    known = {outcome["id"] for outcome in await broker.outcomes()}
    load, rows = MessageLoad(broker, rng), []
    for number in range(1, arguments.rounds + 1):
        victims, backlog_s = await killed_round(
            bed, broker, pipelines, load, rng, per_s=arguments.per_s, within_s=arguments.within_s
        )
        rows.append([number, "+".join(victims), len(load.sent), f"{backlog_s:.1f}"])
        print(table(("round", "kills", "messages so far", "backlog s"), rows[-1:]).splitlines()[1], flush=True)
    outcomes = [outcome for outcome in await broker.outcomes() if outcome["id"] not in known]
    print(f"{len(load.sent)} messages, {len(outcomes)} outcomes")
    return found + failures(load.sent, outcomes)


def _broker(kind: str, folder: Path) -> StreamBroker:
    if kind == "nats":
        return NatsBroker(folder / "nats")
    from .stream_kafka import KafkaBroker

    return KafkaBroker()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--broker", choices=("nats", "kafka"), default="nats")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--per-s", type=float, default=15.0, help="messages")
    parser.add_argument("--within-s", type=float, default=1.5, help="longest time between two kills")
    parser.add_argument("--messages", type=int, default=1500, help="of each run for goodput; 0: none")
    parser.add_argument("--pairs", type=int, default=3, help="runs for goodput")
    parser.add_argument("--pause-s", type=float, default=12.0, help="before each run for goodput")
    parser.add_argument("--ratio", type=float, default=0.8, help="least goodput beside the gateway's")


def main(arguments: argparse.Namespace) -> list[Row]:
    in_flight = IN_FLIGHT // RECEIVERS[arguments.broker]
    config = {"streams": {"tenant": "acme", "lease_s": 3.0, "in_flight": in_flight, "max_attempts": 1000}}
    with running_bed(
        (TIER,), model="paced", speed=SPEED, tier={"concurrency": IN_FLIGHT}, config=dict(config), workers=0
    ) as bed:
        broker = _broker(arguments.broker, bed.folder)
        pipelines = Pipelines(bed, broker)
        try:
            found = asyncio.run(run(bed, broker, pipelines, arguments))
        finally:
            pipelines.close()
            broker.close()
    return checks(found)
