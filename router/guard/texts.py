"""Every text of a request, in one order: for the facts about them and for their masks."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Final, TypeVar

import msgspec

from ..types import FilePart, Message, Part, Request, ResponseFormat, TextPart, Tool, ToolCall

Change = Callable[[str], str]
"""A function that gets each text, and returns it, or another one in its place."""
_STRUCT = TypeVar("_STRUCT", bound=msgspec.Struct)
_LONG_NUMBER: Final = re.compile(r"\d{12,19}")  # a card as a JSON number
_BYTES: Final = frozenset({"file_data", "file_id"})  # keys of a file whose values are not texts


def with_texts(request: Request, change: Change) -> Request:
    """Return the request with other texts: messages, calls, tools, prompts, formats, and fields that are passed on; not
    the names of tools and roles, nor audio, images and the bytes of files (`has_unread`).
    """
    return _replaced(
        request,
        messages=tuple([_message(one, change) for one in request.messages]),
        prompts=tuple([change(one) if isinstance(one, str) else one for one in request.prompts]),
        tools=tuple([_tool(one, change) for one in request.tools]) if request.tools else request.tools,
        response_format=None if request.response_format is None else _format(request.response_format, change),
        stop=tuple([change(one) for one in request.stop]) if request.stop else request.stop,
        suffix=None if request.suffix is None else change(request.suffix),
        user=None if request.user is None else change(request.user),
        extra=_json(request.extra, change),
    )


def text_length(request: Request) -> int:
    """Return the number of characters of a request's texts."""
    lengths: list[int] = []

    def see(text: str) -> str:
        lengths.append(len(text))
        return text

    with_texts(request, see)
    return sum(lengths)


def has_unread(request: Request) -> bool:
    """Return whether a part of the request is not a text: audio, an image, a file, or the ids of tokens."""
    if any(not isinstance(prompt, str) for prompt in request.prompts):
        return True
    contents = (message.content for message in request.messages if type(message.content) is tuple)
    return any(not isinstance(part, TextPart) for content in contents for part in content)


def _message(message: Message, change: Change) -> Message:
    content = message.content
    if isinstance(content, str):
        content = change(content)
    elif content is not None:
        content = tuple([_part(part, change) for part in content])
    calls = tuple([_call(one, change) for one in message.tool_calls]) if message.tool_calls else ()
    name = None if message.name is None else change(message.name)
    return _replaced(message, content=content, name=name, tool_calls=calls, extra=_json(message.extra, change))


def _part(part: Part, change: Change) -> Part:
    if isinstance(part, TextPart):
        return _replaced(part, text=change(part.text), extra=_json(part.extra, change))
    if isinstance(part, FilePart):
        return _replaced(part, document=_json(part.document, change, _BYTES), extra=_json(part.extra, change))
    return _replaced(part, extra=_json(part.extra, change))


def _call(call: ToolCall, change: Change) -> ToolCall:
    return _replaced(call, arguments=_json(call.arguments, change), extra=_json(call.extra, change))


def _tool(tool: Tool, change: Change) -> Tool:
    parameters, extra = _json(tool.parameters, change), _json(tool.extra, change)
    return _replaced(tool, description=change(tool.description), parameters=parameters, extra=extra)


def _format(form: ResponseFormat, change: Change) -> ResponseFormat:
    return _replaced(form, schema=_json(form.schema, change), description=change(form.description))


def _replaced(struct: _STRUCT, **fields: object) -> _STRUCT:
    """Return the struct with these fields, itself if none differs."""
    if all(getattr(struct, name) == value for name, value in fields.items()):
        return struct
    return msgspec.structs.replace(struct, **fields)


def _json(document: str, change: Change, skipped: Collection[str] = ()) -> str:
    """Return a JSON document with other texts; what is not JSON is one text. `skipped`: keys whose values stay."""
    if not document or document == "{}":
        return document
    try:
        value = msgspec.json.decode(document)
    except (msgspec.DecodeError, RecursionError):
        return change(document)
    changed = _value(value, change, skipped)
    return document if changed == value else msgspec.json.encode(changed).decode()


def _value(value: object, change: Change, skipped: Collection[str]) -> object:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): one if key in skipped else _value(one, change, skipped) for key, one in value.items()}
    if isinstance(value, list):
        return [_value(one, change, skipped) for one in value]
    if isinstance(value, int) and not isinstance(value, bool) and _LONG_NUMBER.fullmatch(text := str(value)):
        changed = change(text)
        return value if changed == text else changed
    return value
