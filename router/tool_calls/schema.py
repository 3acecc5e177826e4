"""What constrains an answer: the JSON schema of the request's response format or tools, or the text that a function
call copies its arguments from."""

from __future__ import annotations

import json
from typing import Final

import msgspec

from ..errors import InvalidGrammar
from ..types import Request, TextPart, Tool

ANY_OBJECT: Final = '{"type":"object"}'
_NO_ARGUMENTS: Final = '{"type":"object","properties":{},"additionalProperties":false}'

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None


def tool_schema(request: Request) -> str:
    """JSON schema text, or "" where the answer is free. Raises InvalidGrammar for a schema that cannot be embedded.

    1. a call is required, or named → one of those calls
    2. tools may be called, and the text has a schema → the text or a call
    3. only a response format → its schema
    """
    called = _callable(request)
    wanted = _response_schema(request)
    if called and request.tool_choice.mode in ("required", "function"):  # (1)
        return _any_of([], called)
    if called and wanted and wanted != ANY_OBJECT:  # (2); a call is an object too, so "any object" needs no choice
        return _any_of([wanted], called)
    return wanted  # (3)


def copy_source_of(request: Request) -> str | None:
    """Return the text that a call's arguments are copied from: the last user message.

    None where the request constrains the answer itself, by a response format (of any type, `text` included) or by a
    required tool call, and where it is not a chat.
    """
    if request.kind != "chat" or request.response_format is not None:
        return None
    if request.tools and request.tool_choice.mode in ("required", "function"):
        return None
    content = next((message.content for message in reversed(request.messages) if message.role == "user"), None)
    if content is None or isinstance(content, str):
        return content
    return "\n".join(part.text for part in content if isinstance(part, TextPart))


def _callable(request: Request) -> tuple[Tool, ...]:
    choice = request.tool_choice
    if choice.mode == "none":
        return ()
    if choice.mode == "function":
        return tuple([tool for tool in request.tools if tool.name == choice.name])
    return request.tools


def _response_schema(request: Request) -> str:
    wanted = request.response_format
    if wanted is None or wanted.kind == "text":
        return ""
    return ANY_OBJECT if wanted.kind == "json_object" else wanted.schema


def _any_of(texts: list[str], tools: tuple[Tool, ...]) -> str:
    definitions: list[str] = []
    branches = [_embedded(text, "answer", definitions) for text in texts]
    branches += [_call(tool, f"tool{at}", definitions) for at, tool in enumerate(tools)]
    shared = f',"$defs":{{{",".join(definitions)}}}' if definitions else ""
    if len(branches) == 1:
        return f"{branches[0][:-1]}{shared}}}"
    return f'{{"anyOf":[{",".join(branches)}]{shared}}}'


def _call(tool: Tool, slot: str, definitions: list[str]) -> str:
    arguments = _NO_ARGUMENTS if tool.parameters == "{}" else _embedded(tool.parameters, slot, definitions)
    return (
        f'{{"type":"object","properties":{{"name":{{"const":{json.dumps(tool.name)}}},"arguments":{arguments}}},'
        f'"required":["name","arguments"],"additionalProperties":false}}'
    )


def _embedded(schema: str, slot: str, definitions: list[str]) -> str:
    """`schema` for use inside another. Its references count from its own root, so one that has any is moved to
    ``#/$defs/<slot>`` whole, and its references with it."""
    if '"$ref"' not in schema:
        return schema
    try:
        moved = msgspec.json.encode(_moved(msgspec.json.decode(schema), f"#/$defs/{slot}")).decode()
    except (RecursionError, msgspec.DecodeError) as error:
        raise InvalidGrammar(f"A JSON schema cannot be used: {error}. Send fewer nested levels.") from None
    definitions.append(f'"{slot}":{moved}')
    return f'{{"$ref":"#/$defs/{slot}"}}'


def _moved(value: Json, root: str) -> Json:
    if isinstance(value, list):
        return [_moved(item, root) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _reference(item, root) if key == "$ref" else _moved(item, root) for key, item in value.items()}


def _reference(value: Json, root: str) -> Json:
    if isinstance(value, str):
        return root + value[1:] if value.startswith("#") else value
    return _moved(value, root)  # a property that happens to be named so
