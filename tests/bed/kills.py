"""`python -m tests.bed.kills [--rounds 20] [--seed N]`: kill -9 of each part at random moments, with load running.

A round kills, in random order and at random moments, a gateway, a worker, Redis, one Triton, both Tritons and one
Triton's model process (stub). Gateway, worker and Redis are started again as a supervisor does; Triton by its launcher;
the stub by whoever repairs it. Then the round waits until the bed is whole and every job that it accepted has ended.

1. no accepted job is lost: each is there and has ended well, with all its tokens (`late`: after more than PATIENCE_S)
2. no effect is doubled: one job for a key, one end in its events, one webhook id at the receiver
3. every interactive request has exactly one outcome, and never an end that was none
4. over all rounds Triton is called at most AMPLIFICATION times a request that reached it: counted by the model itself
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import random
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

import aiohttp
import msgspec

from tests.jobs.webhook_receiver import Receiver, receiving

from .asking import Told, ask
from .bed import Bed, Pace, Replica, laddered, standing
from .effects import Accepted, Jobs
from .figures import table

TIERS = ("assistant-large", "assistant")
VICTIMS = ("gateway", "worker", "redis", "triton", "tritons", "stub")
AMPLIFICATION = 1.2
TOKENS = 100
LONG = Pace(slots=64, prefill_s=0.05, step_s=0.02)
"""Of paced replicas: two seconds an answer, so that each kill finds many in their middle."""
PATIENCE_S = 90.0
TICK_S = 0.05


class Round(msgspec.Struct):
    """What was seen in one round."""

    number: int
    kills: list[str]
    took_s: float = 0.0
    outcomes: collections.Counter[str] = msgspec.field(default_factory=collections.Counter)
    codes: collections.Counter[str] = msgspec.field(default_factory=collections.Counter)  # of what was no answer
    jobs: list[Accepted] = []
    late: int = 0
    calls: int = 0  # that reached a model, without the gateways' own
    reached: int = 0  # requests and jobs that reached one
    asked: int = 0  # requests and jobs in all

    @property
    def wrong(self) -> list[str]:
        bad = [outcome for outcome in ("none", "false") if self.outcomes[outcome]]
        return [f"round {self.number}: {self.outcomes[each]} requests of outcome `{each}`" for each in bad]


class Load:
    """Interactive streams and jobs, at a rate, until `stop`."""

    def __init__(self, bed: Bed, session: aiohttp.ClientSession, jobs: Jobs, rng: random.Random) -> None:
        self._bed = bed
        self._session = session
        self._jobs = jobs
        self._rng = rng
        self._token = bed.token("acme")
        self.told: list[Told] = []
        self._stopped = asyncio.Event()

    async def run(self, *, streams_per_s: float, jobs_per_s: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._each(tasks, streams_per_s, self._stream))
            tasks.create_task(self._each(tasks, jobs_per_s, self._job))

    def stop(self) -> None:
        self._stopped.set()

    async def _each(self, tasks: asyncio.TaskGroup, per_s: float, begin: Callable[[], Awaitable[None]]) -> None:
        while not self._stopped.is_set():
            tasks.create_task(begin())  # type: ignore[arg-type]
            try:
                async with asyncio.timeout(self._rng.expovariate(per_s)):
                    await self._stopped.wait()
            except TimeoutError:
                continue

    async def _stream(self) -> None:
        url, tier = self._rng.choice(self._bed.urls), self._rng.choice(TIERS)
        self.told.append(await ask(self._session, url, kind="stream", tier=tier, token=self._token, tokens=TOKENS))

    async def _job(self) -> None:
        await self._jobs.offer(self._rng.choice(TIERS), TOKENS)


class Killer:
    """Who is killed, and when. Each kill returns when the part is back, or its supervisor has it in hand."""

    def __init__(self, bed: Bed, rng: random.Random) -> None:
        self._bed = bed
        self._rng = rng

    async def run(self, victims: list[str], within_s: float) -> None:
        async with asyncio.TaskGroup() as tasks:
            for victim in victims:
                await asyncio.sleep(self._rng.uniform(0.2, within_s))
                tasks.create_task(self._kill(victim))

    async def _kill(self, victim: str) -> None:
        if victim in ("gateway", "worker"):
            await self._bed.crash(f"{victim}-{self._rng.randint(1, 2)}")
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


class Matrix:
    """The rounds over one bed."""

    def __init__(self, bed: Bed, session: aiohttp.ClientSession, receiver: Receiver, seed: int) -> None:
        self._bed = bed
        self._session = session
        self._receiver = receiver
        self._rng = random.Random(seed)
        self._jobs = Jobs(session, bed.urls, bed.token("acme"), receiver, self._rng)
        self.refused = self._jobs.refused

    async def round(
        self, number: int, victims: list[str], *, within_s: float, streams_per_s: float, jobs_per_s: float
    ) -> Round:
        began = time.monotonic()
        known, called = len(self._jobs.accepted), [len(replica.calls()) for replica in self._bed.replicas]
        load = Load(self._bed, self._session, self._jobs, self._rng)
        running = asyncio.ensure_future(load.run(streams_per_s=streams_per_s, jobs_per_s=jobs_per_s))
        await Killer(self._bed, self._rng).run(victims, within_s)
        await self._whole()
        load.stop()
        await running
        mine = self._jobs.accepted[known:]
        late = await self._jobs.ended(mine, PATIENCE_S)
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
            outcomes=collections.Counter(told.outcome for told in load.told),
            codes=collections.Counter(f"{told.status} {told.code}" for told in load.told if told.outcome != "answer"),
            jobs=mine,
            late=len(late),
            calls=len(calls),
            reached=len(set(calls)),
            asked=len(load.told) + len(mine),
        )

    async def _whole(self) -> None:
        """Until both gateways answer from every tier. Raises RuntimeError, with the logs' ends."""
        for url in self._bed.urls:
            ends = time.monotonic() + PATIENCE_S
            while fault := await self._fault(url):
                if time.monotonic() > ends:
                    raise RuntimeError(f"{url}: {fault}\n{self._bed.tails()}")
                await asyncio.sleep(TICK_S * 4)

    async def _fault(self, url: str) -> str:
        try:
            async with self._session.get(f"{url}/readyz") as reply:
                state = await reply.json()
        except (aiohttp.ClientError, ConnectionError) as error:
            return repr(error)
        return ", ".join(f"{name}: {tier['error']}" for name, tier in state["tiers"].items() if not tier["ready"])

    async def effects(self) -> list[str]:
        """What is wrong with the jobs of all rounds, when there was time for what deaths delayed."""
        jobs = self._jobs.accepted
        await self._jobs.ended([job for job in jobs if not job.status], PATIENCE_S)
        for job in jobs:
            await self._jobs.count_ends(job)
        ends = time.monotonic() + PATIENCE_S
        while time.monotonic() < ends and any(job.hooked and not self._hooks(job) for job in jobs):
            await asyncio.sleep(TICK_S)
        told = sum(len(self._hooks(job)) for job in jobs)
        print(f"jobs: {len(jobs)} accepted in {self._jobs.offers} offers, {sum(job.ends for job in jobs)} ends")
        print(f"webhooks: {sum(job.hooked for job in jobs)} wanted, {told} in {self._receiver.deliveries} deliveries")
        found = {
            "accepted jobs lost": sum(job.status != "succeeded" or job.tokens != TOKENS for job in jobs),
            "keys with several jobs": sum(len(job.ids) != 1 for job in jobs),
            "jobs whose events tell of several ends, or none": sum(job.ends != 1 for job in jobs),
            "jobs with several webhooks": sum(len(self._hooks(job)) > 1 for job in jobs),
            "webhooks that never came": sum(job.hooked and not self._hooks(job) for job in jobs),
            "webhooks that nobody asked for": sum(bool(self._hooks(job)) and not job.hooked for job in jobs),
        }
        return [f"{count} {what}" for what, count in found.items() if count]

    def _hooks(self, job: Accepted) -> set[str]:
        """The webhooks' ids that the receiver saw for it."""
        return set().union(*(self._receiver.told.get(each, set()) for each in job.ids))


def summary(rounds: list[Round]) -> str:
    kinds = ("answer", "refused", "broken", "connection", "none", "false")
    heads = ("round", "kills", "s", "streams", *kinds, "jobs", "late", "calls", "reached", "× calls")
    rows = []
    for one in rounds:
        outcomes = [one.outcomes[kind] for kind in kinds]
        figures = [len(one.jobs), one.late, one.calls, one.reached, f"{amplification([one]):.3f}"]
        rows.append([one.number, "+".join(one.kills), f"{one.took_s:.1f}", sum(outcomes), *outcomes, *figures])
    total = [sum(one.outcomes[kind] for one in rounds) for kind in kinds]
    sums = [sum(len(one.jobs) for one in rounds), sum(one.late for one in rounds)]
    sums += [sum(one.calls for one in rounds), sum(one.reached for one in rounds)]
    took = f"{sum(one.took_s for one in rounds):.0f}"
    rows.append(["all", "", took, sum(total), *total, *sums, f"{amplification(rounds):.3f}"])
    return table(heads, rows)


def amplification(rounds: list[Round]) -> float:
    return sum(one.calls for one in rounds) / max(1, sum(one.reached for one in rounds))


async def run(
    bed: Bed, plan: list[list[str]], seed: int, *, within_s: float, streams_per_s: float, jobs_per_s: float
) -> tuple[list[Round], list[str]]:
    """A round for each list of victims; and everything that was wrong."""
    rounds: list[Round] = []
    async with AsyncExitStack() as stack:
        receiver = await stack.enter_async_context(receiving())
        session = await stack.enter_async_context(aiohttp.ClientSession())
        matrix = Matrix(bed, session, receiver, seed)
        for number, victims in enumerate(plan, 1):
            rounds.append(
                await matrix.round(
                    number, victims, within_s=within_s, streams_per_s=streams_per_s, jobs_per_s=jobs_per_s
                )
            )
            print(summary(rounds[-1:]).splitlines()[1], flush=True)
        wrong = [what for one in rounds for what in one.wrong] + await matrix.effects()
        if amplification(rounds) > AMPLIFICATION:
            wrong.append(f"{amplification(rounds):.2f} calls a request")
        print("streams that were not answered:", dict(sum((one.codes for one in rounds), collections.Counter[str]())))
        print("offers of jobs refused while parts were away:", dict(matrix.refused))
    return rounds, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", choices=("journaled", "paced"), default="journaled", help="paced: long answers")
    parser.add_argument("--within-s", type=float, default=3.0, help="longest time between two kills")
    parser.add_argument("--streams-per-s", type=float, default=8.0)
    parser.add_argument("--jobs-per-s", type=float, default=2.0)
    told = parser.parse_args()
    rng = random.Random(told.seed)
    plan = [rng.sample(VICTIMS, len(VICTIMS)) for _ in range(told.rounds)]
    with standing(TIERS, model=told.model, pace=LONG, config=laddered(*TIERS)) as bed:
        rounds, wrong = asyncio.run(
            run(
                bed,
                plan,
                told.seed,
                within_s=told.within_s,
                streams_per_s=told.streams_per_s,
                jobs_per_s=told.jobs_per_s,
            )
        )
    print(summary(rounds))
    for what in wrong:
        print(f"WRONG: {what}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
