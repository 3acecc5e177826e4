"""A client that asks for streams and says, of each, what became of it. It never asks twice."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import Any, Literal

import aiohttp
import msgspec

CLIENT_S = 20.0
"""No answer and no error for so long: the request has no outcome."""
Outcome = Literal["answer", "refused", "broken", "connection", "none", "false"]
_marks = itertools.count(1)


class Told(msgspec.Struct, kw_only=True):
    """One request's outcome.

    answer      whole: finish_reason and [DONE], as many tokens as were asked for, or marked degraded
    refused     an error object with its status
    broken      an error event or the end of the connection within the stream, and no finish_reason
    connection  no HTTP answer at all
    none        nothing for CLIENT_S
    false       it said that it had ended and had not, or it ended twice: a fault of ours
    """

    mark: str
    kind: str  # who asked, for the figures
    asked_at: float  # monotonic, s
    outcome: Outcome = "none"
    status: int = 0
    code: str = ""
    tier: str = ""
    degraded: bool = False
    retry_after: str = ""
    ttft_s: float = 0.0  # 0: there was no token
    ended_at: float = 0.0
    device: int = 0  # of those who ask for this kind


def new_mark() -> str:
    return str(next(_marks))


def body_of(mark: str, tier: str, tokens: int, *, stream: bool = True) -> dict[str, Any]:
    """The only true end of it is `length` after `tokens`."""
    asked = {
        "model": tier,
        "messages": [{"role": "user", "content": f"turn on the light qz{mark}qz"}],
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    return asked | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    *,
    kind: str,
    tier: str,
    token: str,
    tokens: int,
    priority: str = "interactive",
    deadline_ms: int = 10_000,
) -> Told:
    told = Told(mark=new_mark(), kind=kind, asked_at=time.monotonic())
    headers = {
        "authorization": f"Bearer {token}",
        "x-causeway-priority": priority,
        "x-causeway-deadline-ms": str(deadline_ms),
    }
    try:
        async with asyncio.timeout(CLIENT_S):
            async with session.post(
                f"{url}/v1/chat/completions", json=body_of(told.mark, tier, tokens), headers=headers
            ) as reply:
                told.status = reply.status
                told.tier = reply.headers.get("x-causeway-tier", "")
                told.degraded = "x-causeway-degraded" in reply.headers
                told.retry_after = reply.headers.get("retry-after", "")
                if reply.status != 200:
                    told.code = json.loads(await reply.read())["error"]["code"]
                    told.outcome = "refused"
                else:
                    told.outcome = "broken"
                    await _stream(reply, told, tokens)
    except (aiohttp.ClientError, ConnectionError) as error:
        told.outcome = "broken" if told.status else "connection"
        told.code = told.code or type(error).__name__
    except TimeoutError:
        told.outcome = "none"
    told.ended_at = time.monotonic()
    return told


async def _stream(reply: aiohttp.ClientResponse, told: Told, tokens: int) -> None:
    reasons: list[str] = []
    made, done, fault = 0, False, ""
    async for line in reply.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            continue
        event = json.loads(data)
        if "error" in event:
            fault = event["error"]["code"]
            continue
        for choice in event["choices"]:
            if choice["delta"].get("content") and not told.ttft_s:
                told.ttft_s = time.monotonic() - told.asked_at
            if choice["finish_reason"]:
                reasons.append(choice["finish_reason"])
        if event.get("usage"):
            made = event["usage"]["completion_tokens"]
    told.code = fault
    told.outcome = _judged(reasons, made, done, fault, tokens, told.degraded)


def _judged(reasons: list[str], made: int, done: bool, fault: str, tokens: int, degraded: bool) -> Outcome:
    if not reasons:
        return "false" if done and not fault else "broken"
    if fault or len(reasons) > 1 or reasons[0] == "stop":
        return "false"
    if not done:
        return "broken"
    return "answer" if made == tokens or degraded else "false"
