"""JSON schemas as grammars: what is accepted holds for every answer, what cannot be held is named with its path."""

from __future__ import annotations

import json

import pytest

from causeway_server.models.constraints.grammars import Fault, enforceable_arguments, fault_of, framed_grammar
from causeway_server.router.errors import InvalidGrammar
from causeway_server.router.tool_calls.schema import answer_schema
from causeway_server.router.types import Request, Tool, ToolChoice

from .bytewise import CORPUS, accepts, matcher, refused

NODE: dict[str, object] = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "children": {"type": "array", "items": {"$ref": "#/$defs/Node"}}},
    "required": ["name", "children"],
}
ITEM_A = {"type": "object", "properties": {"kind": {"const": "a"}, "n": {"type": "integer"}}, "required": ["kind"]}
ITEM_B = {"type": "object", "properties": {"kind": {"const": "b", "default": "b"}, "t": {"type": "string"}}}


def inside(schema: object, **more: object) -> dict[str, object]:
    return {"type": "object", "properties": {"s": schema}, "required": ["s"], "additionalProperties": False, **more}


ANY_OF_KINDS = {"oneOf": [ITEM_A, ITEM_B], "discriminator": {"propertyName": "kind"}}
PAIR = {"type": "array", "prefixItems": [{"type": "integer"}, {"type": "string"}], "items": False}
NAMED = {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "integer"}}
X_ONLY = {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False}
OPEN = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}}
ODD = ["C:\\new\\table", "a\tb", '5"', "👍", "\u0001"]
HELD: list[tuple[object, list[object], list[object]]] = [  # a schema, values of it, values that are not
    ({"enum": ODD}, [*ODD], ["C"]),
    ({"type": "string", "pattern": "^cat|dog$"}, ["cat x", "hot dog"], ["dog x"]),
    ({"type": "string", "pattern": "^.{14}$"}, ['"' * 14], ["short"]),
    ({"type": "string", "pattern": "^[^a]{3}$"}, ["\\\"'"], ["xax"]),
    ({"type": "string", "pattern": "^\\d{5}$"}, ["12345"], ["1234", "١٢٣٤٥"]),
    ({"type": "string", "pattern": "b"}, ["abc"], ["a"]),
    ({"type": "string", "pattern": "^(?:ab)+$"}, ["abab"], ["aba"]),
    ({"type": "string", "pattern": "^\\W\\D$"}, ["- "], ["é٣", "a-"]),
    ({"type": "string", "pattern": "^[\\s\\S]{2}$"}, ["\n "], ["a"]),
    ({"pattern": "b"}, ["ab", 3], ["a"]),
    ({"allOf": [{"$ref": "#/$defs/C"}]}, ["x"], [{}, "z"]),
    ({"$ref": "#/$defs/C", "minLength": 2}, ["yy"], ["x"]),
    ({"type": "number", "minimum": 0, "maximum": 1}, [0, 0.25, 1], [2, -0.5, 1.5]),
    ({"type": "number", "exclusiveMaximum": 1, "minimum": 0}, [0.999], [1, 1.0]),
    ({"type": "integer", "minimum": 1}, [1, 70], [0, -1]),
    ({"type": "integer", "maximum": 9223372036854775807}, [5], [9223372036854775808]),
    ({"type": "number"}, [0.125, -12.5, 2**53 - 1], [2**53]),
    ({"type": "integer"}, [0, 1 - 2**53], [2**53]),
    ({"type": "integer", "multipleOf": 7}, [0, 77], [1]),
    ({"type": "number", "multipleOf": 0.25}, [1.25], [1.3]),
    (PAIR, [[1, "a"], [1]], [[1, "a", 2]]),
    ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 1}, [[3]], [[3, 3]]),
    ({"type": "array", "items": {"type": "null"}, "maxItems": 10**9}, [[None] * 9], [[1]]),
    ({"type": "object", "minProperties": 1}, [{"a": 1}], [{}]),
    (NAMED, [{"a": 1}], [{"c": 1}]),
    ({"type": "object", "propertyNames": {"pattern": "^x"}}, [{"x": 1}], [{"y": 1}]),
    (X_ONLY, [{"x1": 1}], [{"x1": "a"}, {"y": 1}]),
    (OPEN, [{"a": 1, "b": "x"}], [{"a": "x"}]),
    ({"type": "object", "properties": {"a\nb": {"type": "integer"}}}, [{"a\nb": 1}], [{"a\nb": "x"}]),
    ({"type": "object", "properties": {"a": {}}, "unevaluatedProperties": False}, [{"a": 1}], [{"b": 1}]),
    (ANY_OF_KINDS, [{"kind": "a"}, {"kind": "b"}], [{"kind": "c"}, {}]),
    ({"oneOf": [{"$ref": "#/$defs/C"}, {"type": "null"}]}, ["x", None], [3]),
    ({"type": ["string", "null"], "minLength": 2, "maxLength": 3}, [None, "ab"], ["a", 1]),
    ({"type": "string", "format": "date"}, ["2024-02-29"], ["2023-02-29", "0000-01-01", "2023-02-30"]),
    ({"type": "string", "format": "date", "pattern": "^2"}, ["2024-02-29"], ["1999-01-01"]),
    ({"type": "string", "format": "date-time"}, ["2024-02-29T10:00:00Z"], ["2024-02-29T10:00:60Z", "2024-02-29"]),
    ({"type": "string", "format": "duration"}, ["P1DT2H", "PT5M", "P3W"], ["P", "P1DT", "PT5", "P12345678D"]),
    ({"type": "string", "format": "ipv4"}, ["127.0.0.1"], ["127.0.0.256", "127.0.0.01"]),
    ({"type": "string", "format": "uuid"}, ["7eac4aa9-edfb-3bec-d657-008655ec7cb9"], ["7eac4aa9"]),
    ({"type": "string", "format": "int32", "deprecated": True, "x-mine": {"not": 1}}, ["any"], [3]),
    ({"$ref": "#/$defs/Node"}, [{"name": "a", "children": [{"name": "b", "children": []}]}], [{"name": "a"}]),
    ({"const": {"a": [1, None, 1.5]}}, [{"a": [1, None, 1.5]}], [{"a": [1]}]),
    ({}, [1, "a", None, [{}]], []),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("schema", "values", "others"), HELD, ids=lambda one: json.dumps(one)[:60])
def test_what_is_accepted_holds(schema: object, values: list[object], others: list[object]) -> None:
    whole = inside(schema, **{"$defs": {"C": {"enum": ["x", "yy"]}, "Node": NODE}})
    assert fault_of(json.dumps(whole)) is None
    assert [value for value in values if not accepts(whole, {"s": value})] == []
    assert [value for value in others if accepts(whole, {"s": value})] == []
    assert refused(whole, 25) == []


DECIMALS: list[tuple[str, list[str], list[str]]] = [  # what pydantic 2.12 writes for Decimal, strings of it, others
    (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$", ["14.50", "-3"], ["", "+", "1e3", "14 euros"]),
    (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$", ["14.50", "3"], ["1.234", "."]),
    (r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,0}0*$", ["14"], ["1.5"]),
    (r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,8}|(?=[\d.]{1,9}0*$)\d*\.\d*0*$)", ["12345678"], ["123456789", "-"]),
    (r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,6}|(?=[\d.]{1,9}0*$)\d{0,6}\.\d{0,2}0*$)", ["123456.78"], ["1.234", "x"]),
    (r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,0}|(?=[\d.]{1,3}0*$)\d{0,0}\.\d{0,2}0*$)", ["0.25", "0"], ["1.25"]),
]


@pytest.mark.parametrize(("pattern", "values", "others"), DECIMALS)
def test_a_decimal_of_pydantic_holds(pattern: str, values: list[str], others: list[str]) -> None:
    """Its look-ahead is replaced, so that the answers are a part of what it allows."""
    whole = inside({"anyOf": [{"type": "number"}, {"type": "string", "pattern": pattern}]})
    assert fault_of(json.dumps(whole)) is None
    assert [value for value in values if not accepts(whole, {"s": value})] == []
    assert [value for value in others if accepts(whole, {"s": value})] == []
    assert accepts(whole, {"s": 14.5})
    assert refused(whole, 25) == []


FLAG_NUMBER: list[object] = [{"type": "boolean"}, {"type": "integer"}]
EARLIER_DRAFTS: list[tuple[str, object, list[object], list[object]]] = [
    (
        "draft-07",
        {"type": "array", "items": FLAG_NUMBER, "additionalItems": False, "minItems": 2, "maxItems": 2},
        [[True, 1]],
        [[True], [1, True], [True, 1, 1]],
    ),
    (
        "draft-07",
        {"type": "array", "items": FLAG_NUMBER, "additionalItems": {"type": "null"}},
        [[], [True], [True, 1, None, None]],
        [[1], [True, 1, 1]],
    ),
    ("draft-07", {"type": "array", "items": FLAG_NUMBER}, [[True, 1, "x"]], [[1]]),
    ("draft-07", {"type": "array", "items": {"type": "null"}, "additionalItems": False}, [[None, None]], [[1]]),
    ("draft-07", {"anyOf": [{"type": "null"}, {"items": [{"items": [{"type": "null"}]}]}]}, [[[None]], None], [[[1]]]),
    (
        "draft-04",
        {"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 1, "exclusiveMaximum": False},
        [0.5, 1],
        [0, 1.5],
    ),
    ("draft-04", {"type": "integer", "exclusiveMaximum": True, "minimum": 3}, [3, 4], [2]),
]


@pytest.mark.parametrize(("draft", "schema", "values", "others"), EARLIER_DRAFTS, ids=lambda one: json.dumps(one)[:60])
def test_the_forms_of_earlier_drafts_hold(
    draft: str, schema: object, values: list[object], others: list[object]
) -> None:
    """The Vercel AI SDK sends draft 7, whose tuples are lists in `items`; OpenAPI 3.0 has the bounds of draft 4."""
    whole = inside(schema, **{"$schema": f"http://json-schema.org/{draft}/schema#"})
    assert fault_of(json.dumps(whole)) is None
    assert [value for value in values if not accepts(whole, {"s": value})] == []
    assert [value for value in others if accepts(whole, {"s": value})] == []
    assert refused(whole, 25) == []


REFUSED: list[tuple[object, str, str]] = [
    ({"type": "array", "uniqueItems": True}, "#/properties/s", "uniqueItems"),
    ({"not": {"type": "null"}}, "#/properties/s", "not"),
    ({"if": {"type": "null"}, "then": {}}, "#/properties/s", "if"),
    ({"type": "array", "items": {"contains": {"type": "null"}}}, "#/properties/s/items", "contains"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "#/properties/s", "dependentRequired"),
    ({"type": "object", "propertyNames": {"maxLength": 3}}, "#/properties/s", "propertyNames"),
    ({"type": "object", "minProperties": 2}, "#/properties/s", "minProperties"),
    ({"type": "object", "required": ["a", "b"], "maxProperties": 1}, "#/properties/s", "maxProperties"),
    ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "#/properties/s", "oneOf"),
    ({"anyOf": [{"type": "null"}, {"type": "string", "pattern": "a(?=b)"}]}, "#/properties/s/anyOf/1", "pattern"),
    ({"type": "string", "pattern": "^[a-z&&[^b]]$"}, "#/properties/s", "pattern"),
    ({"type": "string", "pattern": "\\bword\\b"}, "#/properties/s", "pattern"),
    ({"type": "string", "format": "regex"}, "#/properties/s", "format"),
    ({"type": "number", "multipleOf": 0.01}, "#/properties/s", "multipleOf"),
    ({"type": "array", "minItems": 10**9}, "#/properties/s", "minItems"),
    ({"enum": [2**53 + 1]}, "#/properties/s", "enum"),
    ({"enum": []}, "#/properties/s", "enum"),
    ({"anyOf": []}, "#/properties/s", "anyOf"),
    ({"type": "strnig"}, "#/properties/s", "type"),
    ({"$ref": "https://example.com/x.json"}, "#/properties/s", "$ref"),
    ({"$ref": "#/$defs/missing"}, "#/properties/s", "$ref"),
    (False, "#", "required"),
    ({"a/b~c": {}, "properties": {"a/b~c": {"not": {}}}}, "#/properties/s/properties/a~1b~0c", "not"),
]


@pytest.mark.parametrize(("schema", "path", "keyword"), REFUSED, ids=lambda one: json.dumps(one)[:60])
def test_what_cannot_be_held_is_named_with_its_path(schema: object, path: str, keyword: str) -> None:
    fault = fault_of(json.dumps(inside(schema)))
    assert fault is not None
    assert (fault.path, fault.keyword) == (path, keyword)
    assert f"`{keyword}` at {path}: " in fault.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense", "not JSON"),
        ("[]", "not an object"),
        ('{"items":' * 80 + "{}" + "}" * 80, "too deeply"),
        ('{"properties":{' + ",".join(f'"{i}":true' for i in range(30_000)) + "}}", "characters"),
    ],
)
def test_a_text_that_is_no_usable_schema_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidGrammar) as caught:
        framed_grammar(text)
    assert message in caught.value.message
    assert (caught.value.status, caught.value.code) == (400, "invalid_schema")


def test_a_name_cannot_be_spelled_twice() -> None:
    """By an escape of its letters: the second value would have another property's schema."""
    schema = inside(OPEN)
    assert accepts(schema, {"s": {"a": 1, "b": "x"}})
    raw = list(b'{"s":{"a":1,"\\u0061":"x"}}')
    assert matcher(schema).try_consume_tokens(raw) < len(raw)


def test_properties_that_were_not_asked_for_are_not_written() -> None:
    """Unless the schema is put together of parts, or says that it wants them."""
    listed = {"type": "object", "properties": {"a": {"type": "integer"}}}
    assert not accepts(listed, {"a": 1, "b": 2})
    assert accepts({**listed, "additionalProperties": True}, {"a": 1, "b": 2})
    parts = {"allOf": [listed, {"type": "object", "properties": {"b": {"type": "integer"}}}]}
    assert accepts(parts, {"a": 1, "b": 2})


def test_a_root_without_a_type_is_an_object() -> None:
    assert accepts({"properties": {"a": {}}}, {"a": 1})
    assert not accepts({"properties": {"a": {}}}, 3)
    assert not accepts({}, 3)
    assert accepts({"enum": [3]}, 3)


LISTS = {"type": "array", "items": {"type": "integer"}}
OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "held"),
    [
        (OBJECT, OBJECT),
        ({"properties": {"a": {}}}, {"type": "object", "properties": {"a": {}}}),
        ({"$ref": "#/$defs/A", "$defs": {"A": OBJECT}}, None),
        ({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": OBJECT}}, None),
        ({"enum": [{"a": 1}, {"a": 2}]}, None),
        ({"anyOf": [OBJECT, {"type": "object"}]}, None),
    ],
)
def test_the_arguments_of_a_call_are_an_object(schema: object, held: object) -> None:
    """`held`: None for the schema as it is."""
    found = enforceable_arguments(json.dumps(schema))
    assert isinstance(found, str)
    assert json.loads(found) == (schema if held is None else held)


@pytest.mark.parametrize(
    "schema",
    [
        LISTS,
        {"type": ["object", "null"]},
        {"$ref": "#/$defs/A", "$defs": {"A": LISTS}},
        {"anyOf": [OBJECT, {"type": "null"}]},
        {"enum": [{"a": 1}, 3]},
        {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}},
    ],
)
def test_arguments_that_may_be_something_else_are_refused(schema: object) -> None:
    fault = enforceable_arguments(json.dumps(schema))
    assert isinstance(fault, Fault)
    assert fault.path == "#"


def test_a_large_schema_is_held() -> None:
    """900 optional properties, 39 kB."""
    names = [f"a property with a name {at}" for at in range(900)]
    schema = {"type": "object", "properties": {name: {"type": "boolean"} for name in names}}
    assert accepts(schema, {names[7]: True, names[800]: False})


@pytest.mark.slow
@pytest.mark.parametrize("schema", CORPUS.values(), ids=CORPUS)
def test_what_generators_emit_holds(schema: dict[str, object]) -> None:
    """60 models of pydantic, zod and an OpenAPI generator. Sets alone are refused: their items must be unique."""
    if '"uniqueItems"' in json.dumps(schema):
        fault = fault_of(json.dumps(schema))
        assert fault is not None
        assert fault.keyword == "uniqueItems"
    else:
        assert refused(schema, 12) == []
        tool = Tool("f", parameters=json.dumps(schema))
        call = Request(kind="chat", model="m", tools=(tool,), tool_choice=ToolChoice("function", "f"))
        assert fault_of(answer_schema(call)) is None
    assert sum('"uniqueItems"' in json.dumps(one) for one in CORPUS.values()) <= len(CORPUS) // 20
