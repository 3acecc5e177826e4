"""Batches and their output: which were accepted, and whether each has every line once."""

from __future__ import annotations

import asyncio
import collections
import json
import random
from typing import Any

import aiohttp
import msgspec

from .client import body_of, new_mark

LINES = 12
_PAUSE_S = 0.3
_TIMEOUT_S = 10.0
_ENDS = ("completed", "failed", "expired", "cancelled")


class AcceptedBatch(msgspec.Struct):
    """What one Idempotency-Key led to."""

    custom_ids: list[str]
    ids: set[str] = msgspec.field(default_factory=set)  # of every 200 answer for the key
    status: str = ""
    output: str = ""


class BatchLoad:
    """Uploads files and creates batches of them, under one key until a gateway accepts."""

    def __init__(self, session: aiohttp.ClientSession, urls: tuple[str, ...], token: str, rng: random.Random) -> None:
        self._session = session
        self._urls = urls
        self._headers = {"authorization": f"Bearer {token}"}
        self._rng = rng
        self.accepted: list[AcceptedBatch] = []
        self.rejected: collections.Counter[str] = collections.Counter()

    async def submit(self, tier: str, tokens: int) -> None:
        """Submit a batch until it is accepted. A file of which no answer arrived is uploaded once more."""
        marks = [new_mark() for _ in range(LINES)]
        rows = [
            {
                "custom_id": mark,
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body_of(mark, tier, tokens, stream=False),
            }
            for mark in marks
        ]
        content = "\n".join(map(json.dumps, rows))
        file = await self._until_accepted("/v1/files", lambda: {"data": _form(content)}, "id")
        batch = AcceptedBatch(marks)
        body = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        headers = {"idempotency-key": f"batch-{marks[0]}"}
        batch.ids.add(await self._until_accepted("/v1/batches", lambda: {"json": body, "headers": headers}, "id"))
        self.accepted.append(batch)

    async def failures(self, timeout_s: float) -> list[str]:
        """Wait for the ends of all batches and return what is wrong with them."""
        await self._wait_for_ends(timeout_s)
        found = collections.Counter[str]()
        for batch in self.accepted:
            if batch.status != "completed":
                found[f"batches that are {batch.status or 'unfinished'}"] += 1
                continue
            lines = [json.loads(line)["custom_id"] for line in (await self._content(batch.output)).splitlines()]
            found["batches with missing, repeated or moved lines"] += lines != batch.custom_ids
        return [f"{count} {what}" for what, count in found.items() if count]

    async def _wait_for_ends(self, timeout_s: float) -> None:
        waiting = list(self.accepted)
        try:
            async with asyncio.timeout(timeout_s):
                while waiting:
                    waiting = [batch for batch in waiting if not await self._has_ended(batch)]
                    await asyncio.sleep(_PAUSE_S)
        except TimeoutError:
            pass

    async def _has_ended(self, batch: AcceptedBatch) -> bool:
        status, view = await self._request("GET", f"/v1/batches/{min(batch.ids)}")
        if status != 200:
            return False
        batch.status, batch.output = view["status"], view["output_file_id"] or ""
        return batch.status in _ENDS

    async def _content(self, file: str) -> str:
        while True:
            try:
                async with self._session.get(
                    f"{self._rng.choice(self._urls)}/v1/files/{file}/content", headers=self._headers
                ) as reply:
                    if reply.status == 200:
                        return await reply.text()
            except (aiohttp.ClientError, ConnectionError):
                pass
            await asyncio.sleep(_PAUSE_S)

    async def _until_accepted(self, path: str, options: Any, field: str) -> str:
        while True:
            status, answer = await self._request("POST", path, **options())
            if status == 200:
                return str(answer[field])
            self.rejected[f"{status} {answer.get('error', {}).get('code', '')}"] += 1
            await asyncio.sleep(_PAUSE_S)

    async def _request(self, method: str, path: str, **options: Any) -> tuple[int, dict[str, Any]]:
        """Return the status and the body; (0, {}) where there is no answer."""
        headers = self._headers | options.pop("headers", {})
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                async with self._session.request(
                    method, self._rng.choice(self._urls) + path, headers=headers, **options
                ) as reply:
                    return reply.status, await reply.json()
        except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError):
            return 0, {}


def _form(content: str) -> aiohttp.FormData:
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", content, filename="lines.jsonl")
    return form
