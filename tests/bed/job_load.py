"""Jobs and all their effects: which were accepted, how each ended, and which webhooks arrived."""

from __future__ import annotations

import asyncio
import collections
import random
from typing import Any

import aiohttp
import msgspec

from tests.cloud_pool.jobs.webhook_receiver import Receiver

from .client import body_of, new_mark

REQUEST_TIMEOUT_S = 10.0
PAUSE_S = 0.2
_ENDS = ("succeeded", "failed", "dead", "cancelled", "expired")


class AcceptedJob(msgspec.Struct):
    """What one Idempotency-Key led to."""

    key: str
    mark: str
    has_webhook: bool
    ids: set[str] = msgspec.field(default_factory=set)  # of every 202 answer for the key
    status: str = ""  # its final one
    ends: int = 0  # end events in its event stream
    tokens: int = 0


class JobLoad:
    """Submits jobs to any gateway, again and again under one key until a gateway answers 202."""

    def __init__(
        self, session: aiohttp.ClientSession, urls: tuple[str, ...], token: str, receiver: Receiver, rng: random.Random
    ) -> None:
        self._session = session
        self._urls = urls
        self._headers = {"authorization": f"Bearer {token}"}
        self._receiver = receiver
        self._rng = rng
        self.accepted: list[AcceptedJob] = []
        self.submissions = 0
        self.rejected: collections.Counter[str] = collections.Counter()

    async def submit(self, tier: str, tokens: int) -> None:
        """Submit a job until it is accepted; one in five once more, as by a client that lost the answer."""
        mark = new_mark()
        job = AcceptedJob(f"key-{mark}", mark, self._rng.random() < 0.5)
        body = body_of(mark, tier, tokens, stream=False)
        if job.has_webhook:
            body["webhook"] = f"http://127.0.0.1:{self._receiver.port}/"
        again = self._rng.random() < 0.2
        while not await self._is_accepted(job, body):
            await asyncio.sleep(PAUSE_S)
        self.accepted.append(job)
        while again and not await self._is_accepted(job, body):
            await asyncio.sleep(PAUSE_S)

    async def _is_accepted(self, job: AcceptedJob, body: dict[str, Any]) -> bool:
        self.submissions += 1
        status, answer = await self._request("POST", "/v1/jobs", json=body, headers={"idempotency-key": job.key})
        if status != 202:
            self.rejected[f"{status} {answer.get('error', {}).get('code', '')}"] += 1
            return False
        job.ids.add(answer["id"])
        return True

    async def wait_for_ends(self, jobs: list[AcceptedJob], timeout_s: float) -> list[AcceptedJob]:
        """Return those of `jobs` that are missing or without an end after `timeout_s`."""
        waiting = list(jobs)
        try:
            async with asyncio.timeout(timeout_s):
                while waiting:
                    waiting = [job for job in waiting if not await self._has_ended(job)]
                    await asyncio.sleep(PAUSE_S)
        except TimeoutError:
            pass
        return waiting

    async def _has_ended(self, job: AcceptedJob) -> bool:
        status, view = await self._request("GET", f"/v1/jobs/{min(job.ids)}")
        if status != 200 or view["status"] not in _ENDS:
            return False
        job.status = view["status"]
        if view["result"]:
            job.tokens = view["result"]["usage"]["completion_tokens"]
        return True

    async def is_known(self, job: AcceptedJob) -> bool:
        """Return whether a gateway knows the job; waits until one says so or denies it."""
        while (status := (await self._request("GET", f"/v1/jobs/{min(job.ids)}"))[0]) not in (200, 404):
            await asyncio.sleep(PAUSE_S)
        return status == 200

    async def count_ends(self, job: AcceptedJob) -> None:
        """Count the end events in the job's event stream."""
        for url in self._urls:
            job.ends = 0
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    async with self._session.get(
                        f"{url}/v1/jobs/{min(job.ids)}/events", headers=self._headers
                    ) as reply:
                        async for line in reply.content:
                            job.ends += line.startswith(b"event:") and line[6:].strip().decode() in _ENDS
                return
            except (aiohttp.ClientError, ConnectionError, TimeoutError):
                continue

    async def _request(self, method: str, path: str, **options: Any) -> tuple[int, dict[str, Any]]:
        """Return the status and the body; (0, {}) where there is no answer."""
        headers = self._headers | options.pop("headers", {})
        url = self._rng.choice(self._urls) + path
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                async with self._session.request(method, url, headers=headers, **options) as reply:
                    return reply.status, await reply.json()
        except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError):
            return 0, {}
