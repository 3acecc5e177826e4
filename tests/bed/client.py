"""A client that sends one streamed request and classifies its outcome. It never retries."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from typing import Any, Literal

import aiohttp
import msgspec

CLIENT_TIMEOUT = 2.0
"""A request without an answer or an error for so many of its deadlines is unresolved."""
Outcome = Literal["answer", "rejected", "broken", "connection", "unresolved", "invalid"]
_marks = itertools.count(1)


class RequestResult(msgspec.Struct, kw_only=True):
    """The result of one request.

    answer      complete: finish_reason and [DONE], as many tokens as requested, or marked degraded
    rejected    an error object with its status
    broken      an error event or the end of the connection within the stream, and no finish_reason
    connection  no HTTP answer at all
    unresolved  nothing for two deadlines
    invalid     the stream claimed to be complete and was not, or it ended twice: a fault of the gateway
    """

    mark: str
    profile: str  # name of the load profile
    sent_at: float  # monotonic, s
    outcome: Outcome = "unresolved"
    status: int = 0
    code: str = ""
    tier: str = ""
    degraded: bool = False
    retry_after: str = ""
    ttft_s: float = 0.0  # 0: there was no token
    ended_at: float = 0.0
    device: int = 0  # number of the device in its load profile


def new_mark() -> str:
    return str(next(_marks))


def body_of(mark: str, tier: str, tokens: int, *, stream: bool = True) -> dict[str, Any]:
    """Return a body whose only valid end is `length` after `tokens` tokens."""
    body = {
        "model": tier,
        "messages": [{"role": "user", "content": f"turn on the light qz{mark}qz"}],
        "max_tokens": tokens,
        "ignore_eos": True,
    }
    return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


async def send(
    session: aiohttp.ClientSession,
    url: str,
    *,
    profile: str,
    tier: str,
    token: str,
    tokens: int,
    priority: str = "interactive",
    deadline_ms: int = 10_000,
) -> RequestResult:
    """Send one streamed chat completion; errors become the outcome."""
    result = RequestResult(mark=new_mark(), profile=profile, sent_at=time.monotonic())
    headers = {
        "authorization": f"Bearer {token}",
        "x-causeway-priority": priority,
        "x-causeway-deadline-ms": str(deadline_ms),
    }
    try:
        async with asyncio.timeout(CLIENT_TIMEOUT * deadline_ms / 1000):
            async with session.post(
                f"{url}/v1/chat/completions", json=body_of(result.mark, tier, tokens), headers=headers
            ) as reply:
                result.status = reply.status
                result.tier = reply.headers.get("x-causeway-tier", "")
                result.degraded = "x-causeway-degraded" in reply.headers
                result.retry_after = reply.headers.get("retry-after", "")
                if reply.status != 200:
                    result.code = json.loads(await reply.read())["error"]["code"]
                    result.outcome = "rejected"
                else:
                    result.outcome = "broken"
                    await _read_stream(reply, result, tokens)
    except (aiohttp.ClientError, ConnectionError) as error:
        result.outcome = "broken" if result.status else "connection"
        result.code = result.code or type(error).__name__
    except TimeoutError:
        result.outcome = "unresolved"
    result.ended_at = time.monotonic()
    return result


async def _read_stream(reply: aiohttp.ClientResponse, result: RequestResult, tokens: int) -> None:
    reasons: list[str] = []
    made, done, error_code = 0, False, ""
    async for line in reply.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
            continue
        event = json.loads(data)
        if "error" in event:
            error_code = event["error"]["code"]
            continue
        for choice in event["choices"]:
            if choice["delta"].get("content") and not result.ttft_s:
                result.ttft_s = time.monotonic() - result.sent_at
            if choice["finish_reason"]:
                reasons.append(choice["finish_reason"])
        if event.get("usage"):
            made = event["usage"]["completion_tokens"]
    result.code = error_code
    result.outcome = _outcome_of(reasons, made, done, error_code, tokens, result.degraded)


def _outcome_of(reasons: list[str], made: int, done: bool, error_code: str, tokens: int, degraded: bool) -> Outcome:
    if not reasons:
        return "invalid" if done and not error_code else "broken"
    if error_code or len(reasons) > 1 or reasons[0] == "stop":
        return "invalid"
    if not done:
        return "broken"
    return "answer" if made == tokens or degraded else "invalid"
