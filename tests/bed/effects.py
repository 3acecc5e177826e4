"""Jobs, and everything that they do to the outside: what was accepted, what ended, what a receiver was told."""

from __future__ import annotations

import asyncio
import collections
import random
from typing import Any

import aiohttp
import msgspec

from tests.jobs.webhook_receiver import Receiver

from .asking import body_of, new_mark

REQUEST_S = 10.0
PAUSE_S = 0.2
_ENDS = ("succeeded", "failed", "dead", "cancelled", "expired")


class Accepted(msgspec.Struct):
    """What one Idempotency-Key led to."""

    key: str
    mark: str
    hooked: bool
    ids: set[str] = msgspec.field(default_factory=set)  # of every 202 that came back for it
    status: str = ""  # how it ended
    ends: int = 0  # how often its events say so
    tokens: int = 0


class Jobs:
    """Offers jobs through whichever gateway answers, again and again under one key until one says 202."""

    def __init__(
        self, session: aiohttp.ClientSession, urls: tuple[str, ...], token: str, receiver: Receiver, rng: random.Random
    ) -> None:
        self._session = session
        self._urls = urls
        self._headers = {"authorization": f"Bearer {token}"}
        self._receiver = receiver
        self._rng = rng
        self.accepted: list[Accepted] = []
        self.offers = 0
        self.refused: collections.Counter[str] = collections.Counter()

    async def offer(self, tier: str, tokens: int) -> None:
        """Returns when it is accepted. Now and then it is offered once more, as by a client that heard nothing."""
        mark = new_mark()
        job = Accepted(f"key-{mark}", mark, self._rng.random() < 0.5)
        body = body_of(mark, tier, tokens, stream=False)
        if job.hooked:
            body["webhook"] = f"http://127.0.0.1:{self._receiver.port}/"
        again = self._rng.random() < 0.2
        while not await self._offered(job, body):
            await asyncio.sleep(PAUSE_S)
        self.accepted.append(job)
        while again and not await self._offered(job, body):
            await asyncio.sleep(PAUSE_S)

    async def _offered(self, job: Accepted, body: dict[str, Any]) -> bool:
        self.offers += 1
        status, answer = await self._asked("POST", "/v1/jobs", json=body, headers={"idempotency-key": job.key})
        if status != 202:
            self.refused[f"{status} {answer.get('error', {}).get('code', '')}"] += 1
            return False
        job.ids.add(answer["id"])
        return True

    async def ended(self, jobs: list[Accepted], patience_s: float) -> list[Accepted]:
        """Those of `jobs` that are lost: gone, or without an end when the time is over."""
        waiting = list(jobs)
        try:
            async with asyncio.timeout(patience_s):
                while waiting:
                    waiting = [job for job in waiting if not await self._has_ended(job)]
                    await asyncio.sleep(PAUSE_S)
        except TimeoutError:
            pass
        return waiting

    async def _has_ended(self, job: Accepted) -> bool:
        status, view = await self._asked("GET", f"/v1/jobs/{min(job.ids)}")
        if status != 200 or view["status"] not in _ENDS:
            return False
        job.status = view["status"]
        if view["result"]:
            job.tokens = view["result"]["usage"]["completion_tokens"]
        return True

    async def count_ends(self, job: Accepted) -> None:
        """How often the job's events tell of an end."""
        for url in self._urls:
            job.ends = 0
            try:
                async with asyncio.timeout(REQUEST_S):
                    async with self._session.get(
                        f"{url}/v1/jobs/{min(job.ids)}/events", headers=self._headers
                    ) as reply:
                        async for line in reply.content:
                            job.ends += line.startswith(b"event:") and line[6:].strip().decode() in _ENDS
                return
            except (aiohttp.ClientError, ConnectionError, TimeoutError):
                continue

    async def _asked(self, method: str, path: str, **more: Any) -> tuple[int, dict[str, Any]]:
        """(0, {}) where there is no answer."""
        headers = self._headers | more.pop("headers", {})
        url = self._rng.choice(self._urls) + path
        try:
            async with asyncio.timeout(REQUEST_S):
                async with self._session.request(method, url, headers=headers, **more) as reply:
                    return reply.status, await reply.json()
        except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError):
            return 0, {}
