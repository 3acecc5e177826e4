"""`python -m tests.bench kills [--rounds 20] [--seed N]`: kill -9 of each process at random moments, under load.

A round kills, in random order and at random moments, a gateway, a worker, a device (before the first gateway), Redis,
one Triton, both Tritons and one Triton's model process (stub). Gateway and device are killed in the middle of an
answer. The bed restarts gateway, worker, device and Redis as a supervisor does; Triton's launcher restarts Triton; a
gateway reloads the model whose stub died. Redis is a master with two replicas (`--single`: one server without
Sentinels), and a killed master returns as a replica after the Sentinels have promoted another one. Then the round waits
until every tier answers again and every job that it accepted has ended. Each round has a batch, too. Checks:

1. No accepted job is lost: each has succeeded, with all its tokens (`late`: after more than TIMEOUT_S).
2. No effect is duplicated: one job for a key, one end in its events, one webhook id at the receiver. An output file
   has each line of its batch once, in order. A chain of stored responses, at the gateways and at the device, has each
   turn that its client had once, in order; a response in the background is made once, and its events are whole.
3. Every interactive request has exactly one outcome, and no stream claims to be complete that is not.
4. Over all rounds Triton is called at most AMPLIFICATION times for each request that reached it, as counted by the
   model itself.
5. After the rounds a failover that loses data is forced: jobs are accepted while one replica is down, both other
   servers are lost, and that replica is promoted. `jobs reconcile` names exactly the jobs and batches that are gone.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import msgspec

from tests.bench.rows import Row, checks
from tests.cloud_pool.jobs.webhook_receiver import Receiver, receiving

from .batch_load import BatchLoad
from .bed import Bed, Replica, ReplicaSpeed, running_bed
from .client import RequestResult, send
from .figures import table
from .job_load import AcceptedJob, JobLoad
from .response_load import ResponseLoad

TIERS = ("assistant-large", "assistant")
VICTIMS = ("gateway", "worker", "device", "redis", "triton", "tritons", "stub")
AMPLIFICATION = 1.2
TOKENS = 100
CONFIG = {"degradation": {"tiers": TIERS}, "audit_file": "audit"}
REPLICAS = 2  # of Redis
LOST_JOBS = 12
LONG = ReplicaSpeed(slots=64, prefill_s=0.05, step_s=0.02)
"""Of paced replicas: an answer takes 2 s, so that each kill interrupts many."""
TIMEOUT_S = 90.0
TICK_S = 0.05


class Round(msgspec.Struct):
    """The results of one round."""

    number: int
    kills: list[str]
    took_s: float = 0.0
    outcomes: collections.Counter[str] = msgspec.field(default_factory=collections.Counter)
    codes: collections.Counter[str] = msgspec.field(
        default_factory=collections.Counter
    )  # of requests without an answer
    jobs: list[AcceptedJob] = []
    late: int = 0
    calls: int = 0  # calls of models, without the gateways' own probes
    reached: int = 0  # requests and jobs that reached a model

    @property
    def failures(self) -> list[str]:
        bad = [outcome for outcome in ("unresolved", "invalid") if self.outcomes[outcome]]
        return [f"round {self.number}: {self.outcomes[each]} requests with outcome `{each}`" for each in bad]


Responses = Mapping[str, ResponseLoad]  # by place


class MixedLoad:
    """Interactive streams and jobs at given rates, until `stop`."""

    def __init__(self, bed: Bed, session: aiohttp.ClientSession, jobs: JobLoad, rng: random.Random) -> None:
        self._bed = bed
        self._session = session
        self._jobs = jobs
        self._rng = rng
        self._token = bed.token("acme")
        self.results: list[RequestResult] = []
        self._stopped = asyncio.Event()
        self._began = {url: asyncio.Event() for url in bed.urls}

    async def run(self, *, streams_per_s: float, jobs_per_s: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._start_at_rate(tasks, streams_per_s, self._stream))
            tasks.create_task(self._start_at_rate(tasks, jobs_per_s, self._job))

    def stop(self) -> None:
        self._stopped.set()

    async def next_stream(self, url: str) -> None:
        """Wait until a stream is sent to the gateway: a kill then interrupts it, since an answer takes 2 s."""
        self._began[url].clear()
        await self._began[url].wait()

    async def _start_at_rate(
        self, tasks: asyncio.TaskGroup, per_s: float, start: Callable[[], Awaitable[None]]
    ) -> None:
        while not self._stopped.is_set():
            tasks.create_task(start())  # type: ignore[arg-type]
            try:
                async with asyncio.timeout(self._rng.expovariate(per_s)):
                    await self._stopped.wait()
            except TimeoutError:
                continue

    async def _stream(self) -> None:
        url, tier = self._rng.choice(self._bed.urls), self._rng.choice(TIERS)
        self._began[url].set()
        result = await send(self._session, url, profile="stream", tier=tier, token=self._token, tokens=TOKENS)
        self.results.append(result)

    async def _job(self) -> None:
        await self._jobs.submit(self._rng.choice(TIERS), TOKENS)


class Killer:
    """Kills processes. A kill returns once the bed has restarted the process, or its own supervisor will."""

    def __init__(self, bed: Bed, load: MixedLoad, responses: Responses, rng: random.Random) -> None:
        self._bed = bed
        self._load = load
        self._responses = responses
        self._rng = rng

    async def run(self, victims: list[str], within_s: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            for victim in victims:
                await asyncio.sleep(self._rng.uniform(0.2, within_s))
                tasks.create_task(self._kill(victim))

    async def _kill(self, victim: str) -> None:
        if victim in ("gateway", "worker"):
            number = self._rng.randint(1, 2)
            if victim == "gateway":
                await self._load.next_stream(url := self._bed.urls[number - 1])
                await self._responses["gateways"].middle(url)
            await self._bed.crash(f"{victim}-{number}")
        elif victim == "device":
            await self._responses["device"].middle(self._bed.device_url)
            await self._bed.crash("device-1")
        elif victim == "redis":
            await self._bed.crash_redis(self._rng.uniform(0.0, 1.0))
        elif victim == "stub":
            await self._stub(self._rng.choice(self._bed.replicas))
        else:
            chosen = self._bed.replicas if victim == "tritons" else [self._rng.choice(self._bed.replicas)]
            for replica in chosen:
                await self._server(replica)

    async def _server(self, replica: Replica) -> None:
        while (server := replica.server) is None or replica.stub is None:
            await asyncio.sleep(TICK_S)
        server.kill()

    async def _stub(self, replica: Replica) -> None:
        while (stub := replica.stub) is None:
            await asyncio.sleep(TICK_S)
        stub.kill()


class KillMatrix:
    """The rounds on one bed."""

    def __init__(self, bed: Bed, session: aiohttp.ClientSession, receiver: Receiver, seed: int) -> None:
        self._bed = bed
        self._session = session
        self._receiver = receiver
        self._rng = random.Random(seed)
        self._jobs = JobLoad(session, bed.urls, bed.token("acme"), receiver, self._rng)
        self._batches = BatchLoad(session, bed.urls, bed.token("acme"), self._rng)
        token = bed.token("acme", "chains")
        places = {"gateways": (bed.urls, TIERS[0]), "device": ((bed.device_url,), "auto")}
        self._responses: Responses = {
            name: ResponseLoad(session, urls, token, self._rng, model) for name, (urls, model) in places.items()
        }
        self.rejected = self._jobs.rejected

    async def round(
        self, number: int, victims: list[str], *, within_s: float, streams_per_s: float, jobs_per_s: float
    ) -> Round:
        began = time.monotonic()
        known, called = len(self._jobs.accepted), [len(replica.calls()) for replica in self._bed.replicas]
        load = MixedLoad(self._bed, self._session, self._jobs, self._rng)
        running = asyncio.ensure_future(load.run(streams_per_s=streams_per_s, jobs_per_s=jobs_per_s))
        batch = asyncio.ensure_future(self._batches.submit(self._rng.choice(TIERS), TOKENS))
        stopped = asyncio.Event()
        chains = [asyncio.ensure_future(one.run(stopped, TOKENS)) for one in self._responses.values()]
        await Killer(self._bed, load, self._responses, self._rng).run(victims, within_s)
        await self._wait_until_ready()
        load.stop()
        stopped.set()
        await asyncio.gather(running, batch, *chains)
        accepted = self._jobs.accepted[known:]
        late = await self._jobs.wait_for_ends(accepted, TIMEOUT_S)
        calls = [
            mark
            for replica, before in zip(self._bed.replicas, called, strict=True)
            for mark in replica.calls()[before:]
            if mark != "-"
        ]
        return Round(
            number=number,
            kills=victims,
            took_s=time.monotonic() - began,
            outcomes=collections.Counter(result.outcome for result in load.results),
            codes=collections.Counter(
                f"{result.status} {result.code}" for result in load.results if result.outcome != "answer"
            ),
            jobs=accepted,
            late=len(late),
            calls=len(calls),
            reached=len(set(calls)),
        )

    async def _wait_until_ready(self) -> None:
        """Wait until both gateways answer from every tier. Raises RuntimeError with the last lines of all logs."""
        for url in self._bed.operator_urls:
            ends = time.monotonic() + TIMEOUT_S
            while fault := await self._readiness_fault(url):
                if time.monotonic() > ends:
                    raise RuntimeError(f"{url}: {fault}\n{self._bed.tails()}")
                await asyncio.sleep(TICK_S * 4)

    async def _readiness_fault(self, url: str) -> str:
        try:
            async with self._session.get(f"{url}/readyz", headers=self._bed.operator_headers) as reply:
                state = await reply.json()
        except (aiohttp.ClientError, ConnectionError) as error:
            return repr(error)
        return ", ".join(f"{name}: {tier['error']}" for name, tier in state["tiers"].items() if not tier["ready"])

    async def effects(self) -> list[str]:
        """Return the failed checks on the jobs of all rounds, after a wait for jobs that kills have delayed."""
        jobs = self._jobs.accepted
        await self._jobs.wait_for_ends([job for job in jobs if not job.status], TIMEOUT_S)
        for job in jobs:
            await self._jobs.count_ends(job)
        ends = time.monotonic() + TIMEOUT_S
        while time.monotonic() < ends and any(job.has_webhook and not self._webhook_ids(job) for job in jobs):
            await asyncio.sleep(TICK_S)
        failures = await self._batches.failures(TIMEOUT_S)
        for place, responses in self._responses.items():
            failures += [f"{failure}, {place}" for failure in await responses.failures()]
            print(f"responses, {place}: {dict(responses.counts)}")
        print(f"batches: {len(self._batches.accepted)} accepted, refused before that: {dict(self._batches.rejected)}")
        received = sum(len(self._webhook_ids(job)) for job in jobs)
        ends_seen, requested = sum(job.ends for job in jobs), sum(job.has_webhook for job in jobs)
        print(f"jobs: {len(jobs)} accepted in {self._jobs.submissions} submissions, {ends_seen} ends")
        print(f"webhooks: {requested} requested, {received} received in {self._receiver.deliveries} deliveries")
        checks = {
            "accepted jobs lost": sum(job.status != "succeeded" or job.tokens != TOKENS for job in jobs),
            "keys with several jobs": sum(len(job.ids) != 1 for job in jobs),
            "jobs with several end events, or none": sum(job.ends != 1 for job in jobs),
            "jobs with several webhooks": sum(len(self._webhook_ids(job)) > 1 for job in jobs),
            "webhooks that never arrived": sum(job.has_webhook and not self._webhook_ids(job) for job in jobs),
            "webhooks that were not requested": sum(
                bool(self._webhook_ids(job)) and not job.has_webhook for job in jobs
            ),
        }
        return failures + [f"{count} {what}" for what, count in checks.items() if count]

    async def lose_acknowledged_jobs(self) -> list[str]:
        """Force a failover that loses data. Returns what is wrong with the report of `jobs reconcile`."""
        sentinels = self._bed.sentinels
        assert sentinels is not None
        laggard = sentinels.replicas[0]
        laggard.kill()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(LOST_JOBS):
                tasks.create_task(self._jobs.submit(self._rng.choice(TIERS), TOKENS))
        killed = await asyncio.to_thread(sentinels.fail_over_to, laggard)
        for server in killed:
            await asyncio.to_thread(sentinels.rejoin, server)
        await self._wait_until_ready()
        gone = {min(job.ids) for job in self._jobs.accepted if not await self._jobs.is_known(job)}
        found = await asyncio.to_thread(self._bed.reconcile)
        print(f"forced lossy failover: {LOST_JOBS} accepted, {len(gone)} gone, {len(found)} named by jobs reconcile")
        return [] if gone and found == gone else [f"jobs reconcile named {sorted(found)}, gone are {sorted(gone)}"]

    def _webhook_ids(self, job: AcceptedJob) -> set[str]:
        """Return the webhook ids that the receiver saw for the job."""
        return set().union(*(self._receiver.ids_by_job.get(each, set()) for each in job.ids))


def summary(rounds: list[Round]) -> str:
    outcomes = ("answer", "rejected", "broken", "connection", "unresolved", "invalid")
    heads = ("round", "kills", "s", "streams", *outcomes, "jobs", "late", "calls", "reached", "× calls")
    rows = []
    for one in rounds:
        counts = [one.outcomes[outcome] for outcome in outcomes]
        figures = [len(one.jobs), one.late, one.calls, one.reached, f"{amplification([one]):.3f}"]
        rows.append([one.number, "+".join(one.kills), f"{one.took_s:.1f}", sum(counts), *counts, *figures])
    total = [sum(one.outcomes[outcome] for one in rounds) for outcome in outcomes]
    sums = [sum(len(one.jobs) for one in rounds), sum(one.late for one in rounds)]
    sums += [sum(one.calls for one in rounds), sum(one.reached for one in rounds)]
    took = f"{sum(one.took_s for one in rounds):.0f}"
    rows.append(["all", "", took, sum(total), *total, *sums, f"{amplification(rounds):.3f}"])
    return table(heads, rows)


def amplification(rounds: list[Round]) -> float:
    return sum(one.calls for one in rounds) / max(1, sum(one.reached for one in rounds))


async def run(
    bed: Bed,
    plan: list[list[str]],
    seed: int,
    *,
    within_s: float,
    streams_per_s: float,
    jobs_per_s: float,
    most_calls: float = AMPLIFICATION,
) -> tuple[list[Round], list[str]]:
    """Run a round for each list of victims. Returns the rounds and the failed checks."""
    rounds: list[Round] = []
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(receiving())
        session = await stack.enter_async_context(aiohttp.ClientSession())
        matrix = KillMatrix(bed, session, receiver, seed)
        for number, victims in enumerate(plan, 1):
            rounds.append(
                await matrix.round(
                    number, victims, within_s=within_s, streams_per_s=streams_per_s, jobs_per_s=jobs_per_s
                )
            )
            print(summary(rounds[-1:]).splitlines()[1], flush=True)
        failures = [failure for one in rounds for failure in one.failures] + await matrix.effects()
        if bed.sentinels is not None:
            failures += await matrix.lose_acknowledged_jobs()
        if amplification(rounds) > most_calls:
            failures.append(f"{amplification(rounds):.2f} calls a request")
        print("streams without an answer:", dict(sum((one.codes for one in rounds), collections.Counter[str]())))
        print("job submissions rejected while processes were down:", dict(matrix.rejected))
    return rounds, failures


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", choices=("journaled", "paced"), default="journaled", help="paced: long answers")
    parser.add_argument("--single", action="store_true", help="one Redis server without Sentinels")
    parser.add_argument("--within-s", type=float, default=3.0, help="longest time between two kills")
    parser.add_argument("--streams-per-s", type=float, default=8.0)
    parser.add_argument("--jobs-per-s", type=float, default=2.0)


def main(arguments: argparse.Namespace) -> list[Row]:
    rng = random.Random(arguments.seed)
    plan = [rng.sample(VICTIMS, len(VICTIMS)) for _ in range(arguments.rounds)]
    replicas = 0 if arguments.single else REPLICAS
    settings: Any = {"model": arguments.model, "speed": LONG, "config": dict(CONFIG), "replicas_of_redis": replicas}
    with running_bed(TIERS, device=True, **settings) as bed:
        rounds, failures = asyncio.run(
            run(
                bed,
                plan,
                arguments.seed,
                within_s=arguments.within_s,
                streams_per_s=arguments.streams_per_s,
                jobs_per_s=arguments.jobs_per_s,
            )
        )
    print(summary(rounds))
    return checks(failures)
