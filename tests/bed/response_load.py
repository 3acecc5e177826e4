"""Stored responses under kills: chains, and responses in the background, whose events a client follows to their end."""

from __future__ import annotations

import asyncio
import collections
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from .client import body_of, new_mark

TURNS = 4  # of a chain
_PAUSE_S = 0.4
_TIMEOUT_S = 20.0
_ENDS = ("response.completed", "response.incomplete", "response.failed")
_BEGUN_AGAIN = "begins again"
_LOST = (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError)
Fields = dict[str, Any]


class ResponseLoad:
    """Sends one chain and one response in the background at a time, to gateways that share a store or to a device.

    A turn without its end is sent again. A follower whose connection breaks goes on with `starting_after`, anywhere.
    """

    def __init__(
        self, session: aiohttp.ClientSession, urls: tuple[str, ...], token: str, rng: random.Random, model: str
    ) -> None:
        self._session = session
        self._urls = urls
        self._headers = {"authorization": f"Bearer {token}"}
        self._rng = rng
        self._model = model
        self._texts = {url: asyncio.Event() for url in urls}
        self._chains: list[list[tuple[str, Fields]]] = []  # input and response of each turn that came to its end
        self._made: list[tuple[Fields, list[Fields]]] = []  # in the background: as it is stored, and its events
        self.counts: collections.Counter[str] = collections.Counter()
        self.faults: collections.Counter[str] = collections.Counter()

    async def run(self, stopped: asyncio.Event, tokens: int) -> None:
        """Ask until `stopped`; return when what was begun has ended."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._ask_in_chains(stopped, tokens))
            tasks.create_task(self._ask_in_background(stopped, tokens))

    async def middle(self, url: str) -> None:
        """Wait until a piece of an answer arrives from there."""
        self._texts[url].clear()
        await self._texts[url].wait()

    async def failures(self) -> list[str]:
        """Return what was lost, changed or doubled."""
        for chain in filter(None, self._chains):
            for _, response in chain:
                self.faults["turns that are not stored as their client has them"] += (
                    await self._read(f"/v1/responses/{response['id']}") != response
                )
            page = await self._read(f"/v1/responses/{chain[-1][1]['id']}/input_items?order=asc&limit=100")
            expected = [text for words, response in chain for text in (words, _text(response))][:-1]
            self.faults["chains with lost, repeated or moved items"] += [
                item["content"][0]["text"] for item in page["data"]
            ] != expected
        for stored, events in self._made:
            again = await self._read(f"/v1/responses/{stored['id']}")
            numbers = [event["sequence_number"] for event in events]
            pieces = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
            self.faults["responses in the background that changed"] += not stored == again == events[-1]["response"]
            self.faults["events that are missing or came twice"] += numbers != list(range(len(numbers)))
            self.faults["texts of events that are not the answer's"] += pieces != _text(stored)
        ids = [stored["id"] for stored, _ in self._made]
        self.faults["keys with the same response"] += len(ids) - len(set(ids))
        return [f"{count} {what}" for what, count in self.faults.items() if count]

    async def _ask_in_chains(self, stopped: asyncio.Event, tokens: int) -> None:
        while not stopped.is_set():
            chain: list[tuple[str, Fields]] = []
            self._chains.append(chain)
            while len(chain) < TURNS and not (chain and stopped.is_set()):
                body, words = self._body(tokens)
                body |= {"store": True, "stream": True, "previous_response_id": chain[-1][1]["id"] if chain else None}
                events = await self._events("POST", "/v1/responses", json=body)
                if events and events[-1]["type"] in _ENDS[:2]:
                    chain.append((words, events[-1]["response"]))
                self.counts["turns" if chain and chain[-1][0] == words else "turns cut or refused"] += 1
                await asyncio.sleep(_PAUSE_S)

    async def _ask_in_background(self, stopped: asyncio.Event, tokens: int) -> None:
        while not stopped.is_set():
            body, _ = self._body(tokens)
            options: Fields = {"json": body | {"background": True}, "headers": {"idempotency-key": new_mark()}}
            ids = {
                (await self._until("POST", "/v1/responses", **options))["id"] for _ in range(self._rng.choice((1, 2)))
            }
            self.faults["keys with several responses"] += len(ids) != 1
            path, events = f"/v1/responses/{min(ids)}", list[Fields]()
            while not events or events[-1]["type"] not in _ENDS:
                after = f"&starting_after={events[-1]['sequence_number']}" if events else ""
                events += await self._events("GET", f"{path}?stream=true{after}")
                if events and events[-1]["type"] == "error" and _BEGUN_AGAIN in events.pop()["error"]["message"]:
                    self.counts["followers that began again"] += 1
                    events.clear()
                await asyncio.sleep(_PAUSE_S)
            stored = await self._read(path)
            whole = stored["status"] in ("completed", "incomplete") and stored["usage"]["output_tokens"] == tokens
            self.faults[f"responses in the background that are {stored['status']}"] += not whole
            self._made.append((stored, events))
            self.counts["in the background"] += 1
            await asyncio.sleep(_PAUSE_S)

    def _body(self, tokens: int) -> tuple[Fields, str]:
        chat = body_of(new_mark(), self._model, tokens, stream=False)
        words = chat["messages"][0]["content"]
        return {"model": self._model, "input": words, "max_output_tokens": tokens, "ignore_eos": True}, words

    async def _events(self, method: str, path: str, **options: Any) -> list[Fields]:
        """Return the events that came before the end, or before the connection broke."""
        url, events = self._rng.choice(self._urls), list[Fields]()
        try:
            async with (
                asyncio.timeout(_TIMEOUT_S),
                self._session.request(method, url + path, headers=self._headers, **options) as reply,
            ):
                assert reply.status != 404, await reply.text()
                async for event in _read_events(reply):
                    events.append(event)
                    if "delta" in event:
                        self._texts[url].set()
        except _LOST:
            self.counts["streams broken"] += 1
        return events

    async def _read(self, path: str) -> Fields:
        return await self._until("GET", path)

    async def _until(self, method: str, path: str, **options: Any) -> Fields:
        """Send a request until it succeeds; what is not found is gone for good."""
        headers = self._headers | options.pop("headers", {})
        while True:
            try:
                async with (
                    asyncio.timeout(_TIMEOUT_S),
                    self._session.request(
                        method, self._rng.choice(self._urls) + path, headers=headers, **options
                    ) as reply,
                ):
                    found: Fields = await reply.json()
                    if reply.status == 200:
                        return found
                    assert reply.status != 404, found
            except _LOST:
                pass
            await asyncio.sleep(_PAUSE_S)


async def _read_events(reply: aiohttp.ClientResponse) -> AsyncIterator[Fields]:
    async for line in reply.content:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


def _text(response: Fields) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])
