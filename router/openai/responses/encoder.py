"""The encoding of Chunks as a Response object, or as its server-sent events, with names and sequence numbers."""

from __future__ import annotations

import re
from base64 import urlsafe_b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from ...errors import CausewayError, StreamBroken
from ...types import Chunk, Request, ToolCallDelta, Usage
from ..answer import DONE, error_fields
from ..completions import finite
from .compaction import Compacted
from .request import ResponseEcho

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, object]).decode

Fields = dict[str, object]
_STATUS: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}
# Possessive, so that the beginning of a text has the pieces of the whole one.
_PIECE: Final = re.compile(r"\s{25}|\s{0,24}+\S{1,24}+(?:\s|(?=\S))")


class ResponseEncoder:
    """Encodes one answer to one request, with the methods of `AnswerEncoder`; an unfinished one never as finished
    either. `created`: Unix s; `elapsed_s`: time since then; `temperature`: the model's, if the request sets none; None:
    OpenAI's.
    """

    def __init__(
        self,
        request: Request,
        echo: ResponseEcho,
        answer_id: str,
        model: str,
        created: int,
        elapsed_s: Callable[[], float],
        temperature: float | None = None,
    ) -> None:
        self._logprobs = request.logprobs is not None
        self._encrypts = echo.encrypts
        self._created, self._elapsed_s, self._completed_at = created, elapsed_s, 0
        self._base: Fields = {"id": answer_id, "object": "response", "created_at": created, "model": model}
        self._echo: Fields = _decode(echo.fields)
        if temperature is not None and request.sampling.temperature is None:
            self._echo["temperature"] = temperature
        self._suffix = answer_id.partition("_")[2]
        self._number = 0  # of the next event
        self._output: list[Fields] = []  # finished items
        self._open: _OpenItem | None = None
        self._finish = ""
        self._tokens = 0
        self._usage: Usage | None = None
        self._closing = b""  # the last events of the last item

    def whole(self, choices: Sequence[Chunk], usage: Usage) -> bytes:
        """Encode the whole answer as one JSON object, from what `coalesce` returns; a response has one choice."""
        for chunk in choices[:1]:
            self._add(chunk)
        self._close_item()
        self._usage = usage
        return _encode(self._response())

    def start(self) -> bytes:
        """Encode the events before the first token."""
        response = self._response()
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def chunk(self, chunk: Chunk) -> bytes:
        """Encode the events for a chunk; empty if the chunk has nothing for the client."""
        if chunk.usage is not None:
            self._usage = chunk.usage
        self._tokens += chunk.tokens
        return self._add(chunk)

    @property
    def finished(self) -> bool:
        """Whether the answer has its finish reason, so that only the usage may follow."""
        return bool(self._finish)

    def complete(self) -> bytes:
        """End the last item, whose events `end` returns, and encode the whole response. The answer must be finished."""
        if self._usage is None:
            self._usage = Usage(completion_tokens=self._tokens)
        self._closing += self._close_item()
        return _encode(self._response())

    def forget(self) -> None:
        """Say from now on that the response is not stored."""
        self._echo["store"] = False

    def end(self) -> bytes:
        """Encode the end of the last item and the whole response; an error event if the answer has no end."""
        if not self._finish:
            return self.fail(StreamBroken("The answer stopped before its end. Send the request again.", phase="stream"))
        self.complete()
        response = self._response()
        return self._closing + self._event(f"response.{response['status']}", response=response) + DONE

    def fail(self, error: CausewayError) -> bytes:
        """Encode the end of a response that failed: the error, and the response as far as it came."""
        number, self._number = self._number, self._number + 1
        response = {**self._response(), "status": "failed", "error": {"code": error.code, "message": error.message}}
        return self._closing + failure(error, number) + self._event("response.failed", response=response) + DONE

    # --- items -------------------------------------------------------------------------------------------------------

    def _add(self, chunk: Chunk) -> bytes:
        events = self._part("reasoning_text", chunk.reasoning, []) if chunk.reasoning else b""
        logprobs = _logprobs(chunk) if self._logprobs else []
        if chunk.text or logprobs:
            events += self._part("output_text", chunk.text, logprobs)
        if chunk.refusal is not None:
            events += self._part("refusal", chunk.refusal, [])
        for call in chunk.tool_calls:
            events += self._call(call)
        if chunk.finish_reason is not None:
            self._finish = chunk.finish_reason
        return events

    def _part(self, kind: str, text: str, logprobs: list[Fields]) -> bytes:
        events = b""
        if self._open is None or self._open.kind != kind:
            events += self._close_item()
            prefix = "rs" if kind == "reasoning_text" else "msg"
            item = self._open = _OpenItem(kind, f"{prefix}_{self._suffix}_{len(self._output)}")
            events += self._event("response.output_item.added", item=item.message("in_progress", content=[]))
            events += self._event("response.content_part.added", **item.part_place, part=item.part(""))
        item = self._open
        item.add(text, logprobs)
        more = {"logprobs": logprobs} if kind == "output_text" else {}
        return events + self._event(f"response.{kind}.delta", **item.part_place, delta=text, **more)

    def _call(self, call: ToolCallDelta) -> bytes:
        events = b""
        if self._open is None or self._open.call_index != call.index:
            events += self._close_item()
            item = self._open = _OpenItem("function_call", f"fc_{self._suffix}_{len(self._output)}", call)
            events += self._event("response.output_item.added", item=item.call("in_progress", ""))
        item = self._open
        item.add(call.arguments, [])
        if not call.arguments:
            return events
        return events + self._event("response.function_call_arguments.delta", item_id=item.id, delta=call.arguments)

    def _close_item(self) -> bytes:
        """Return the last events of the open item, and add the item to the output."""
        item, self._open = self._open, None
        if item is None:
            return b""
        cut = self._finish in ("length", "content_filter")
        status = "incomplete" if cut else "completed"
        text = item.text
        encrypted: Fields = {}
        if self._encrypts and item.kind == "reasoning_text":
            encrypted = {"encrypted_content": urlsafe_b64encode(text.encode()).decode()}
        if item.kind == "function_call":
            done = item.call(status, text)
            events = self._event("response.function_call_arguments.done", item_id=item.id, arguments=text)
        else:
            part = item.part(text)
            done = {**item.message(status, content=[part]), **encrypted}
            more: Fields = {"refusal": text} if item.kind == "refusal" else {"text": text}
            if item.kind == "output_text":
                more["logprobs"] = item.logprobs
            events = self._event(f"response.{item.kind}.done", **item.part_place, **more)
            events += self._event("response.content_part.done", **item.part_place, part=part)
        events += self._event("response.output_item.done", item=done)
        self._output.append(done)
        return events

    # --- the response and its events ---------------------------------------------------------------------------------

    def _response(self) -> Fields:
        reason = _STATUS.get(self._finish)
        status = "in_progress" if not self._finish else "incomplete" if reason else "completed"
        if status == "completed" and not self._completed_at:
            self._completed_at = self._created + int(self._elapsed_s())
        return {
            **self._base,
            "status": status,
            "completed_at": self._completed_at or None,
            "error": None,
            "incomplete_details": {"reason": reason} if reason else None,
            "output": self._output,
            "usage": None if self._usage is None else _usage(self._usage),
            **self._echo,
        }

    def _event(self, name: str, /, **fields: object) -> bytes:
        """Encode an event. Events of an item carry the index of the next output item, since items do not overlap."""
        number, self._number = self._number, self._number + 1
        place = {} if "response" in fields else {"output_index": len(self._output)}
        return _sse(name, number, {**place, **fields})


class CompactionEncoder(ResponseEncoder):
    """Encodes the summary of a conversation as a compacted response. `bound`: whether it is private, and its tags."""

    bound: Callable[[], tuple[bool, Sequence[str]]] = staticmethod(lambda: (False, ()))

    def whole(self, choices: Sequence[Chunk], usage: Usage) -> bytes:
        """Encode the compacted response. Raises StreamBroken if the summary is not whole."""
        summary, reason = choices[0].text.strip(), choices[0].finish_reason
        if not summary or reason != "stop":
            message = "The model did not end its summary, so nothing was compacted. Send fewer items, or another model."
            raise StreamBroken(message, phase="stream")
        private, tags = self.bound()
        content = Compacted(summary, private, tuple(tags)).seal()
        item = {"id": f"cmp_{self._suffix}_0", "type": "compaction", "encrypted_content": content}
        response = {"id": self._base["id"], "object": "response.compaction", "created_at": self._created}
        return _encode({**response, "output": [item], "usage": _usage(usage)})


def failure(error: CausewayError, number: int) -> bytes:
    """Encode the event of an error, with its fields as the Open Responses document and OpenAI's client read them."""
    fields = error_fields(error)
    return _sse("error", number, {**{k: v for k, v in fields.items() if k != "type"}, "error": fields})


def _sse(name: str, number: int, fields: Fields) -> bytes:
    data = _encode({"type": name, "sequence_number": number, **fields})
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def replay(accepted: Mapping[str, object], response: Mapping[str, object], after: int, text: str = "") -> bytes:
    """Encode the events of a response in the background, as far as it has come, without those up to number `after`.

    The numbers depend on the response alone, so that a client continues with any connection: a text comes in pieces,
    which are the same while it grows. Other items come as a whole, once the response has ended. `accepted` is the
    response as it was accepted, `response` as it is now; `text` is its first item so far, while it is made.
    """
    events, status = _Events(), str(response["status"])
    for name in ("created", "queued"):
        events.add(f"response.{name}", response=accepted)
    if status != "queued":
        events.add("response.in_progress", response={**accepted, "status": "in_progress"})
    if status == "in_progress" and text:
        events.add_item(0, _message(f"msg_{str(response['id']).partition('_')[2]}_0", text), ended=False)
    for at, item in enumerate(msgspec.convert(response["output"], list[Fields])):
        events.add_item(at, item)
    if status not in ("queued", "in_progress"):
        ending = status if status in ("completed", "incomplete") else "failed"
        if ending == "failed" and after >= len(events.encoded):  # the text that the client has is gone
            return _sse("response.failed", after + 1, {"response": response})
        events.add(f"response.{ending}", response=response)
    return b"".join(events.encoded[max(0, after + 1) :])


def _message(name: str, text: str) -> Fields:
    item = _OpenItem("output_text", name)
    return item.message("in_progress", content=[item.part(text)])


def _pieces(text: str, *, ended: bool) -> Iterator[str]:
    """Cut a text into words. Each piece is the same however the text goes on; the rest comes with its end."""
    at = 0
    while match := _PIECE.match(text, at):
        yield match[0]
        at = match.end()
    if ended and at < len(text):
        yield text[at:]


class _Events:
    """The events of a response, each with its number."""

    def __init__(self) -> None:
        self.encoded: list[bytes] = []

    def add(self, name: str, **fields: object) -> None:
        self.encoded.append(_sse(name, len(self.encoded), fields))

    def add_item(self, at: int, item: Fields, *, ended: bool = True) -> None:
        place: Fields = {"output_index": at, "item_id": item["id"]}
        empty = {name: value for name, value in {"content": [], "arguments": ""}.items() if name in item}
        self.add("response.output_item.added", output_index=at, item={**item, **empty, "status": "in_progress"})
        for index, part in enumerate(msgspec.convert(item.get("content") or [], list[Fields])):
            kind = str(part["type"])
            field = "refusal" if kind == "refusal" else "text"
            logprobs: Fields = {"logprobs": part.get("logprobs") or []} if kind == "output_text" else {}
            there = {**place, "content_index": index}
            none: Fields = {"logprobs": []} if logprobs else {}
            self.add("response.content_part.added", **there, part={**part, field: "", **none})
            for piece in _pieces(str(part[field]), ended=ended):
                self.add(f"response.{kind}.delta", **there, delta=piece, **none)
            if not ended:
                return
            self.add(f"response.{kind}.done", **there, **{field: part[field]}, **logprobs)
            self.add("response.content_part.done", **there, part=part)
        if item["type"] == "function_call":
            self.add("response.function_call_arguments.delta", **place, delta=item["arguments"])
            self.add("response.function_call_arguments.done", **place, arguments=item["arguments"])
        self.add("response.output_item.done", output_index=at, item=item)


class _OpenItem:
    """The output item in progress: a message with one part, or a function call."""

    def __init__(self, kind: str, item_id: str, call: ToolCallDelta | None = None) -> None:
        self.kind = kind
        self.id = item_id
        self.call_index = None if call is None else call.index
        self.logprobs: list[Fields] = []
        self._call = call or ToolCallDelta(0)
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def part_place(self) -> Fields:
        return {"item_id": self.id, "content_index": 0}

    def add(self, text: str, logprobs: list[Fields]) -> None:
        self._pieces.append(text)
        self.logprobs += logprobs

    def part(self, text: str) -> Fields:
        if self.kind == "refusal":
            return {"type": "refusal", "refusal": text}
        if self.kind == "reasoning_text":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self.logprobs if text else []}

    def message(self, status: str, content: list[Fields]) -> Fields:
        if self.kind == "reasoning_text":
            return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}
        return {"id": self.id, "type": "message", "status": status, "role": "assistant", "content": content}

    def call(self, status: str, arguments: str) -> Fields:
        call = {"call_id": self._call.id or "", "name": self._call.name or "", "arguments": arguments}
        return {"id": self.id, "type": "function_call", "status": status, **call}


def _usage(usage: Usage) -> Fields:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _logprobs(chunk: Chunk) -> list[Fields]:
    return [
        {
            "token": token.token,
            "logprob": finite(token.logprob),
            "bytes": list(token.bytes or ()),
            "top_logprobs": [
                {"token": top.token, "logprob": finite(top.logprob), "bytes": list(top.bytes or ())}
                for top in token.top
            ],
        }
        for token in chunk.logprobs
    ]
