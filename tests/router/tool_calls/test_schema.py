"""The schema of an answer, and the text that a call copies."""

from __future__ import annotations

import json

import msgspec
import pytest

from causeway_server.router.errors import InvalidGrammar
from causeway_server.router.tool_calls.schema import answer_schema, copy_source_of
from causeway_server.router.types import ImagePart, Message, Request, ResponseFormat, TextPart, Tool, ToolChoice

LAMP = Tool("lamp", parameters='{"type":"object","properties":{"on":{"type":"boolean"}}}')
FAN = Tool("fan")
FORMAT = ResponseFormat("json_schema", "s", '{"type":"object","properties":{"z":{},"a":{}}}')

AUTO = ToolChoice()


def schema(*tools: Tool, choice: ToolChoice = AUTO, wanted: ResponseFormat | None = None) -> dict[str, object] | str:
    text = answer_schema(Request(kind="chat", model="m", tools=tools, tool_choice=choice, response_format=wanted))
    return json.loads(text) if text else ""


def call(name: str, arguments: object) -> dict[str, object]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


@pytest.mark.parametrize(("choice", "constrained"), [(AUTO, True), (ToolChoice("none"), False)])
def test_a_model_that_only_answers_calls_answers_with_an_offered_tool(choice: ToolChoice, constrained: bool) -> None:
    """Its own functions are not what the client offers. A response format takes precedence."""
    request = Request(kind="chat", model="m", tools=(LAMP, FAN), tool_choice=choice)
    text = answer_schema(request, calls_only=True)
    assert (json.loads(text) == {"anyOf": [LAMP_CALL, FAN_CALL]}) if constrained else text == ""
    for wanted, expected in ((ResponseFormat("text"), ""), (ResponseFormat("json_object"), '{"type":"object"}')):
        assert answer_schema(msgspec.structs.replace(request, response_format=wanted), calls_only=True) == expected


LAMP_CALL = call("lamp", {"type": "object", "properties": {"on": {"type": "boolean"}}})
FAN_CALL = call("fan", {"type": "object", "properties": {}, "additionalProperties": False})


@pytest.mark.parametrize("wanted", [None, ResponseFormat("text")])
def test_an_unconstrained_answer_has_no_schema(wanted: ResponseFormat | None) -> None:
    assert schema(wanted=wanted) == ""
    assert schema(LAMP, wanted=wanted) == ""
    assert schema(LAMP, choice=ToolChoice("none"), wanted=wanted) == ""


def test_a_response_format_is_its_schema() -> None:
    assert schema(wanted=ResponseFormat("json_object")) == {"type": "object"}
    request = Request(kind="chat", model="m", response_format=FORMAT)
    assert answer_schema(request) == FORMAT.schema


def test_a_required_call_is_one_of_the_tools() -> None:
    """A tool without parameters takes an empty object."""
    assert schema(LAMP, FAN, choice=ToolChoice("required")) == {"anyOf": [LAMP_CALL, FAN_CALL]}


def test_a_named_call_is_that_tool_alone() -> None:
    """A response format does not matter: the answer is a call."""
    assert schema(LAMP, FAN, choice=ToolChoice("function", "fan"), wanted=FORMAT) == FAN_CALL


def test_a_format_with_tools_is_either() -> None:
    """Under tool_choice none only the format."""
    assert schema(LAMP, wanted=FORMAT) == {"anyOf": [json.loads(FORMAT.schema), LAMP_CALL]}
    assert schema(LAMP, wanted=ResponseFormat("json_object")) == {"type": "object"}
    assert schema(LAMP, choice=ToolChoice("none"), wanted=FORMAT) == json.loads(FORMAT.schema)


def test_references_follow_their_schema() -> None:
    tree = Tool(
        "tree",
        parameters='{"properties":{"t":{"$ref":"#/$defs/T"},"$ref":{"type":"null"}},'
        '"$defs":{"T":{"properties":{"up":{"$ref":"#"},"l":{"items":[{"$ref":"#/$defs/T"}]}}}}}',
    )
    built = schema(LAMP, tree, choice=ToolChoice("required"))
    assert isinstance(built, dict)
    assert built["anyOf"] == [LAMP_CALL, call("tree", {"$ref": "#/$defs/tool1"})]
    assert built["$defs"] == {
        "tool1": {
            "properties": {"t": {"$ref": "#/$defs/tool1/$defs/T"}, "$ref": {"type": "null"}},
            "$defs": {
                "T": {
                    "properties": {"up": {"$ref": "#/$defs/tool1"}, "l": {"items": [{"$ref": "#/$defs/tool1/$defs/T"}]}}
                }
            },
        }
    }
    alone = schema(tree, choice=ToolChoice("required"))
    assert isinstance(alone, dict)
    assert alone["properties"]["arguments"] == {"$ref": "#/$defs/tool0"}  # type: ignore[index]
    assert "tool0" in alone["$defs"]  # type: ignore[operator]


def test_a_schema_too_deep_to_move_is_refused() -> None:
    deep = Tool("deep", parameters='{"$ref":"#","x":' + "[" * 5000 + "]" * 5000 + "}")
    with pytest.raises(InvalidGrammar):
        schema(deep, choice=ToolChoice("required"))


def chat(*messages: Message, **fields: object) -> Request:
    return Request(kind="chat", model="auto", messages=messages, **fields)  # type: ignore[arg-type]


def test_the_copy_source_is_the_last_user_message() -> None:
    """Text parts are its lines; other parts and other roles do not count."""
    first, last = Message("user", "one"), Message("user", (TextPart("two"), ImagePart("data:,"), TextPart("three")))
    assert copy_source_of(chat(Message("system", "be brief"), first, Message("assistant", "so"))) == "one"
    assert copy_source_of(chat(first, Message("assistant", "so"), last)) == "two\nthree"
    assert copy_source_of(chat(Message("system", "be brief"))) is None
    assert copy_source_of(chat(Message("user", None))) is None


def test_a_request_that_constrains_its_answer_has_no_copy_source() -> None:
    """By a response format, `text` included, or by a required call; optional tools change nothing."""
    message, tools = Message("user", "one"), (Tool("alarm_set"),)
    assert copy_source_of(chat(message, tools=tools)) == "one"
    assert copy_source_of(chat(message, tools=tools, tool_choice=ToolChoice("none"))) == "one"
    assert copy_source_of(chat(message, tools=tools, tool_choice=ToolChoice("required"))) is None
    assert copy_source_of(chat(message, tools=tools, tool_choice=ToolChoice("function", "alarm_set"))) is None
    for kind in ("text", "json_object", "json_schema"):
        assert copy_source_of(chat(message, response_format=ResponseFormat(kind))) is None
    assert copy_source_of(Request(kind="completion", model="auto", prompts=("one",))) is None
