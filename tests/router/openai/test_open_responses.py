"""The Open Responses document (2026-04-24), field by field: each is honoured, or refused by its name.

Its types are those of `openresponses-types`, which is generated from the document. Where the document disagrees with
itself or with OpenAI's clients, `DEVIATIONS` says so.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from openresponses_types import types as document
from pydantic import BaseModel

from causeway_server.router.errors import CausewayError, InvalidRequest, StreamBroken
from causeway_server.router.openai.answer import DONE, coalesce
from causeway_server.router.openai.responses.compaction import Compacted, WireCompaction, compaction_request
from causeway_server.router.openai.responses.encoder import CompactionEncoder, ResponseEncoder, replay
from causeway_server.router.openai.responses.request import parse_compaction, parse_response
from causeway_server.router.openai.responses.state import StateRequest, read_state
from causeway_server.router.types import Chunk, Request, RoutingHints, TextPart, Usage

from .test_responses import ANSWERS, LAMP, SCHEMA

DEVIATIONS = {
    "response.reasoning.delta": "response.reasoning_text.delta",  # as the document's own rule for parts and OpenAI say
    "response.reasoning.done": "response.reasoning_text.done",
}
NEVER_SENT = {
    "response.reasoning_summary_part.added",  # no target summarizes its reasoning
    "response.reasoning_summary_part.done",
    "response.reasoning_summary_text.delta",
    "response.reasoning_summary_text.done",
    "response.output_text.annotation.added",  # nor cites a source
}
EVENTS: dict[str, type[BaseModel]] = {
    next(iter(kind.model_fields["type"].annotation)).value: kind
    for name, kind in vars(document).items()
    if name.endswith("StreamingEvent")
}


def parse(**fields: Any) -> tuple[Request, dict[str, Any]]:
    request, echo = parse_response(json.dumps({"model": "m", "input": "hi"} | fields).encode(), RoutingHints())
    return request, json.loads(echo.fields)


def state(**fields: Any) -> StateRequest:
    return read_state(json.dumps({"model": "m", "input": "hi"} | fields).encode())


def refused(**fields: Any) -> str | None:
    with pytest.raises(CausewayError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    return caught.value.param


def echoed(name: str) -> Callable[[Any], bool]:
    return lambda value: parse(**{name: value})[1][name] == value


# Each field with a value, and whether it is honoured.
FIELDS: dict[str, tuple[Any, Callable[[Any], bool]]] = {
    "model": ("large", lambda value: parse(model=value)[0].model == value),
    "input": ("hello", lambda value: parse(input=value)[0].messages[0].content == value),
    "previous_response_id": ("resp_1", lambda value: state(previous_response_id=value).previous == value),
    "include": (["message.output_text.logprobs"], lambda value: parse(include=value)[0].logprobs == 0),
    "tools": ([LAMP], lambda value: parse(tools=value)[1]["tools"] == value),
    "tool_choice": ("required", lambda value: parse(tools=[LAMP], tool_choice=value)[0].tool_choice.mode == value),
    "metadata": ({"a": "b"}, echoed("metadata")),
    "text": ({"format": {"type": "text"}}, echoed("text")),
    "temperature": (0.5, echoed("temperature")),
    "top_p": (0.5, echoed("top_p")),
    "presence_penalty": (0.5, echoed("presence_penalty")),
    "frequency_penalty": (0.5, echoed("frequency_penalty")),
    "parallel_tool_calls": (False, echoed("parallel_tool_calls")),
    "stream": (True, lambda value: parse(stream=value)[0].stream),
    "stream_options": ({"include_obfuscation": False}, lambda value: bool(parse(stream=True, stream_options=value))),
    "background": (True, lambda value: state(background=value).background),
    "max_output_tokens": (16, lambda value: parse(max_output_tokens=value)[0].max_tokens == value),
    "max_tool_calls": (1, lambda value: not parse(max_tool_calls=value)[0].parallel_tool_calls),
    "reasoning": ({"effort": "low", "summary": None}, echoed("reasoning")),
    "safety_identifier": ("ann", echoed("safety_identifier")),
    "prompt_cache_key": ("k", echoed("prompt_cache_key")),
    "truncation": ("disabled", echoed("truncation")),
    "instructions": ("be brief", lambda value: parse(instructions=value)[0].messages[0].content == value),
    "store": (True, lambda value: state(store=value).store is True),
    "service_tier": ("priority", lambda value: parse(service_tier=value)[1]["service_tier"] == "default"),
    "top_logprobs": (2, lambda value: parse(top_logprobs=value)[0].logprobs == value),
}


def test_each_field_of_a_request_is_honoured() -> None:
    assert FIELDS.keys() == document.CreateResponseBody.model_fields.keys()
    for name, (value, is_honoured) in FIELDS.items():
        document.CreateResponseBody.model_validate({name: value})
        assert is_honoured(value), name
        assert parse(**{name: None})[0] == parse()[0] if name not in ("model", "input") else True


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"reasoning": {"summary": "concise"}}, "reasoning.summary"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"max_tool_calls": 2}, "max_tool_calls"),
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["message.output_text.logprobs", "file_search_call.results"]}, "include[1]"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"safety_identifier": "x" * 65}, "safety_identifier"),
        ({"prompt_cache_key": "x" * 65}, "prompt_cache_key"),
        ({"context_management": [{"type": "compaction", "compact_threshold": 9}]}, "context_management"),
    ],
)
def test_a_value_that_cannot_be_honoured_is_named(fields: dict[str, Any], param: str) -> None:
    assert (refused(**fields) or "").startswith(param)


@pytest.mark.parametrize(
    "fields",
    [
        {"text": {"verbosity": "medium"}},
        {"reasoning": {"summary": "auto"}},
        {"include": ["reasoning.encrypted_content"]},
        {"tools": [LAMP], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "lamp"}]}},
        {"tools": [LAMP], "tool_choice": {"type": "function", "name": "lamp"}},
    ],
)
def test_the_values_of_the_document_are_taken(fields: dict[str, Any]) -> None:
    document.CreateResponseBody.model_validate(fields)
    parse(**fields)


IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "lamp", "arguments": "{}", "status": "completed"}
SUMMARY = {"type": "compaction", "id": "cmp_1", "encrypted_content": Compacted("so far").seal()}


@pytest.mark.parametrize(
    ("item", "content"),
    [
        ({"role": "user", "content": "a", "id": "msg_1", "status": "completed"}, "a"),
        ({"role": "system", "content": [{"type": "input_text", "text": "a"}]}, "a"),
        ({"role": "developer", "content": "a"}, "a"),
        ({"role": "assistant", "content": [{"type": "output_text", "text": "a"}], "phase": "commentary"}, "a"),
        ({"role": "assistant", "content": [{"type": "refusal", "refusal": "a"}]}, "a"),
        ({"type": "function_call_output", "call_id": "c", "output": "a", "id": "fco_1"}, "a"),
        (SUMMARY, "so far"),
    ],
)
def test_each_kind_of_item_is_read(item: dict[str, Any], content: str) -> None:
    document.CreateResponseBody.model_validate({"input": [{"type": "message", **item}]})
    assert parse(input=[CALL, item])[0].messages[-1].content == content


def test_a_part_is_read_or_refused() -> None:
    text = {"type": "input_text", "text": "a"}
    content = parse(input=[{"role": "user", "content": [text, IMAGE]}])[0].messages[0].content
    assert isinstance(content, tuple)
    assert [isinstance(part, TextPart) for part in content] == [True, False]
    for part in ({"type": "input_file", "file_url": "https://a/b"}, {"type": "input_video", "video_url": "data:x"}):
        assert (refused(input=[{"role": "user", "content": [part]}]) or "").startswith("input")


def test_an_item_is_named_by_its_id_alone() -> None:
    """Its type is optional; a request that continues a response needs no further input."""
    assert state(input=[{"id": "msg_1"}]).items == [{"id": "msg_1", "type": "item_reference"}]
    assert state(input=None, previous_response_id="resp_1").items == []
    with pytest.raises(InvalidRequest, match="twice"):  # so that a small body is not one of gigabytes
        state(input=[{"id": "msg_1"}, {"id": "msg_2"}, {"id": "msg_1"}])


def encoder(**fields: Any) -> ResponseEncoder:
    body = {"model": "m", "input": "hi", "tools": [LAMP], "include": list(document.IncludeEnum)} | fields
    request, echo = parse_response(json.dumps(body).encode(), RoutingHints())
    return ResponseEncoder(request, echo, "resp_1", "small", 1_700_000_000, lambda: 2.5)


def events_of(stream: bytes) -> list[dict[str, Any]]:
    assert stream.endswith(DONE)
    blocks = stream.removesuffix(DONE).decode().removesuffix("\n\n").split("\n\n")
    events = [json.loads(block.partition("\ndata: ")[2]) for block in blocks]
    assert [f"event: {event['type']}" for event in events] == [block.partition("\n")[0] for block in blocks]
    return events


def check_events(events: list[dict[str, Any]]) -> None:
    numbers = [event["sequence_number"] for event in events]
    assert numbers == list(range(numbers[0], numbers[0] + len(events)))
    names = {ours: theirs for theirs, ours in DEVIATIONS.items()}
    for event in events:
        kind = EVENTS[names.get(event["type"], event["type"])]
        kind.model_validate({**event, "type": names.get(event["type"], event["type"])})


def streamed(**fields: Any) -> list[list[dict[str, Any]]]:
    streams = []
    for chunks, reason in ANSWERS:
        one = encoder(stream=True, **fields)
        data = b"".join([one.start(), *map(one.chunk, (*chunks, Chunk(finish_reason=reason)))]) + one.end()
        streams.append(events_of(data))
    return streams


def test_each_event_is_the_documents() -> None:
    streams = streamed()
    broken = encoder(stream=True)
    cut = broken.start() + broken.chunk(Chunk("Hel", tokens=1)) + broken.fail(StreamBroken("It broke.", phase="stream"))
    accepted = json.loads(encoder().whole(*coalesce((Chunk("a", finish_reason="stop"),)))) | {"status": "queued"}
    queued = events_of(replay(accepted, accepted, -1) + DONE)
    for events in (*streams, events_of(cut), queued):
        check_events(events)
    sent = {event["type"] for events in (*streams, events_of(cut), queued) for event in events}
    missing = EVENTS.keys() - sent - NEVER_SENT
    assert missing == DEVIATIONS.keys()
    assert [event["type"] for event in events_of(cut)[-2:]] == ["error", "response.failed"]
    assert events_of(cut)[-1]["response"]["error"] == {"code": "stream_broken", "message": "It broke."}


def test_a_response_that_cannot_be_stored_fails_with_the_next_number() -> None:
    made = encoder(stream=True)
    events = made.start() + made.chunk(Chunk("Hello", tokens=1)) + made.chunk(Chunk(finish_reason="stop"))
    made.complete()
    check_events(events_of(events + made.fail(StreamBroken("It is not stored.", phase="stream"))))


@pytest.mark.parametrize(("chunks", "reason"), ANSWERS)
def test_a_response_has_each_field(chunks: Any, reason: Any) -> None:
    whole = json.loads(encoder().whole(*coalesce((*chunks, Chunk(finish_reason=reason), Chunk(usage=Usage(3, 2))))))
    document.ResponseResource.model_validate(whole)
    assert document.ResponseResource.model_fields.keys() <= whole.keys()
    assert whole["completed_at"] == (None if whole["status"] == "incomplete" else 1_700_000_002)
    for item in whole["output"]:
        assert {"id", "type", "status"} <= item.keys()
        assert ("encrypted_content" in item) == (item["type"] == "reasoning")


def test_a_schema_is_repeated() -> None:
    """The document allows only null there, and OpenAI sends the schema."""
    fields = {"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}}
    whole = json.loads(encoder(**fields).whole(*coalesce((Chunk("{}", finish_reason="stop"),))))
    assert whole["text"]["format"].pop("schema") == SCHEMA
    whole["text"]["format"]["schema"] = None
    document.ResponseResource.model_validate(whole)


# --- compaction ------------------------------------------------------------------------------------------------------


def compaction(*chunks: Chunk, private: bool = False, tags: tuple[str, ...] = ()) -> dict[str, Any]:
    request, echo = parse_compaction(b'{"model": "m", "input": "hi"}', RoutingHints())
    made = CompactionEncoder(request, echo, "resp_1", "small", 1_700_000_000, lambda: 0.0)
    made.bound = lambda: (private, tags)
    compacted: dict[str, Any] = json.loads(made.whole(*coalesce(chunks)))
    return compacted


def test_a_compacted_response_is_the_documents() -> None:
    assert document.CompactResponseMethodPublicBody.model_fields.keys() == set(WireCompaction.__struct_fields__)
    compacted = compaction(Chunk("So far.", finish_reason="stop"), Chunk(usage=Usage(3, 2)))
    document.CompactResource.model_validate(compacted)
    assert document.CompactResource.model_fields.keys() == compacted.keys()
    asked = [
        message.content
        for message in parse(input=[*compacted["output"], {"role": "user", "content": "on"}])[0].messages
    ]
    assert asked[1:] == ["So far.", "on"]


def test_a_compacted_response_binds_what_goes_on_from_it() -> None:
    """A private conversation stays on its device, and one in a region there."""
    compacted = compaction(Chunk("a", finish_reason="stop"), private=True, tags=("in-region:eu",))
    hints = parse(input=[*compacted["output"], {"role": "user", "content": "on"}])[0].hints
    assert (hints.prefer, hints.tags) == ("only_on_device", ("in-region:eu",))
    again, _ = parse_compaction(json.dumps({"model": "m", "input": compacted["output"]}).encode(), RoutingHints())
    assert again.hints == hints


@pytest.mark.parametrize("chunk", [Chunk("a", finish_reason="length"), Chunk("  ", finish_reason="stop")])
def test_a_summary_that_is_not_whole_compacts_nothing(chunk: Chunk) -> None:
    with pytest.raises(StreamBroken):
        compaction(chunk)


@pytest.mark.parametrize(
    "content",
    [
        *("", "gAAAA", "causeway1.!", "causeway1.e30=", Compacted("a").seal()[:-5] + "é"),
        *(Compacted("a", tags=tags).seal() for tags in (("in-region:eu\r\nx: y",), ("a",) * 33, ("a" * 65,))),
    ],
)
def test_a_foreign_compaction_item_is_refused(content: str) -> None:
    assert refused(input=[{"type": "compaction", "encrypted_content": content}]) == "input"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "a", "stream": True}, "stream"),
        ({"input": "a", "model": None}, "model"),
        ({"input": 5}, "input"),
    ],
)
def test_a_request_for_a_compaction_names_its_fault(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(CausewayError) as caught:
        compaction_request(json.dumps({"model": "m"} | fields).encode())
    assert caught.value.param == param


# --- responses in the background -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["Hello there, you.", "a" * 100, " \n" * 60 + "x", "日本語" * 30, "one  two\n\nthree "]
)
def test_the_events_of_a_text_that_grows_are_the_beginning_of_all(text: str) -> None:
    whole = json.loads(encoder().whole(*coalesce((Chunk(text, finish_reason="stop"),))))
    accepted = whole | {"status": "queued", "output": [], "completed_at": None, "usage": None}
    last = replay(accepted, whole, -1)
    check_events(events_of(last + DONE))
    for end in range(len(text)):
        now = replay(accepted, accepted | {"status": "in_progress"}, -1, text[:end])
        assert last.startswith(now)
    deltas = [event["delta"] for event in events_of(last + DONE) if event["type"].endswith("delta")]
    assert "".join(deltas) == text
    assert max(map(len, deltas)) <= 49


def test_a_client_that_has_a_part_of_a_failed_response_gets_its_end() -> None:
    accepted = {"id": "resp_1", "status": "queued", "output": []}
    (end,) = events_of(replay(accepted, accepted | {"status": "failed"}, 20) + DONE)
    assert (end["type"], end["sequence_number"]) == ("response.failed", 21)
