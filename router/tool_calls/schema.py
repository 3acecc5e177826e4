"""Constraints on answers, and the forms in which model families write calls.

An answer is constrained by a JSON schema (the client's response format, a call of one of its tools, or both as
alternatives), or by the text from which the arguments of a function call are copied. The family is recognised by the
chat template of the model.
Sources: the templates of the models on Hugging Face, and the documentation of other servers: vLLM's
(features/tool_calling) and llama.cpp's (docs/function-calling.md).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, Literal

import msgspec

from ..errors import InvalidGrammar
from ..types import Chunk, Message, Request, TextPart, Tool


class CallFrame(msgspec.Struct, frozen=True):
    """The text before the first call, between two, and after the last. `between` is empty for one call."""

    before: str = ""
    between: str = ""
    after: str = ""


NO_FRAME: Final = CallFrame()


class ToolFormat(msgspec.Struct, frozen=True):
    """A family's form of required calls: a JSON object of `name` and `arguments_key` for each, inside `frame`.
    `several`: the frame for several calls, if that differs.
    """

    family: str
    arguments_key: Literal["arguments", "parameters"] = "arguments"
    frame: CallFrame = NO_FRAME
    several: CallFrame | None = None

    def frame_of(self, *, several: bool) -> CallFrame:
        """Return the frame of one call, or of several if the family has a form for that."""
        if several:
            return self.several or self.frame
        return msgspec.structs.replace(self.frame, between="")


PLAIN: Final = ToolFormat("plain")
HERMES: Final = ToolFormat(
    "hermes", frame=CallFrame("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>")
)
LLAMA: Final = ToolFormat("llama", "parameters", frame=CallFrame(between="; "))  # as vLLM's llama3_json reads several
MISTRAL: Final = ToolFormat("mistral", frame=CallFrame("[TOOL_CALLS][", ", ", "]"))
PHI: Final = ToolFormat("phi", frame=CallFrame("<|tool_call|>[", ", ", "]<|/tool_call|>"))
GEMMA: Final = ToolFormat("gemma", "parameters", several=CallFrame("[", ", ", "]"))

_SIGNS: Final = (
    ("[TOOL_CALLS]", MISTRAL),
    ("<tool_call>", HERMES),
    ("<|tool|>", PHI),
    ("<|tool_call|>", PHI),
    ("<|start_header_id|>", LLAMA),
    ("<|header_start|>", LLAMA),  # Llama 4
    ("<start_of_turn>", GEMMA),
)
"""The format for texts in a chat template; the first match wins, as Hermes' one for Llama 3 has both."""


def tool_format(template: str) -> ToolFormat:
    """Return the format of this chat template's family; `PLAIN`, JSON alone, for an unknown family."""
    return next((known for sign, known in _SIGNS if sign in template), PLAIN)


_OURS: Final = re.compile(r"call_[0-9a-f]{24}")


def call_id(identity: str, choice: int, index: int) -> str:
    """Return the id of call number `index` of an answer's choice, for a call written as text. An answer may reach
    several requests, whose ids must all differ. `identity`: the unique id of the request.
    """
    digest = blake2b(f"{identity}\0{choice}\0{index}".encode(), digest_size=12).hexdigest()
    return f"call_{digest}"


def with_own_ids(chunk: Chunk, identity: str) -> Chunk:
    """Return a chunk, possibly of another request's answer, with this request's call ids. Ids in another form come from
    an upstream, which may need them, and are kept.
    """
    if not chunk.tool_calls:
        return chunk
    calls = [
        msgspec.structs.replace(call, id=call_id(identity, chunk.index, call.index))
        if call.id is not None and _OURS.fullmatch(call.id)
        else call
        for call in chunk.tool_calls
    ]
    return msgspec.structs.replace(chunk, tool_calls=tuple(calls))


ANY_OBJECT: Final = '{"type":"object"}'
_NO_ARGUMENTS: Final = '{"type":"object","properties":{},"additionalProperties":false}'

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None


def answer_schema(request: Request, *, calls_only: bool = False, form: ToolFormat = PLAIN) -> str:
    """Return the JSON schema as text, "" if the answer is unconstrained. Raises InvalidGrammar if one is nested too
    deeply.

    1. A call is required, or `calls_only` and no response format: one of the callable tools.
    2. Tools may be called, and the text has a schema: the text or a call.
    3. Only a response format: its schema.

    `calls_only`: the model answers with calls of functions that it was trained on; the request's own tools take
    precedence.
    """
    tools = _callable_tools(request)
    text_schema = _text_schema(request)
    if tools and (_requires_call(request) or (calls_only and request.response_format is None)):  # (1)
        return _any_of([], tools, form)
    if tools and text_schema and text_schema != ANY_OBJECT:  # (2); a call is an object too, so ANY_OBJECT allows it
        return _any_of([text_schema], tools, form)
    return text_schema  # (3)


def call_frame(request: Request, form: ToolFormat) -> CallFrame:
    """Return the frame of the calls that `answer_schema` requires; an empty frame if it requires none. Several calls
    are allowed if the client allows them and does not name a function.
    """
    if not (request.tools and _requires_call(request)):
        return NO_FRAME
    return form.frame_of(several=request.parallel_tool_calls and request.tool_choice.mode == "required")


def copy_source_of(request: Request) -> str | None:
    """Return the text from which a call's arguments are copied, which is the last user message. None if the request is
    not a chat, or constrains the answer itself by a response format (`text` included) or a required tool call.
    """
    if request.kind != "chat" or request.response_format is not None:
        return None
    if request.tools and _requires_call(request):
        return None
    return last_user_text(request.messages)


def last_user_text(messages: Sequence[Message]) -> str | None:
    """Return the text of the last user message; None if there is none."""
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
    """Return `schema` for use inside another one. References start at its own root, so that one with references is
    moved to ``#/$defs/<name>``, and they are rewritten.
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
    return _move_references(value, root)  # a property that is named $ref
