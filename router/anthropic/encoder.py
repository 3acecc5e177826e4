"""The encoding of Chunks as Anthropic's Message, or as the named events that build one:

    message_start, then for each block content_block_start, content_block_delta…, content_block_stop,
    then message_delta with the reason of the stop and the usage, and message_stop; a ping after the first block's start

The tokens of the prompt are known at the end: `message_start` says 0, `message_delta` has the number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from ..errors import StreamBroken
from ..openai.answer import is_text_alone
from ..types import Chunk, FinishReason, Request, ToolCallDelta, Usage
from .replies import error_event
from .request import MessageTerms

_encode = msgspec.json.Encoder().encode
_END: Final = b"}\n\n"
_PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'
_STOP: Final = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
_START: Final = b'event: message_start\ndata: {"type":"message_start","message":'
_DELTA: Final = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":'
_TEXT: Final = _DELTA + b'{"type":"text_delta","text":'
_REASONS: Final[dict[FinishReason, bytes]] = {
    "stop": b'"end_turn"',
    "length": b'"max_tokens"',
    "tool_calls": b'"tool_use"',
    "content_filter": b'"refusal"',
}


class MessageEncoder:
    """Encodes one answer to one request, with the methods of `AnswerEncoder`; never an unfinished one as finished."""

    def __init__(self, request: Request, terms: MessageTerms, answer_id: str, model: str) -> None:
        self._id = answer_id
        self._model = model
        self._hides_thinking = terms.hides_thinking
        self._stops = frozenset(request.stop)
        self._open: str | int | None = None  # the block in progress: its kind, or the number of its call
        self._blocks = 0  # that have begun
        self._reason = b""  # why the answer stopped, with the stop sequence
        self._refused = False
        self._usage: Usage | None = None
        self.around: dict[int, tuple[bytes, bytes]] = {}
        """The bytes of an event around a text, while a block of text is open; as of `AnswerEncoder`."""
        self.tokens = 0  # streamed so far

    def whole(self, choices: Sequence[Chunk], usage: Usage) -> bytes:
        """Encode the whole answer as one JSON object, from what `coalesce` returns; a Message has one choice."""
        choice = choices[0]
        blocks = []
        if choice.reasoning:
            thought = "" if self._hides_thinking else choice.reasoning
            blocks.append(b'{"type":"thinking","thinking":%b,"signature":""}' % _encode(thought))
        if text := choice.text + (choice.refusal or ""):
            blocks.append(b'{"type":"text","text":%b}' % _encode(text))
        blocks += [_tool_use(call, _input(call.arguments)) for call in choice.tool_calls]
        self._stop(choice)
        return self._message(b",".join(blocks), usage) + b"}"

    def start(self) -> bytes:
        """Encode the event before the first token."""
        self._reason = b'null,"stop_sequence":null'
        event = _START + self._message(b"", Usage()) + b"}}\n\n"
        self._reason = b""
        return event

    def chunk(self, chunk: Chunk) -> bytes:
        """Encode the events for a chunk; empty if the chunk has nothing for the client."""
        self.tokens += chunk.tokens
        if self.around and is_text_alone(chunk):  # nearly every token
            before, after = self.around[0]
            return before + _encode(chunk.text) + after
        self._usage = chunk.usage or self._usage
        events = self._thought(chunk.reasoning) if chunk.reasoning else b""
        self._refused = self._refused or chunk.refusal is not None
        if text := chunk.text + (chunk.refusal or ""):
            events += self._begin("text", b'{"type":"text","text":""}')
            before, after = self.around[0] = _TEXT % (self._blocks - 1), b"}" + _END
            events += before + _encode(text) + after
        for call in chunk.tool_calls:
            events += self._call(call)
        if chunk.finish_reason is not None:
            events += self._end_block()
            self._stop(chunk)
        return events

    @property
    def finished(self) -> bool:
        """Whether the answer has its finish reason, so that only the usage may follow."""
        return bool(self._reason)

    def end(self) -> bytes:
        """Encode the reason of the stop and the usage; an error event if the answer has no end."""
        if not self._reason:
            broken = StreamBroken("The answer stopped before its end. Send the request again.", phase="stream")
            return error_event(broken, self._id.partition("_")[2])
        usage = self._usage or Usage(completion_tokens=self.tokens)
        delta = b'{"stop_reason":%b}' % self._reason
        head = b'event: message_delta\ndata: {"type":"message_delta","delta":%b,"usage":%b' % (delta, _counts(usage))
        return head + _END + _STOP

    # --- blocks ------------------------------------------------------------------------------------------------------

    def _thought(self, text: str) -> bytes:
        events = self._begin("thinking", b'{"type":"thinking","thinking":"","signature":""}')
        if self._hides_thinking:
            return events
        return events + _DELTA % (self._blocks - 1) + b'{"type":"thinking_delta","thinking":%b}' % _encode(text) + _END

    def _call(self, call: ToolCallDelta) -> bytes:
        events = self._begin(call.index, _tool_use(call, b"{}"))
        if not call.arguments:
            return events
        delta = b'{"type":"input_json_delta","partial_json":%b}' % _encode(call.arguments)
        return events + _DELTA % (self._blocks - 1) + delta + _END

    def _begin(self, kind: str | int, block: bytes) -> bytes:
        """Return the events that begin a block, unless it is the open one."""
        if self._open == kind:
            return b""
        events = self._end_block()
        self._open = kind
        start = b'event: content_block_start\ndata: {"type":"content_block_start","index":%d,"content_block":%b}\n\n'
        events += start % (self._blocks, block)
        self._blocks += 1
        return events + _PING if self._blocks == 1 else events

    def _end_block(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        self.around.clear()
        event = b'event: content_block_stop\ndata: {"type":"content_block_stop","index":%d}\n\n'
        return event % (self._blocks - 1)

    # --- the message -------------------------------------------------------------------------------------------------

    def _stop(self, chunk: Chunk) -> None:
        assert chunk.finish_reason is not None  # `coalesce` checked it
        reason, sequence = _REASONS[chunk.finish_reason], b"null"
        if self._refused or chunk.refusal is not None:
            reason = b'"refusal"'
        elif chunk.finish_reason == "stop" and chunk.stop in self._stops:
            reason, sequence = b'"stop_sequence"', _encode(chunk.stop)
        self._reason = reason + b',"stop_sequence":' + sequence

    def _message(self, blocks: bytes, usage: Usage) -> bytes:
        """Encode the Message without its closing brace."""
        return b'{"id":%b,"type":"message","role":"assistant","model":%b,"content":[%b],"stop_reason":%b,"usage":%b' % (
            _encode(self._id),
            _encode(self._model),
            blocks,
            self._reason,
            _counts(usage),
        )


def _tool_use(call: ToolCallDelta, fields: bytes) -> bytes:
    identity, name = _encode(call.id or ""), _encode(call.name or "")
    return b'{"type":"tool_use","id":%b,"name":%b,"input":%b}' % (identity, name, fields)


def _input(arguments: str) -> bytes:
    """Return a call's arguments as an object. Text that is not one is wrapped as Anthropic's documentation advises for
    invalid JSON, so that nothing of it is lost.
    """
    try:
        msgspec.json.decode(arguments or "{}", type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return b'{"INVALID_JSON":%b}' % _encode(arguments)
    return (arguments or "{}").encode()


def _counts(usage: Usage) -> bytes:
    """Encode the usage. Tokens that were found in the KV cache are not part of `input_tokens`."""
    thought = b',"output_tokens_details":{"thinking_tokens":%d}' % usage.reasoning_tokens
    return b'{"input_tokens":%d,"cache_creation_input_tokens":0,"cache_read_input_tokens":%d,"output_tokens":%d%b}' % (
        usage.prompt_tokens - usage.cached_tokens,
        usage.cached_tokens,
        usage.completion_tokens,
        thought if usage.reasoning_tokens else b"",
    )
