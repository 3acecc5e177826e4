"""A scripted model on the device that works with tools, and is strict about what comes back from them.

What it answers follows from the request alone: a turn of two calls, one that adds up both results, one that keeps the
sum, and then a text with all three. If a client or a server lost, changed or mixed up a result, the text would say so.
As strict vendors do, it notes histories whose call ids repeat, or whose calls lack a result.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from causeway_server.edge_node.backends.backend import BackendRequest
from causeway_server.router.types import Chunk, Message, Request, ToolCallDelta, Usage
from tests.edge_node.scripted import FAULTS, ScriptedEngine

CELSIUS: Mapping[str, int] = {"Paris": 21, "Rome": 25}
REPORT = {"city": "Paris", "celsius": 21}
TEXT = "Good day."
THOUGHT = "I need the weather of both cities."


class ToolUser(ScriptedEngine):
    """`faults`: what was wrong with the histories that it was given. The last text may name one of FAULTS."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self._made = 0

    async def _answer(self, call: BackendRequest) -> AsyncIterator[Chunk]:
        request = call.request
        self.faults += faults_of(request.messages)
        text = text_of(request.messages[-1]) if request.messages else ""
        self.fault = next((fault for fault in FAULTS if fault == text), "none")
        try:
            if self.fault != "none" or not request.messages:
                async for chunk in super()._answer(call):
                    yield chunk
                return
        finally:
            self.fault = "none"
        for chunk in self._chunks(request):
            yield chunk

    def _chunks(self, request: Request) -> Iterator[Chunk]:
        calls, text = plan(request)
        thinks = bool(request.reasoning_effort) and not results_of(request.messages)
        if thinks:
            yield from (Chunk(reasoning=piece, tokens=1) for piece in pieces(THOUGHT))
        yield from (Chunk(text=piece, tokens=1) for piece in pieces(text))
        for index, (name, arguments) in enumerate(calls):
            self._made += 1
            first, *rest = pieces(json.dumps(arguments)) or [""]
            begin = ToolCallDelta(index, first, f"call_{self._made}", name)
            yield Chunk(tool_calls=(begin,), tokens=1)
            yield from (Chunk(tool_calls=(ToolCallDelta(index, piece),), tokens=1) for piece in rest)
        yield Chunk(finish_reason="tool_calls" if calls else "stop")
        yield Chunk(usage=Usage(prompt_tokens=40, completion_tokens=10, cached_tokens=30))


Calls = Sequence[tuple[str, Mapping[str, object]]]


def plan(request: Request) -> tuple[Calls, str]:
    """Return the calls and the text of the next answer."""
    offered = {tool.name for tool in request.tools}
    results = results_of(request.messages)
    if "get_weather" in offered and request.tool_choice.mode != "none":
        if len(results) == 0:
            return [("get_weather", {"city": city}) for city in CELSIUS], "I ask."
        if len(results) == 2:
            return [("add", {"a": number(results[0]), "b": number(results[1])})], ""
        if len(results) == 3:
            return [("keep", {"sum": number(results[2])})], ""
        if len(offered) == 3:
            return (), report_of(results) if request.response_format is None else json.dumps(REPORT)
    outputs = offered - {"get_weather", "add", "keep"}
    if outputs and request.tool_choice.mode != "none" and not results[4:]:
        return [(min(outputs), REPORT)], ""
    return (), json.dumps(REPORT) if request.response_format is not None else TEXT


def report_of(results: Sequence[str]) -> str:
    paris, rome, total, kept = results[:4]
    return f"Paris {paris}, Rome {rome}, together {total}, {kept}."


def results_of(messages: Sequence[Message]) -> list[str]:
    """Return the results since the last words of the user."""
    asked = max((at for at, message in enumerate(messages) if message.role == "user"), default=0)
    return [text_of(message) for message in messages[asked:] if message.role == "tool"]


def number(result: str) -> int:
    """Return the number in a result; -1 if there is none."""
    digits = "".join(letter for letter in result if letter.isdigit())
    return int(digits) if digits else -1


def text_of(message: Message) -> str:
    content = message.content
    return content if isinstance(content, str) else "".join(getattr(part, "text", "") for part in content or ())


def pieces(text: str) -> list[str]:
    return [text[at : at + 7] for at in range(0, len(text), 7)]


def faults_of(messages: Sequence[Message]) -> list[str]:
    """Return what a strict vendor refuses about a history."""
    seen: set[str] = set()
    pending: set[str] = set()
    found = []
    for message in messages:
        if message.role == "tool":
            if message.tool_call_id not in pending:
                found.append(f"The result {message.tool_call_id} answers no call of the message before it.")
            pending.discard(message.tool_call_id or "")
            continue
        if pending:
            found.append(f"The calls {sorted(pending)} have no result.")
        ids = {call.id for call in message.tool_calls}
        if len(ids - seen) < len(message.tool_calls):
            found.append(f"A call id stands twice in {sorted(ids)}.")
        seen |= ids
        pending = ids
    return found
