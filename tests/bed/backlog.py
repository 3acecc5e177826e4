"""Jobs beside interactive load: a backlog that workers run, and what it does to first tokens."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping

import aiohttp

from .bed import Bed
from .client import body_of, new_mark
from .figures import table

MAX_SLOWDOWN = 1.3
_CLIENTS = 32
_IDLE_S = 10.0
_SETTLE_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=0, help="workers, which run the backlog")
    parser.add_argument("--backlog", type=int, default=0, help="jobs; the load is measured without them, then with")


class Backlog:
    """Jobs of a tenant of their own."""

    def __init__(self, session: aiohttp.ClientSession, bed: Bed, count: int, *, tokens: int = 4) -> None:
        self._session = session
        self._bed = bed
        self._left = count
        self._tokens = tokens
        self._tier = bed.replicas[0].tier
        self._headers = {"authorization": f"Bearer {bed.token('batch')}"}
        self._marks: set[str] = set()

    async def submit(self) -> None:
        """Submit all jobs, then measure how fast workers run them while nothing else does."""
        began = time.monotonic()
        count = self._left
        async with asyncio.TaskGroup() as tasks:
            for number in range(_CLIENTS):
                tasks.create_task(self._client(self._bed.urls[number % len(self._bed.urls)]))
        print(f"{count} jobs accepted in {time.monotonic() - began:.1f} s")
        await asyncio.sleep(_SETTLE_S)
        before, began = self.started, time.monotonic()
        await asyncio.sleep(_IDLE_S)
        print(f"idle, the workers ran {(self.started - before) / (time.monotonic() - began):.1f} jobs/s")

    @property
    def started(self) -> int:
        """Jobs that reached a model."""
        called = {mark for replica in self._bed.replicas for mark in replica.calls()}
        return len(called & self._marks)

    def compare(self, without: Mapping[str, float], beside: Mapping[str, float], started: int) -> list[str]:
        """Print the 99th percentiles to the first token without jobs and beside them, and return the failed checks.

        Args:
            without: by the name of the load, ms
            beside: the same beside jobs
            started: jobs that had reached a model before that load
        """
        ratios = {name: beside[name] / ms for name, ms in without.items()}
        rows = [(name, f"{without[name]:.0f}", f"{beside[name]:.0f}", f"{ratio:.2f}") for name, ratio in ratios.items()]
        print(table(("p99 to the first token", "without jobs, ms", "with jobs", "ratio"), rows))
        run, left = self.started - started, len(self._marks) - self.started
        print(f"{run} jobs ran beside the load, {left} are left")
        failures = [
            f"beside jobs the {name} p99 to the first token is {ratio:.2f} times that without"
            for name, ratio in ratios.items()
            if ratio > MAX_SLOWDOWN
        ]
        return (
            failures + ([] if run else ["no job ran beside the load"]) + ([] if left else ["the backlog was too short"])
        )

    async def _client(self, url: str) -> None:
        while self._left > 0:
            self._left -= 1
            mark = new_mark()
            self._marks.add(mark)
            body = body_of(mark, self._tier, self._tokens, stream=False)
            async with self._session.post(f"{url}/v1/jobs", json=body, headers=self._headers) as reply:
                if reply.status != 202:
                    raise RuntimeError(f"a job was refused: {reply.status} {await reply.text()}")
