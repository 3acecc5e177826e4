"""Tools, and answers in JSON."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from .shapes import chat_answer, chat_stream, error, parts, streamed_calls, streamed_text
from .surface import Surface

pytestmark = [pytest.mark.triton, pytest.mark.engine, pytest.mark.slow]


def tool(name: str, **properties: object) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": f"{name} it", "parameters": schema}}


ALARM = tool("set_alarm", time={"type": "string", "maxLength": 12})
LIGHT = tool("switch_light", on={"type": "boolean"})
NO_ARGUMENTS = {"type": "function", "function": {"name": "stop_music"}}
NAMED = {"type": "function", "function": {"name": "set_alarm"}}
SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["good", "bad"]}, "level": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["mood", "level"],
    "additionalProperties": False,
}


def form(schema: object, **fields: object) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, **fields}}


# --- tools -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["set_alarm", "switch_light"])
def test_only_an_allowed_tool_is_called(surface: Surface, name: str) -> None:
    tools = [{"type": "function", "function": {"name": name}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": tools}}
    (answer,) = chat_answer(surface.chat(tools=[ALARM, LIGHT], tool_choice=choice, max_tokens=100))["choices"]
    assert {call["function"]["name"] for call in answer["message"]["tool_calls"]} == {name}


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_demanded_call_is_made(surface: Surface, choice: object, stream: bool) -> None:
    fields = {"tools": [ALARM, LIGHT], "tool_choice": choice, "max_tokens": 100}
    reply = surface.chat(**fields, stream=stream)
    if stream:
        chunks = chat_stream(reply)
        calls, reason, text = streamed_calls(chunks), parts(chunks)[-1]["finish_reason"], streamed_text(chunks)
    else:
        (answer,) = chat_answer(reply)["choices"]
        calls, reason = answer["message"]["tool_calls"], answer["finish_reason"]
        text = answer["message"]["content"] or ""
    schemas = {one["function"]["name"]: one["function"]["parameters"] for one in (ALARM, LIGHT)}
    assert reason == "tool_calls"
    assert text == ""
    assert calls
    for call in calls:
        assert choice == "required" or call["function"]["name"] == "set_alarm"
        jsonschema.validate(json.loads(call["function"]["arguments"]), schemas[call["function"]["name"]])


def test_streamed_and_whole_calls_agree(surface: Surface) -> None:
    fields = {"tools": [ALARM], "tool_choice": NAMED, "max_tokens": 100}
    (whole,) = chat_answer(surface.chat(**fields))["choices"][0]["message"]["tool_calls"]
    (streamed,) = streamed_calls(chat_stream(surface.chat(**fields, stream=True)))
    assert streamed["function"] == whole["function"]


def test_calls_have_ids_of_their_own(surface: Surface) -> None:
    fields = {"tools": [ALARM], "tool_choice": "required", "max_tokens": 100, "n": 2, "temperature": 0.8}
    answer = chat_answer(surface.chat(**fields))
    ids = [call["id"] for choice in answer["choices"] for call in choice["message"].get("tool_calls", [])]
    assert len(set(ids)) == len(ids) >= 1


def test_streamed_calls_of_several_choices(surface: Surface) -> None:
    fields = {"tools": [ALARM], "tool_choice": NAMED, "max_tokens": 100, "n": 3}
    chunks = chat_stream(surface.chat(**fields, stream=True, stream_options={"include_usage": True}))
    calls = [call for index in range(3) for call in streamed_calls(chunks, index)]
    assert len(calls) == 3
    assert len({call["id"] for call in calls}) == 3


def test_logprobs_of_a_call(surface: Surface) -> None:
    """As OpenAI gives them: those of the call's own text."""
    fields = {"tools": [ALARM], "tool_choice": NAMED, "max_tokens": 100, "logprobs": True}
    (choice,) = chat_answer(surface.chat(**fields))["choices"]
    assert choice["logprobs"] is None or choice["logprobs"]["content"]


def test_tools_and_a_schema_together(surface: Surface) -> None:
    """The answer is a call or obeys the schema."""
    (choice,) = chat_answer(surface.chat(tools=[ALARM], response_format=form(SCHEMA), max_tokens=100))["choices"]
    if "tool_calls" not in choice["message"]:
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)


def test_call_ids_differ_from_request_to_request(surface: Surface) -> None:
    """Also where the second answer comes from a cache."""
    fields = {"tools": [ALARM], "tool_choice": NAMED, "max_tokens": 100}
    ids = [chat_answer(surface.chat(**fields))["choices"][0]["message"]["tool_calls"][0]["id"] for _ in range(2)]
    ids += [call["id"] for call in streamed_calls(chat_stream(surface.chat(**fields, stream=True)))]
    assert len(set(ids)) == 3


def test_each_tool_keeps_its_own_definitions(surface: Surface) -> None:
    """Two tools that each define `Item`; the call must follow its own one."""

    def of(name: str, item: object) -> dict[str, Any]:
        made = tool(name, item={"$ref": "#/$defs/Item"})
        made["function"]["parameters"]["$defs"] = {"Item": item}
        return made

    tools = {"first": of("first", {"enum": ["a"]}), "second": of("second", {"enum": [7]})}
    for name, wanted in (("first", "a"), ("second", 7)):
        choice = {"type": "function", "function": {"name": name}}
        answer = chat_answer(surface.chat(tools=[*tools.values()], tool_choice=choice, max_tokens=100))
        (call,) = answer["choices"][0]["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"item": wanted}


UNHELD = {"type": "object", "properties": {"url": {"not": {"const": ""}}}, "required": ["url"]}
BROWSE = {"type": "function", "function": {"name": "browse", "parameters": UNHELD}}


def test_an_offered_tool_that_cannot_be_held_is_loosened_and_named(surface: Surface) -> None:
    reply = surface.chat(tools=[ALARM, BROWSE, {"type": "web_search"}], max_tokens=100)
    chat_answer(reply)
    assert reply.headers["x-causeway-loosened"] == "browse"
    if surface.name == "edge":
        record = surface.get(f"/v1/decisions/{reply.headers['x-causeway-decision']}").json
        assert "browse are not enforced: not at #/properties/url" in record["outcome"]["attempts"][-1]["detail"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "browse"}}])
def test_a_tool_that_must_be_called_and_cannot_be_held_is_400(surface: Surface, choice: object) -> None:
    found = error(surface.chat(tools=[ALARM, BROWSE], tool_choice=choice), 400, code="invalid_schema", param="tools")
    assert "browse" in found["message"]
    assert "`not` at #/properties/url" in found["message"]


def test_arguments_that_are_a_list_are_400_where_a_call_is_required(surface: Surface) -> None:
    tool = {"type": "function", "function": {"name": "count", "parameters": {"type": "array", "items": {}}}}
    found = error(surface.chat(tools=[tool], tool_choice="required"), 400, code="invalid_schema", param="tools")
    assert "`type` at #: the arguments of a call must be an object" in found["message"]


def test_a_tool_that_cannot_be_held_is_no_concern_of_another_s_call(surface: Surface) -> None:
    (choice,) = chat_answer(surface.chat(tools=[ALARM, BROWSE], tool_choice=NAMED, max_tokens=100))["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "set_alarm"


@pytest.mark.parametrize("arguments", ["{", "", "null", "[]", '{"a": "\\ud800"}'])
def test_an_earlier_call_with_odd_arguments_is_no_failure(surface: Surface, arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "set_alarm", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "another", "content": "done"},
    ]
    reply = surface.chat(messages=messages)
    if reply.status != 200:
        error(reply, 400)


def test_no_call_is_made_if_none_is_allowed(surface: Surface) -> None:
    (choice,) = chat_answer(surface.chat(tools=[ALARM], tool_choice="none"))["choices"]
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] in ("stop", "length")


@pytest.mark.parametrize("choice", ["auto", None])
def test_a_call_is_made_or_not(surface: Surface, choice: str | None) -> None:
    chat_answer(surface.chat(tools=[ALARM], tool_choice=choice, max_tokens=100))


def test_a_function_without_parameters_is_called_with_an_empty_object(surface: Surface) -> None:
    answer = chat_answer(surface.chat("stop the music", tools=[NO_ARGUMENTS], tool_choice="required", max_tokens=60))
    for call in answer["choices"][0]["message"]["tool_calls"]:
        assert isinstance(json.loads(call["function"]["arguments"]), dict)


@pytest.mark.parametrize("parallel", [True, False])
def test_one_call_at_most_unless_they_may_be_parallel(surface: Surface, parallel: bool) -> None:
    fields = {"tools": [ALARM, LIGHT], "tool_choice": "required", "parallel_tool_calls": parallel, "max_tokens": 100}
    calls = chat_answer(surface.chat(**fields))["choices"][0]["message"]["tool_calls"]
    assert len(calls) == 1 or parallel


def test_the_result_of_a_call_may_be_sent_back(surface: Surface) -> None:
    fields = {"tools": [ALARM], "max_tokens": 60}
    asked = {"role": "user", "content": "wake me up at six am"}
    made = chat_answer(surface.chat(**fields, tool_choice="required"))["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": made["tool_calls"][0]["id"], "content": '{"ok": true}'}
    chat_answer(surface.chat(**fields, messages=[asked, made, result], tool_choice="none"))
    in_parts = {**result, "content": [{"type": "text", "text": "done"}]}
    chat_answer(surface.chat(**fields, messages=[asked, made, in_parts], tool_choice="none"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ALARM], "tool_choice": {"type": "function", "function": {"name": "other"}}}, None),
        ({"tools": [ALARM], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [ALARM, ALARM]}, "tools[1].function.name"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "retrieval"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [ALARM], "tool_choice": {"type": "web_search"}}, "tool_choice"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"grammar": "root ::= [a-z]"}, "grammar"),
        ({"tools": {}}, "tools"),
        ({"functions": [{"name": "a"}]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, None),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_an_impossible_demand_is_400(surface: Surface, fields: dict[str, object], param: str | None) -> None:
    found = error(surface.chat(**fields), 400)
    assert param in (None, found["param"]), found


# --- JSON ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_json_object_is_an_object(surface: Surface, stream: bool) -> None:
    """Unless the token limit cuts it short."""
    reply = surface.chat(response_format={"type": "json_object"}, max_tokens=200, stream=stream)
    if stream:
        chunks = chat_stream(reply)
        text, reason = streamed_text(chunks), parts(chunks)[-1]["finish_reason"]
    else:
        chat_answer(reply)
        text, reason = reply.text, reply.json["choices"][0]["finish_reason"]
    assert text.lstrip().startswith("{")
    assert reason == "length" or isinstance(json.loads(text), dict)


def test_a_json_object_with_a_schema_obeys_it(surface: Surface) -> None:
    reply = surface.chat(response_format={"type": "json_object", "schema": SCHEMA}, max_tokens=100)
    jsonschema.validate(json.loads(reply.text), SCHEMA)


ODD = [
    {"enum": ["C:\\new\\table"]},
    {"enum": ['5"', "a\tb"]},
    {"enum": ["👍", "👎"]},
    {"type": "string", "pattern": "^.{14}$"},
    {"type": "string", "pattern": "^(?:cat|dog)$"},
    {"type": "string", "pattern": "^\\d{5}$"},
    {"allOf": [{"$ref": "#/$defs/C"}]},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"type": "integer", "minimum": 1, "maximum": 2**53},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 2},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "date"},
]


@pytest.mark.parametrize("schema", ODD, ids=json.dumps)
def test_an_odd_schema_is_obeyed_too(surface: Surface, schema: dict[str, Any]) -> None:
    """Sampled hot, as a response and as a call's arguments."""
    whole = {
        "type": "object",
        "properties": {"s": schema},
        "required": ["s"],
        "additionalProperties": False,
        "$defs": {"C": {"enum": ["x", "y"]}},
    }
    fields = {"temperature": 1.5, "seed": 7, "max_tokens": 200}
    answer = chat_answer(surface.chat(response_format=form(whole), **fields))["choices"][0]
    one = {"type": "function", "function": {"name": "f", "parameters": whole}}
    called = chat_answer(surface.chat(tools=[one], tool_choice="required", **fields))["choices"][0]
    texts = [answer["message"]["content"]] if answer["finish_reason"] == "stop" else []
    if called["finish_reason"] == "tool_calls":
        texts += [call["function"]["arguments"] for call in called["message"]["tool_calls"]]
    assert texts
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    for text in texts:
        jsonschema.validate(json.loads(text), whole, format_checker=checker)


@pytest.mark.parametrize("strict", [True, False, None])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_obeys_its_schema(surface: Surface, strict: bool | None, stream: bool) -> None:
    reply = surface.chat(response_format=form(SCHEMA, strict=strict), max_tokens=100, stream=stream)
    jsonschema.validate(json.loads(streamed_text(chat_stream(reply)) if stream else reply.text), SCHEMA)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 3},
        {"type": "string", "enum": ["yes", "no"]},
        {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        {
            "$defs": {"step": {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}},
            "type": "object",
            "properties": {"steps": {"type": "array", "items": {"$ref": "#/$defs/step"}, "maxItems": 2}},
            "required": ["steps"],
            "additionalProperties": False,
        },
    ],
    ids=["array", "enum", "any-of", "reference"],
)
def test_schemas_of_other_forms(surface: Surface, schema: dict[str, object]) -> None:
    reply = surface.chat(response_format=form(schema), max_tokens=120)
    chat_answer(reply)
    jsonschema.validate(json.loads(reply.text), schema)


@pytest.mark.parametrize(
    ("response_format", "param"),
    [
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": []}}, "response_format.json_schema.schema"),
        ({"type": "xml"}, "response_format.type"),
        ({}, "response_format.type"),
        ("json_object", "response_format"),
        (form({"type": "object", "properties": {"a": {"type": "nonsense"}}}), None),
        (form({"$ref": "#/nowhere"}), None),
    ],
    ids=["no-schema", "array", "unknown", "empty", "string", "bad-type", "bad-reference"],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_invalid_format_is_400(surface: Surface, response_format: object, param: str | None, stream: bool) -> None:
    found = error(surface.chat(response_format=response_format, stream=stream), 400)
    assert param in (None, found["param"]), found
