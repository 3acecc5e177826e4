"""The shapes of OpenAI's objects, checked on the bytes and with the official client's types.

The client's own types accept missing optional fields and unknown ones, so the fields that OpenAI's specification
requires are listed here, and nothing else may appear.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any, TypeVar

import pydantic
from openai.types import Completion, CreateEmbeddingResponse, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from .surface import JSON_TYPE, Reply, events

Json = dict[str, Any]
T = TypeVar("T", bound=pydantic.BaseModel)
_ENVELOPE = {"id", "object", "created", "model", "choices"}
# Not OpenAI's: the stop string that ended a choice, as vLLM and SGLang name it. An Anthropic answer needs it.
_STOPPED_BY = {"stop_reason"}


def strictly(kind: type[T], data: bytes) -> T:
    """Parse with the client's type, without conversions, and refuse fields that it does not know."""
    parsed = kind.model_validate_json(data, strict=True)
    assert set(_unknown_fields(parsed)) <= _STOPPED_BY
    return parsed


def _unknown_fields(value: object) -> Iterable[str]:
    if isinstance(value, pydantic.BaseModel):
        yield from value.model_extra or {}
        for name in type(value).model_fields:
            yield from _unknown_fields(getattr(value, name))
    elif isinstance(value, list):
        for item in value:
            yield from _unknown_fields(item)


# --- answers ---------------------------------------------------------------------------------------------------------


def chat_answer(reply: Reply) -> Json:
    """Check a whole chat answer and return it."""
    answer = _json_answer(reply)
    strictly(ChatCompletion, reply.body)
    _envelope(answer, "chatcmpl-", "chat.completion", {"usage"})
    for choice in answer["choices"]:
        assert set(choice) - _STOPPED_BY == {"index", "message", "logprobs", "finish_reason"}
        message = choice["message"]
        assert set(message) - {"tool_calls"} == {"role", "content", "refusal"}
        assert message["role"] == "assistant"
        assert message["refusal"] is None
        calls = message.get("tool_calls", [{}])
        assert calls, "an empty list of calls is left away"
        assert choice["finish_reason"] in ({"stop", "length"} if "tool_calls" not in message else {"tool_calls"})
        assert (message["content"] is None) <= ("tool_calls" in message)
        for call in message.get("tool_calls", []):
            _tool_call(call)
    usage(answer["usage"])
    return answer


def completion_answer(reply: Reply) -> Json:
    """Check a whole legacy completion and return it."""
    answer = _json_answer(reply)
    strictly(Completion, reply.body)
    _envelope(answer, "cmpl-", "text_completion", {"usage"})
    for choice in answer["choices"]:
        assert set(choice) - _STOPPED_BY == {"index", "text", "logprobs", "finish_reason"}
        assert choice["finish_reason"] in ("stop", "length")
    usage(answer["usage"])
    return answer


def embedding_answer(reply: Reply) -> Json:
    """Check an answer with vectors as numbers and return it."""
    answer = _json_answer(reply)
    strictly(CreateEmbeddingResponse, reply.body)
    assert set(answer) == {"object", "data", "model", "usage"}
    assert answer["object"] == "list"
    for index, item in enumerate(answer["data"]):
        assert set(item) == {"object", "index", "embedding"}
        assert (item["object"], item["index"]) == ("embedding", index)
    assert set(answer["usage"]) == {"prompt_tokens", "total_tokens"}
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] > 0
    return answer


def model_object(item: Json) -> None:
    openais = {name: value for name, value in item.items() if name != "causeway"}
    strictly(Model, json.dumps(openais).encode())
    assert set(openais) == {"id", "object", "created", "owned_by"}
    assert item["object"] == "model"


def usage(found: Json) -> None:
    assert found["total_tokens"] == found["prompt_tokens"] + found["completion_tokens"]
    assert set(found) == {"prompt_tokens", "completion_tokens", "total_tokens", "prompt_tokens_details"}
    assert 0 <= found["prompt_tokens_details"]["cached_tokens"] <= found["prompt_tokens"]


# --- streams ---------------------------------------------------------------------------------------------------------


def chat_stream(reply: Reply) -> list[Json]:
    """Check the chunks of a streamed chat answer and return them."""
    data = events(reply)
    for event in data:
        strictly(ChatCompletionChunk, event)
    chunks = [json.loads(event) for event in data]
    _chunks_agree(chunks, "chatcmpl-", "chat.completion.chunk")
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert set(choice) - _STOPPED_BY == {"index", "delta", "logprobs", "finish_reason"}
            assert set(choice["delta"]) <= {"role", "content", "tool_calls"}
    for index in choices_of(chunks):
        deltas = [choice["delta"] for choice in parts(chunks, index)]
        assert deltas[0] == {"role": "assistant", "content": ""}
        assert not [delta for delta in deltas[1:] if "role" in delta]
    return chunks


def completion_stream(reply: Reply) -> list[Json]:
    """Check the chunks of a streamed legacy completion and return them."""
    chunks = [json.loads(event) for event in events(reply)]
    _chunks_agree(chunks, "cmpl-", "text_completion")
    for chunk in chunks:
        for choice in chunk["choices"]:
            assert set(choice) - _STOPPED_BY == {"index", "text", "logprobs", "finish_reason"}
    return chunks


def choices_of(chunks: Iterable[Json]) -> set[int]:
    return {choice["index"] for chunk in chunks for choice in chunk["choices"]}


def parts(chunks: Iterable[Json], index: int = 0) -> list[Json]:
    """The parts of one choice, in order."""
    return [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]


def streamed_text(chunks: Iterable[Json], index: int = 0) -> str:
    return "".join(
        part["text"] if "text" in part else part["delta"].get("content") or "" for part in parts(chunks, index)
    )


def streamed_calls(chunks: Iterable[Json], index: int = 0) -> list[Json]:
    """Join the tool calls of one choice. Only the first delta of each has its id, type and name."""
    calls: list[Json] = []
    for part in parts(chunks, index):
        for delta in part["delta"].get("tool_calls", []):
            if delta["index"] == len(calls):
                assert set(delta) == {"index", "id", "type", "function"}
                assert set(delta["function"]) == {"name", "arguments"}
                calls.append({"id": delta["id"], "type": delta["type"], "function": dict(delta["function"])})
            else:
                assert set(delta) == {"index", "function"}
                assert set(delta["function"]) == {"arguments"}
                calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
    for call in calls:
        _tool_call(call)
    return calls


def _chunks_agree(chunks: list[Json], prefix: str, kind: str) -> None:
    """Every chunk has the same head, and each choice ends once, with its last part."""
    with_usage = "usage" in chunks[0]
    for chunk in chunks:
        _envelope(chunk, prefix, kind, {"usage"} if with_usage else set())
        assert (chunk["id"], chunk["created"], chunk["model"]) == tuple(
            chunks[0][name] for name in ("id", "created", "model")
        )
    for chunk in chunks[: -1 if with_usage else None]:
        assert chunk["choices"]
        assert chunk.get("usage") is None
    if with_usage:
        assert chunks[-1]["choices"] == []
        usage(chunks[-1]["usage"])
    for index in choices_of(chunks):
        reasons = [part["finish_reason"] for part in parts(chunks, index)]
        assert reasons[-1] is not None
        assert reasons[:-1] == [None] * (len(reasons) - 1)


# --- parts of answers, and errors ------------------------------------------------------------------------------------


def chat_logprobs(logprobs: Json, alternatives: int) -> str:
    """Check the logprobs of a chat answer and return their text."""
    assert set(logprobs) == {"content", "refusal"}
    assert logprobs["refusal"] is None
    for token in logprobs["content"]:
        assert set(token) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(token["top_logprobs"]) == alternatives
        for each in (token, *token["top_logprobs"]):
            assert -9999.0 <= each["logprob"] <= 0.0
            assert bytes(each["bytes"]).decode(errors="replace") == each["token"]
        best = [top["logprob"] for top in token["top_logprobs"]]
        assert best == sorted(best, reverse=True)
    return b"".join(bytes(token["bytes"]) for token in logprobs["content"]).decode()


def error(reply: Reply, status: int, *, code: str = "", param: str | None = "") -> Json:
    """Check that the reply is OpenAI's error object and return it. `param` "": any."""
    assert reply.status == status, (reply.status, reply.body[:300])
    assert reply.media_type == JSON_TYPE
    document = reply.json
    assert set(document) == {"error"}
    found: Json = document["error"]
    assert set(found) == {"message", "type", "param", "code"}
    assert isinstance(found["message"], str)
    assert found["message"].strip()
    assert isinstance(found["type"], str)
    assert isinstance(found["code"], str)
    assert found["param"] is None or isinstance(found["param"], str)
    assert code in ("", found["code"]), found
    assert param in ("", found["param"]), found
    return found


def _json_answer(reply: Reply) -> Json:
    assert reply.status == 200, reply.body
    assert reply.media_type == JSON_TYPE
    answer: Json = reply.json
    return answer


def _envelope(answer: Json, prefix: str, kind: str, more: set[str]) -> None:
    assert set(answer) - {"system_fingerprint"} == _ENVELOPE | more
    assert answer["id"].startswith(prefix)
    assert len(answer["id"]) > len(prefix)
    assert answer["object"] == kind
    assert type(answer["created"]) is int
    assert abs(answer["created"] - time.time()) < 600
    assert isinstance(answer["model"], str)
    assert answer["model"]


def _tool_call(call: Json) -> None:
    assert set(call) == {"id", "type", "function"}
    assert call["id"]
    assert call["type"] == "function"
    assert set(call["function"]) == {"name", "arguments"}
    assert isinstance(json.loads(call["function"]["arguments"]), dict)
