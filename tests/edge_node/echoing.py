"""A cloud that repeats what it was asked, in pieces that cut anything."""

from __future__ import annotations

import json

from aiohttp import web

from .jobs.cloud import JobCloud
from .scripted import whole_answer

PIECE = 3  # characters of a piece


class EchoCloud(JobCloud):
    """Repeats the last message, or the prompt: as text, or as the argument `say` of the first tool that is offered."""

    @property
    def asked(self) -> str:
        """Everything that it was sent, in one text."""
        return json.dumps([self.bodies, list(self.effects)], ensure_ascii=False)

    def routes(self, app: web.Application) -> None:
        super().routes(app)
        for path in ("/tokenize", "/v1/tokenize"):
            app.router.add_post(path, self._tokenize)

    async def _tokenize(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        return web.json_response({"count": 3, "max_model_len": 100, "tokens": [1, 2, 3]})

    async def _answer(self, request: web.Request, body: dict[str, object]) -> web.StreamResponse:
        if request.path.endswith("/embeddings"):
            return await super()._answer(request, body)
        said = _last(body)
        tools = body.get("tools")
        if not body.get("stream"):
            return web.json_response(_whole(body, said))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if isinstance(tools, list):
            written = _arguments(said)
            first = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
            deltas: list[dict[str, object]] = [{"tool_calls": [first]}]
            deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in _pieces(written)]
        else:
            deltas = [{"content": piece} for piece in _pieces(said)]
        for delta in deltas:
            await response.write(_event(request, delta))
        await response.write(_event(request, {}, "tool_calls" if tools else "stop") + b"data: [DONE]\n\n")
        return response

    def view(self, key: str) -> dict[str, object]:
        found = super().view(key)
        return found | {"result": whole_answer(self._jobs[key][1])} if found["result"] else found


def _last(body: dict[str, object]) -> str:
    messages = body.get("messages")
    if not isinstance(messages, list):
        prompt = body["prompt"]
        return str(prompt[0] if isinstance(prompt, list) else prompt)
    content = messages[-1]["content"]
    return content if isinstance(content, str) else "\n".join(part.get("text", "") for part in content)


def _arguments(said: str) -> str:
    """As a server in Go writes JSON."""
    return json.dumps({"say": said}).replace("<", "\\u003c").replace(">", "\\u003e")


def _whole(body: dict[str, object], said: str) -> dict[str, object]:
    answer = whole_answer(said)
    choice: dict[str, object] = answer["choices"][0]  # type: ignore[index]
    if "messages" not in body:
        choice["text"] = said
        del choice["message"]
    if body.get("tools"):
        call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": _arguments(said)}}
        choice |= {
            "message": {"role": "assistant", "content": None, "tool_calls": [call]},
            "finish_reason": "tool_calls",
        }
    return answer


def _pieces(text: str) -> list[str]:
    return [text[at : at + PIECE] for at in range(0, len(text), PIECE)]


def _event(request: web.Request, delta: dict[str, object], finish: str | None = None) -> bytes:
    choice: dict[str, object] = {"index": 0, "delta": delta, "finish_reason": finish}
    if request.path.endswith("/v1/completions"):
        choice = {"index": 0, "text": delta.get("content", ""), "finish_reason": finish}
    return b"data: " + json.dumps({"id": "x", "choices": [choice]}).encode() + b"\n\n"
