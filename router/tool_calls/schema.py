"""What constrains an answer: a JSON schema (the client's response format, a call of its tools, or either), or the
text that the arguments of a function call are copied from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

import msgspec

from ..errors import InvalidGrammar
from ..types import Message, Request, TextPart, Tool
from .formats import NO_FRAME, PLAIN, CallFrame, ToolFormat

ANY_OBJECT: Final = '{"type":"object"}'
_NO_ARGUMENTS: Final = '{"type":"object","properties":{},"additionalProperties":false}'

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None


def answer_schema(request: Request, *, calls_only: bool = False, form: ToolFormat = PLAIN) -> str:
    """Return the JSON schema as text, "" if the answer is unconstrained.

    1. A call is required, or `calls_only` and no response format: one of the callable tools.
    2. Tools may be called, and the text has a schema: the text or a call.
    3. Only a response format: its schema.

    Args:
        calls_only: the model answers with calls of functions that it was trained on; the request's own tools take
            precedence over those.
        form: of the model's calls.

    Raises:
        InvalidGrammar: a schema is nested too deeply to be embedded.
    """
    tools = _callable_tools(request)
    text_schema = _text_schema(request)
    if tools and (_requires_call(request) or (calls_only and request.response_format is None)):  # (1)
        return _any_of([], tools, form)
    if tools and text_schema and text_schema != ANY_OBJECT:  # (2); a call is an object too, so ANY_OBJECT allows it
        return _any_of([text_schema], tools, form)
    return text_schema  # (3)


def call_frame(request: Request, form: ToolFormat) -> CallFrame:
    """Return what stands around the calls that `answer_schema` requires; nothing if it requires none.

    Several calls are allowed if the client allows them and names no function.
    """
    if not (request.tools and _requires_call(request)):
        return NO_FRAME
    return form.frame_of(several=request.parallel_tool_calls and request.tool_choice.mode == "required")


def copy_source_of(request: Request) -> str | None:
    """Return the text that a call's arguments are copied from: the last user message.

    None if the request constrains the answer itself, by a response format (of any type, `text` included) or by a
    required tool call, or is not a chat.
    """
    if request.kind != "chat" or request.response_format is not None:
        return None
    if request.tools and _requires_call(request):
        return None
    return last_user_text(request.messages)


def last_user_text(messages: Sequence[Message]) -> str | None:
    """Return the text of the last user message, None if there is none."""
    content = next((message.content for message in reversed(messages) if message.role == "user"), None)
    if content is None or isinstance(content, str):
        return content
    return "\n".join(part.text for part in content if isinstance(part, TextPart))


def _requires_call(request: Request) -> bool:
    return request.tool_choice.mode in ("required", "function")


def _callable_tools(request: Request) -> tuple[Tool, ...]:
    choice = request.tool_choice
    if choice.mode == "none":
        return ()
    if choice.mode == "function":
        return tuple([tool for tool in request.tools if tool.name == choice.name])
    return request.tools


def _text_schema(request: Request) -> str:
    requested = request.response_format
    if requested is None or requested.kind == "text":
        return ""
    return ANY_OBJECT if requested.kind == "json_object" else requested.schema


def _any_of(texts: list[str], tools: tuple[Tool, ...], form: ToolFormat) -> str:
    definitions: list[str] = []
    branches = [_embedded(text, "answer", definitions) for text in texts]
    branches += [_call(tool, f"tool{at}", definitions, form.arguments_key) for at, tool in enumerate(tools)]
    shared = f',"$defs":{{{",".join(definitions)}}}' if definitions else ""
    if len(branches) == 1:
        return f"{branches[0][:-1]}{shared}}}"
    return f'{{"anyOf":[{",".join(branches)}]{shared}}}'


def _call(tool: Tool, name: str, definitions: list[str], key: str) -> str:
    arguments = _NO_ARGUMENTS if tool.parameters == "{}" else _embedded(tool.parameters, name, definitions)
    return (
        f'{{"type":"object","properties":{{"name":{{"const":{json.dumps(tool.name)}}},"{key}":{arguments}}},'
        f'"required":["name","{key}"],"additionalProperties":false}}'
    )


def _embedded(schema: str, name: str, definitions: list[str]) -> str:
    """Return `schema` for use inside another one.

    References start at the schema's own root, so a schema with references moves to ``#/$defs/<name>``, and its
    references are rewritten.
    """
    if '"$ref"' not in schema:
        return schema
    try:
        moved = msgspec.json.encode(_move_references(msgspec.json.decode(schema), f"#/$defs/{name}")).decode()
    except (RecursionError, msgspec.DecodeError) as error:
        raise InvalidGrammar(f"A JSON schema cannot be used: {error}. Send fewer nested levels.") from None
    definitions.append(f'"{name}":{moved}')
    return f'{{"$ref":"#/$defs/{name}"}}'


def _move_references(value: Json, root: str) -> Json:
    if isinstance(value, list):
        return [_move_references(item, root) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _move_reference(item, root) if key == "$ref" else _move_references(item, root)
        for key, item in value.items()
    }


def _move_reference(value: Json, root: str) -> Json:
    if isinstance(value, str):
        return root + value[1:] if value.startswith("#") else value
    return _move_references(value, root)  # a property that happens to be called $ref
