"""The bodies of OpenAI's answers, as the encoders in `router.openai` write them. They are for documents only."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ..openai.answer import AnswerCall, AnswerCallDelta, AnswerToken, AnswerUsage
from ..openai.completions import CompletionLogprobs
from ..types import FinishReason


class ContinueToken(msgspec.Struct):
    """Our own field of an answer that was cut short: send the token as `causeway.continue` to get the rest."""

    resume: str = msgspec.field(name="continue")


class ChatLogprobs(msgspec.Struct):
    content: list[AnswerToken]
    refusal: None


class ChatMessage(msgspec.Struct):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str = ""
    tool_calls: list[AnswerCall] = []


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: AnswerUsage
    causeway: ContinueToken | None = None


class ChatDelta(msgspec.Struct):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    refusal: str = ""
    reasoning_content: str = ""
    tool_calls: list[AnswerCallDelta] = []


class ChatDeltaChoice(msgspec.Struct):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(msgspec.Struct):
    """The data of an event of a stream, which ends with `[DONE]`, or with an error's object."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatDeltaChoice]
    usage: AnswerUsage | None = None
    causeway: ContinueToken | None = None


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class TextCompletion(msgspec.Struct):
    """A legacy completion, or the data of an event of its stream, where `usage` comes last if it is asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: AnswerUsage | None = None
    causeway: ContinueToken | None = None


class ResponseObject(msgspec.Struct):
    """OpenAI's Response object; it repeats further fields of its request."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    causeway: ContinueToken | None = None


class ResponseEvent(msgspec.Struct):
    """The data of an event of a response's stream; `type` is the event's name, and says what else there is."""

    type: str
    sequence_number: int
