"""`/v1/responses`: its body as a chat request, and its answers as the official client's types."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from causeway_server.router.errors import CausewayError
from causeway_server.router.openai.answer import DONE, coalesce
from causeway_server.router.openai.chat import parse_chat
from causeway_server.router.openai.responses.encoder import ResponseEncoder
from causeway_server.router.openai.responses.request import ResponseEcho, parse_response
from causeway_server.router.types import Chunk, FinishReason, Request, RoutingHints, TokenLogprob, ToolCallDelta, Usage

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
SCHEMA = {"type": "object", "properties": {"on": {"type": "boolean"}}}
LAMP = {"type": "function", "name": "lamp", "description": "Turn it.", "parameters": SCHEMA, "strict": True}


def parse(**fields: Any) -> tuple[Request, ResponseEcho]:
    body = {"model": "m", "input": "hello"} | fields
    return parse_response(json.dumps(body).encode(), RoutingHints())


def chat(messages: list[Any], **fields: Any) -> Request:
    return parse_chat(json.dumps({"model": "m", "messages": messages} | fields).encode(), RoutingHints())


def test_a_string_and_instructions_are_the_chat_with_two_messages() -> None:
    expected = chat([{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}], temperature=0)
    request, _ = parse(instructions="be brief", temperature=0)
    assert msgspec.structs.replace(request, limit_name="max_tokens") == expected


def test_items_become_messages() -> None:
    """A type is optional for messages; calls belong to the assistant's message before them; reasoning is dropped."""
    request, _ = parse(
        input=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "input_text", "text": "on?"}], "type": "message"},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "I will.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "lamp", "arguments": "{}", "id": "fc_1"},
            {"type": "function_call", "call_id": "c2", "name": "fan", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "done"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "done"}]},
        ]
    )
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for n, name in ((1, "lamp"), (2, "fan"))
    ]
    expected = chat(
        [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": "on?"},
            {"role": "assistant", "content": "I will.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "c1", "content": "done"},
            {"role": "tool", "tool_call_id": "c2", "content": "done"},
        ]
    )
    assert request.messages == expected.messages


def test_tools_formats_and_limits_are_those_of_a_chat() -> None:
    function = {key: value for key, value in LAMP.items() if key != "type"}
    expected = chat(
        [{"role": "user", "content": "hello"}],
        tools=[{"type": "function", "function": function}],
        tool_choice={"type": "function", "function": {"name": "lamp"}},
        parallel_tool_calls=False,
        response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA, "strict": True}},
        max_completion_tokens=9,
        reasoning_effort="low",
        logprobs=True,
        top_logprobs=2,
        stream=True,
    )
    request, _ = parse(
        tools=[LAMP],
        tool_choice={"type": "function", "name": "lamp"},
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "s", "schema": SCHEMA, "strict": True}, "verbosity": "medium"},
        max_output_tokens=9,
        reasoning={"effort": "low", "summary": "auto"},
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=2,
        stream=True,
        store=False,
        metadata={"a": "b"},
        service_tier="auto",
    )
    assert request == expected


def test_allowed_tools_are_those_that_the_request_has() -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "lamp"}]}
    request, echo = parse(tools=[LAMP, {**LAMP, "name": "fan"}], tool_choice=allowed)
    assert request == parse(tools=[LAMP], tool_choice="required")[0]
    repeated = json.loads(echo.fields)
    assert repeated["tool_choice"] == allowed
    assert [tool["name"] for tool in repeated["tools"]] == ["lamp", "fan"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [LAMP], "tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        (
            {
                "tools": [LAMP],
                "tool_choice": {
                    "type": "allowed_tools",
                    "mode": "auto",
                    "tools": [{"type": "mcp"}, {"type": "function", "name": "fan"}],
                },
            },
            "tool_choice.tools[1]",
        ),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": {"id": "c"}}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"n": 2}, "n"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["hello"]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "item_reference", "id": "x"}]}, "input[1].type"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [LAMP], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [LAMP, LAMP]}, "tools[1].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [LAMP], "tool_choice": {"type": "function", "name": "fan"}}, "tool_choice.name"),
        ({"text": {"format": {"type": "json_schema", "name": "s"}}}, "text.format.schema"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"temperature": 9}, "temperature"),
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"causeway": {"prefr": "only_on_device"}}, "causeway.prefr"),
    ],
)
def test_what_is_refused_is_a_400_that_names_the_key(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(CausewayError) as caught:
        parse(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


TEXT = (Chunk("Hel", tokens=1), Chunk("lo", tokens=1))
CALLS = (
    Chunk("I will.", tokens=2),
    Chunk(tool_calls=(ToolCallDelta(0, "", "call_1", "lamp"),), tokens=1),
    Chunk(tool_calls=(ToolCallDelta(0, '{"on":'),), tokens=1),
    Chunk(tool_calls=(ToolCallDelta(0, "true}"), ToolCallDelta(1, "{}", "call_2", "fan")), tokens=2),
)
LOGPROBS = (Chunk("Hi", tokens=1, logprobs=(TokenLogprob("Hi", -0.5, (72, 105)),)),)
ANSWERS: list[tuple[tuple[Chunk, ...], FinishReason]] = [
    (TEXT, "stop"),
    (TEXT, "length"),
    (CALLS, "tool_calls"),
    ((Chunk(refusal="No."),), "stop"),
    ((Chunk(reasoning="2 +", tokens=2), Chunk(reasoning=" 2", tokens=1), Chunk("Four.", tokens=1)), "stop"),
    (LOGPROBS, "stop"),
    ((), "stop"),
]


def encoder(**fields: Any) -> ResponseEncoder:
    request, echo = parse(tools=[LAMP], metadata={"a": "b"}, include=["message.output_text.logprobs"], **fields)
    return ResponseEncoder(request, echo, "resp_1", "small", 1700000000, lambda: 0.0)


@pytest.mark.parametrize(("chunks", "reason"), ANSWERS)
def test_a_stream_s_events_build_the_whole_answer(chunks: tuple[Chunk, ...], reason: FinishReason) -> None:
    """Each is one of the client's event types; numbers count up; deltas add up to what `done` says."""
    answer = (*chunks, Chunk(finish_reason=reason), Chunk(usage=Usage(3, 2, 1)))
    whole = json.loads(encoder().whole(*coalesce(answer)))
    streamed = encoder(stream=True)
    data = b"".join([streamed.start(), *map(streamed.chunk, answer)])
    assert streamed.finished
    events = []
    for block in (data + streamed.end()).removesuffix(DONE).decode().removesuffix("\n\n").split("\n\n"):
        name, _, body = block.partition("\n")
        event = EVENT.validate_json(body.removeprefix("data: "))
        assert name == f"event: {event.type}"
        events.append(event)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    response = events[-1].response
    assert response == Response.model_validate(whole)
    assert response.status == ("incomplete" if reason == "length" else "completed")
    assert (response.usage.input_tokens, response.usage.total_tokens) == (3, 5)
    assert response.usage.input_tokens_details.cached_tokens == 1
    assert response.metadata == {"a": "b"}
    for index, item in enumerate(response.output):
        parts = [event for event in events if getattr(event, "output_index", None) == index]
        assert parts[0].type == "response.output_item.added"
        assert parts[-1].type == "response.output_item.done"
        assert parts[-1].item == item
        text = "".join(event.delta for event in parts if event.type.endswith(".delta"))
        assert text == item.arguments if item.type == "function_call" else text in str(item.content[0])


def test_calls_are_items_of_their_own() -> None:
    whole = Response.model_validate_json(encoder().whole(*coalesce((*CALLS, Chunk(finish_reason="tool_calls")))))
    assert whole.output_text == "I will."
    calls = [item for item in whole.output if item.type == "function_call"]
    assert [(call.call_id, call.name, call.arguments) for call in calls] == [
        ("call_1", "lamp", '{"on":true}'),
        ("call_2", "fan", "{}"),
    ]
    assert len({item.id for item in whole.output}) == 3


def test_an_answer_without_an_end_ends_with_an_error() -> None:
    broken = encoder(stream=True)
    broken.start()
    broken.chunk(TEXT[0])
    assert not broken.finished
    assert b'"error"' in broken.end()
    assert b"response.completed" not in broken.end()
