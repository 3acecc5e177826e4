"""A scripted model behind an OpenAI-compatible server: it knows the weather of two cities, and it is strict.

What it answers follows from the request alone, so a client may stream, repeat and interleave: a hand-over first, then
both calls of `get_weather` in one message, then the report in the form that the request asks for (a call of the
client's output tool, JSON, or text). As strict vendors do, it refuses histories whose call ids repeat or lack a result.
"""

from __future__ import annotations

import asyncio
import json
import threading
from types import TracebackType
from typing import Any, Self

from aiohttp import web

REPORT = {"city": "Paris", "celsius": 21}
TEXT = "Paris has 21 degrees, Rome has 25."
CALLS = [("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"})]
USAGE = {"prompt_tokens": 40, "completion_tokens": 10, "total_tokens": 50}


class ScriptedServer:
    """The server, in a thread of its own. `refusals`: what was wrong with each request that got a 400."""

    def __init__(self) -> None:
        self.port = 0
        self.refusals: list[str] = []
        self._answers = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _start(self) -> None:
        self._runner = web.AppRunner(self._app())
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.port = int(self._runner.addresses[0][1])

    def _app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._complete)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "scripted", "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if wrong := fault_of(body["messages"]):
            self.refusals.append(wrong)
            return web.json_response({"error": {"message": wrong, "type": "invalid_request_error"}}, status=400)
        self._answers += 1
        message = answer(body, f"call_{self._answers}")
        head = {"id": f"chatcmpl-{self._answers}", "created": 1, "model": "scripted"}
        finish = "tool_calls" if "tool_calls" in message else "stop"
        if body.get("stream"):
            return await self._stream(request, body, head, message, finish)
        choice = {"index": 0, "message": {"role": "assistant", "content": None} | message, "finish_reason": finish}
        return web.json_response({**head, "object": "chat.completion", "choices": [choice], "usage": USAGE})

    async def _stream(
        self, request: web.Request, body: dict[str, Any], head: dict[str, Any], message: dict[str, Any], finish: str
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        head = head | {"object": "chat.completion.chunk"}
        for delta in deltas(message):
            await _send(response, {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        await _send(response, {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            await _send(response, {**head, "choices": [], "usage": USAGE})
        await response.write(b"data: [DONE]\n\n")
        return response


def fault_of(messages: list[dict[str, Any]]) -> str:
    """Return what a strict vendor refuses about a history, or an empty string."""
    seen: set[str] = set()
    pending: set[str] = set()
    for message in messages:
        if message["role"] == "tool":
            if message["tool_call_id"] not in pending:
                return f"The result {message['tool_call_id']} answers no call of the message before it."
            pending.remove(message["tool_call_id"])
            continue
        if pending:
            return f"The calls {sorted(pending)} have no result."
        ids = [call["id"] for call in message.get("tool_calls") or ()]
        if len({*ids} - seen) < len(ids):
            return f"A call id stands twice in {ids}."
        seen |= {*ids}
        pending = {*ids}
    return f"The calls {sorted(pending)} have no result." if pending else ""


def answer(body: dict[str, Any], call_id: str) -> dict[str, Any]:
    """Return the assistant's message; its calls have ids that begin with `call_id`."""
    messages = body["messages"]
    asked = max(at for at, message in enumerate(messages) if message["role"] == "user")
    called = {call["function"]["name"] for one in messages[asked:] for call in one.get("tool_calls") or ()}
    offered = [tool["function"]["name"] for tool in body.get("tools") or ()]
    for name in offered:
        if name.startswith("transfer_to_") and name not in called:
            return _calls([(name, {})], call_id)
    if "get_weather" in offered and "get_weather" not in called:
        return _calls(CALLS, call_id)
    if outputs := [name for name in offered if name != "get_weather" and not name.startswith("transfer_to_")]:
        return _calls([(outputs[0], REPORT)], call_id)
    words = json.dumps(messages).lower()
    if body.get("response_format", {}).get("type", "text") != "text" or "schema" in words:
        data = json.dumps(REPORT)
        return {"content": f"```json\n{data}\n```" if "```json" in words or "codeblock" in words else data}
    return {"content": TEXT}


def deltas(message: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a message in pieces, as vendors stream it: a call's id and name once, its arguments bit by bit."""
    pieces: list[dict[str, Any]] = [{"role": "assistant", "content": None if "tool_calls" in message else ""}]
    text = message.get("content") or ""
    pieces += [{"content": text[at : at + 7]} for at in range(0, len(text), 7)]
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        begin = {"index": index, "id": call["id"], "type": "function"}
        pieces.append({"tool_calls": [begin | {"function": {"name": function["name"], "arguments": ""}}]})
        for at in range(0, len(function["arguments"]), 7):
            bit = {"index": index, "function": {"arguments": function["arguments"][at : at + 7]}}
            pieces.append({"tool_calls": [bit]})
    return pieces


def _calls(calls: list[tuple[str, dict[str, Any]]], call_id: str) -> dict[str, Any]:
    return {
        "tool_calls": [
            {
                "id": f"{call_id}_{number}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for number, (name, arguments) in enumerate(calls)
        ]
    }


async def _send(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")
