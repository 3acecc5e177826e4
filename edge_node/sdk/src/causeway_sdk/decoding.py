"""Decoding of response bytes to answers. Unknown or malformed fields become empty values; no I/O."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import httpx

from .answers import Answer, Choice, Chunk, Decision, Embeddings, Job, Model, ToolCall, ToolCallDelta, Usage
from .errors import CausewayAPIError
from .request import JSON


def decode_document(response: httpx.Response) -> JSON:
    """Return the JSON object of a response whose body was read.

    Raises CausewayAPIError for anything else: a portal's page, for example, is not an answer.
    """
    document = _parse(response.content)
    if document is None:
        raise decode_error(response)
    return document


def decode_json(body: bytes | str) -> JSON:
    """Return a JSON object, or an empty one for anything else."""
    return _parse(body) or {}


def _parse(body: bytes | str) -> JSON | None:
    try:
        value = json.loads(body)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def decode_decision(headers: httpx.Headers) -> Decision:
    return Decision(
        id=headers.get("x-causeway-decision", ""),
        route=headers.get("x-causeway-route", ""),
        target=headers.get("x-causeway-target", ""),
        reason=headers.get("x-causeway-reason", ""),
        cache=headers.get("x-causeway-cache", ""),
        cache_reason=headers.get("x-causeway-cache-reason", ""),
        policy=headers.get("x-causeway-policy", ""),
        degraded=headers.get("x-causeway-degraded", "").lower() in ("1", "true", "yes"),
    )


def decode_error(response: httpx.Response) -> CausewayAPIError:
    """Return the error of a response that is not a success, or not the device's, whose body was read."""
    error = _dict(decode_json(response.content).get("error"))
    body_start = response.content[:200].decode("utf-8", "replace")
    message = _text(error.get("message")) or f"HTTP {response.status_code}: {body_start}"
    return _api_error(error, message, response.status_code, response.headers)


def decode_answer(response: httpx.Response, total_s: float) -> Answer:
    return _answer(decode_document(response), decode_decision(response.headers), total_s)


def decode_job(document: JSON) -> Job:
    """Return a job of the device or of the gateway."""
    result, error = _dict(document.get("result")), _dict(document.get("error"))
    route, decision = _text(document.get("route")), _text(document.get("decision"))
    attempts = document.get("attempts")
    return Job(
        id=_text(document.get("id")),
        status=_text(document.get("status")),
        answer=_answer(result, Decision(id=decision, route=route, cache=_text(document.get("cache"))))
        if result
        else None,
        error=_text(error.get("message")),
        code=_text(error.get("code")),
        attempts=attempts if isinstance(attempts, int) else 0,
        webhook=_text(document.get("webhook")),
        webhook_status=_text(document.get("webhook_status")),
    )


def decode_jobs(response: httpx.Response) -> list[Job]:
    return [decode_job(_dict(row)) for row in _list(decode_document(response).get("data"))]


def _answer(document: JSON, decision: Decision, total_s: float = 0.0) -> Answer:
    return Answer(
        decision=decision,
        choices=tuple(_choice(_dict(choice)) for choice in _list(document.get("choices"))),
        usage=_usage(document.get("usage")) or Usage(),
        model=_text(document.get("model")),
        total_ms=total_s * 1000,
    )


def decode_embeddings(response: httpx.Response) -> Embeddings:
    document = decode_document(response)
    rows = [_list(_dict(row).get("embedding")) for row in _list(document.get("data"))]
    return Embeddings(
        vectors=tuple(tuple(float(x) for x in row if isinstance(x, (int, float))) for row in rows),
        decision=decode_decision(response.headers),
        usage=_usage(document.get("usage")) or Usage(),
        model=_text(document.get("model")),
    )


def decode_models(response: httpx.Response) -> list[Model]:
    rows = [_dict(row) for row in _list(decode_document(response).get("data"))]
    return [Model(_text(row.get("id")), _text(row.get("owned_by"))) for row in rows]


class StreamDecoder:
    """Decodes server-sent events to chunks, and to the answer that the chunks add up to."""

    def __init__(self, response: httpx.Response, started: float, clock: Callable[[], float]) -> None:
        """Create a decoder. `started` is the call's time on `clock`, in seconds."""
        self.decision = decode_decision(response.headers)
        self.done = False  # whether the closing [DONE] event has arrived
        self._status = response.status_code
        self._headers = response.headers
        self._started = self._ended = started
        self._clock = clock
        self._partial_line = b""
        self._data_lines: list[bytes] = []
        self._choices: dict[int, _PartialChoice] = {}
        self._usage = Usage()
        self._model = ""

    def feed(self, received: bytes) -> Iterator[Chunk]:
        """Yield the chunks of newly received bytes, at any split of the stream. Raises CausewayAPIError for an error
        event.

        Only line feeds end a line: text may hold any Unicode line separator.
        """
        *lines, self._partial_line = (self._partial_line + received).split(b"\n")
        for line in (ended.rstrip(b"\r") for ended in lines):
            if line.startswith(b"data:"):
                self._data_lines.append(line[5:].removeprefix(b" "))
            elif not line and self._data_lines:
                data, self._data_lines = b"\n".join(self._data_lines), []
                yield from self._event(data)

    def answer(self) -> Answer:
        """Return all chunks so far as one answer."""
        return Answer(
            decision=self.decision,
            choices=tuple(choice.freeze() for _, choice in sorted(self._choices.items())),
            usage=self._usage,
            model=self._model,
            total_ms=(self._ended - self._started) * 1000,
        )

    def _event(self, data: bytes) -> Iterator[Chunk]:
        if data == b"[DONE]":
            self.done = True
            self._ended = self._clock()
            return
        event = decode_json(data)
        if error := _dict(event.get("error")):
            message = _text(error.get("message")) or "the answer broke off"
            raise _api_error(error, message, self._status, self._headers)
        self._model = _text(event.get("model")) or self._model
        for chunk in _chunks(event):
            self._add(chunk)
            yield chunk

    def _add(self, chunk: Chunk) -> None:
        if self.decision.first_token_ms is None and (chunk.text or chunk.tool_calls):
            self.decision = replace(self.decision, first_token_ms=(self._clock() - self._started) * 1000)
        if chunk.usage:
            self._usage = chunk.usage
        if chunk.text or chunk.tool_calls or chunk.finish_reason:
            self._choices.setdefault(chunk.index, _PartialChoice()).add(chunk)


@dataclass
class _PartialChoice:
    """A choice while its chunks arrive."""

    texts: list[str] = field(default_factory=list)
    calls: dict[int, ToolCall] = field(default_factory=dict)
    finish_reason: str = ""

    def add(self, chunk: Chunk) -> None:
        self.texts.append(chunk.text)
        self.finish_reason = chunk.finish_reason or self.finish_reason
        for delta in chunk.tool_calls:
            call = self.calls.get(delta.index, ToolCall("", "", ""))
            self.calls[delta.index] = ToolCall(
                call.id or delta.id, call.name or delta.name, call.arguments + delta.arguments
            )

    def freeze(self) -> Choice:
        return Choice("".join(self.texts), tuple(call for _, call in sorted(self.calls.items())), self.finish_reason)


def _api_error(error: JSON, message: str, status: int, headers: httpx.Headers) -> CausewayAPIError:
    try:
        retry_after_s = max(0.0, float(headers["retry-after"]))
    except (KeyError, ValueError):  # HTTP also allows a date, which neither the daemon nor the gateway sends
        retry_after_s = None
    return CausewayAPIError(
        message,
        status=status,
        type=_text(error.get("type")),
        code=_text(error.get("code")),
        param=_text(error.get("param")) or None,
        retry_after_s=retry_after_s,
        decision=decode_decision(headers),
    )


def _chunks(event: JSON) -> Iterator[Chunk]:
    usage = _usage(event.get("usage"))
    choices = [_dict(choice) for choice in _list(event.get("choices"))]
    for choice in choices:
        delta = _dict(choice.get("delta"))
        calls = [_dict(call) for call in _list(delta.get("tool_calls"))]
        yield Chunk(
            text=_text(delta.get("content")) or _text(choice.get("text")),
            index=_int(choice.get("index")),
            tool_calls=tuple(_tool_call_delta(call) for call in calls),
            finish_reason=_text(choice.get("finish_reason")),
            usage=usage,
        )
    if usage and not choices:
        yield Chunk(usage=usage)


def _tool_call_delta(call: JSON) -> ToolCallDelta:
    function = _dict(call.get("function"))
    return ToolCallDelta(
        index=_int(call.get("index")),
        arguments=_text(function.get("arguments")),
        id=_text(call.get("id")),
        name=_text(function.get("name")),
    )


def _choice(document: JSON) -> Choice:
    message = _dict(document.get("message"))
    calls = [_dict(call) for call in _list(message.get("tool_calls"))]
    return Choice(
        text=_text(message.get("content")) or _text(document.get("text")),
        tool_calls=tuple(_tool_call(call) for call in calls),
        finish_reason=_text(document.get("finish_reason")),
    )


def _tool_call(call: JSON) -> ToolCall:
    function = _dict(call.get("function"))
    return ToolCall(_text(call.get("id")), _text(function.get("name")), _text(function.get("arguments")))


def _usage(value: object) -> Usage | None:
    counts = _dict(value)
    if not counts:
        return None
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return Usage(*(_int(counts.get(name)) for name in names))


def _dict(value: object) -> JSON:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _int(value: object) -> int:
    return value if isinstance(value, int) else 0
