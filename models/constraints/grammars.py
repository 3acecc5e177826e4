"""Grammars of llguidance that constrain an answer: to a JSON schema, or to the calls that can answer one message.

Every answer that a schema's grammar ends is valid by the schema. `check_schemas` checks those of a request before a
target that enforces them by a grammar is asked.

In the grammar of calls, arguments contain only words of the message: the assistants copy their arguments. A small model
misreads a long name ("Varney the Varney the Varney …") but copies it correctly when only the word that follows in the
text may follow in the answer. The engines on the device and in the cloud apply this grammar to every answer of a model
whose manifest says `answers: calls`, unless the request constrains the answer itself.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple

import msgspec
from llguidance import LLMatcher, LLParserLimits

from causeway_server.router.errors import InvalidGrammar
from causeway_server.router.tool_calls.schema import NO_FRAME, CallFrame
from causeway_server.router.types import Request, Tool

from .rewriting import Json, Node, Rewriter, Unenforceable, subschemas, target_of

ANSWER_TOKENS = 256  # more than any call needs that does not repeat itself
MAX_PIECES = 300  # words, marks and spaces of the text; beyond it arguments may have any text
MAX_CHARACTERS = 4000  # likewise
MAX_LISTED = 20  # words and marks whose runs, 210 at most, are listed
_PIECE = re.compile(r"\w+|\s+|[^\w\s]")
_NAME: Final = {"type": "string", "pattern": "^[a-z_0-9]{1,48}$"}
_RUN_IN_LARK: Final = r"""start: "{\"name\":" NAME ",\"arguments\":{" arguments "}}"
NAME: /"[a-z_0-9]{1,48}"/
arguments: (pair ("," pair){0,6})?
pair: NAME ":" (TEXT | "[" TEXT ("," TEXT){0,3} "]")
TEXT: "\"" VALUE "\""
VALUE: RUN & /[^ ]((?s:.*)[^ ])?/
RUN: %regex """
"""Lark's form of a run of words. A run begins and ends with a word, though a space is a piece, too."""


def _call_with(value: dict[str, object] | None) -> str:
    """Return the grammar of calls, whose arguments have this schema. Bounds end an answer that repeats itself."""
    arguments: dict[str, object] = {"type": "object", "additionalProperties": False}
    if value is not None:
        one = {"$ref": "#/$defs/value"}
        one_or_more = {"anyOf": [one, {"type": "array", "items": one, "minItems": 1, "maxItems": 4}]}
        arguments |= {"patternProperties": {_NAME["pattern"]: one_or_more}, "maxProperties": 7}
    schema = {
        "type": "object",
        "properties": {"name": _NAME, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
        "$defs": {"value": value or {}},
    }
    return LLMatcher.grammar_from_json_schema(
        schema, overrides={"whitespace_flexible": False, "item_separator": ",", "key_separator": ":"}
    )


ANY_CALL: Final = _call_with({"type": "string", "maxLength": 72})
"""The grammar of a call whose arguments may be any text."""


def call_grammar(copy_source: str) -> str:
    """Return a grammar in which a value is a run of words and marks of `copy_source`, with the spaces between them.

    A short text's runs are listed in a schema, which llguidance compiles in half the time of a Lark grammar. A text
    that is too long gets `ANY_CALL`. Lone surrogates become question marks, as in prompts.
    """
    if len(copy_source) > MAX_CHARACTERS:
        return ANY_CALL
    pieces = _PIECE.findall(copy_source.encode(errors="replace").decode().strip())
    if len(pieces) > MAX_PIECES:
        return ANY_CALL
    starts = [at for at, piece in enumerate(pieces) if not piece.isspace()]
    if len(starts) > MAX_LISTED:
        run = json.dumps({"substring_chunks": [json.dumps(piece, ensure_ascii=False)[1:-1] for piece in pieces]})
        return LLMatcher.grammar_from_lark(f"{_RUN_IN_LARK}{run}\n")
    runs = ("".join(pieces[start : end + 1]) for start in starts for end in starts if end >= start)
    return _call_with({"enum": list(dict.fromkeys(runs))} if starts else None)


_MAX_CHARACTERS: Final = 256 * 1024
_MAX_CALLS: Final = 8  # in one answer that is constrained to calls
LIMITS: Final = LLParserLimits(max_items_in_row=20_000, step_max_items=200_000, verbose_errors=False)
"""Limits for compiling. llguidance's defaults fail at some 500 optional properties. Errors do not quote the schema."""
_SPACED: Final[Node] = {"item_separator": ", ", "key_separator": ": "}
_FREE: Final[Node] = {"item_separator": ", ?", "key_separator": ": ?"}
_OPTIONS: Final[Node] = {"whitespace_flexible": False, "json_allowed_escapes": 'nrbtf\\"'}
"""Options without white space, which a small model could repeat for ever, and `\\u`, a second spelling of names."""
_CONTROLS: Final = tuple(f"\\u00{code:02x}" for code in range(32))
_COMPOSED: Final = ("$ref", "enum", "const", "anyOf", "oneOf", "allOf")
_MAX_REFERENCES: Final = 16  # from the root of a call's arguments to their type
_VALUE_KEYS: Final = ("type", "properties", *_COMPOSED, "items", "prefixItems")
_OBJECT: Final = '{"type":"object"}'
_AT_ONCE: Final = 4096  # characters of schemas that are checked on the event loop: about a millisecond


class Fault(NamedTuple):
    """An unenforceable part of a schema: the JSON pointer from `#` on, the keyword, and the reason."""

    path: str
    keyword: str
    reason: str

    @property
    def message(self) -> str:
        return (
            f"The JSON schema cannot be enforced: `{self.keyword}` at {self.path}: {self.reason}. Remove "
            "this part, or write it in another form."
        )


@lru_cache(maxsize=256)
def schema_grammar(schema: str, *, spaced: bool = False) -> str:
    """Return the grammar of a JSON schema, as the JSON text that `%json` and llguidance's compiler take.

    `schema`: "{}" means any JSON object. `spaced`: write ", " and ": " as Python does; else the model chooses. Raises
    InvalidGrammar, with path and keyword of what cannot be enforced.
    """
    try:
        rewritten = _rewritten(schema)
    except Unenforceable as fault:
        raise InvalidGrammar(Fault(fault.path, fault.keyword, fault.reason).message) from fault
    options: Node = {**_OPTIONS, **(_SPACED if spaced else _FREE)}
    if any(code in schema.lower() for code in _CONTROLS):
        options["json_allowed_escapes"] = 'nrbtf\\"u'  # a value of the schema needs them
    return json.dumps({"x-guidance": options, **rewritten}, ensure_ascii=False)


def framed_grammar(schema: str, frame: CallFrame = NO_FRAME, marks: Mapping[str, int] | None = None) -> str:
    """Return a grammar for llguidance's compiler: the text of `frame` around and between values of a JSON schema.

    `schema`: "{}" means any JSON object. `marks`: tokens for a mark of the frame, by its text. Raises InvalidGrammar,
    with path and keyword.
    """
    if frame == NO_FRAME:
        return LLMatcher.grammar_from_json_schema(schema_grammar(schema))
    before, between, after = (_literal(text, marks or {}) for text in (frame.before, frame.between, frame.after))
    more = f"({between} value){{0,{_MAX_CALLS - 1}}}" if frame.between else ""
    value = schema_grammar(schema, spaced=bool(frame.before))
    return LLMatcher.grammar_from_lark(f"start: {before} value {more} {after}\nvalue: %json {value}\n")


def _literal(text: str, marks: Mapping[str, int]) -> str:
    """Return a text in Lark, with the tokens that stand for its marks."""
    if not text:
        return ""
    parts = re.split(f"({'|'.join(map(re.escape, marks))})", text) if marks else [text]
    return " ".join(f"<[{marks[part]}]>" if part in marks else json.dumps(part) for part in parts if part)


@lru_cache(maxsize=256)
def fault_of(schema: str) -> Fault | None:
    """Return the first part of a JSON schema that cannot be enforced, None if all of it can."""
    try:
        rewritten = _rewritten(schema)
    except Unenforceable as fault:
        return Fault(fault.path, fault.keyword, fault.reason)
    if not (error := _error(rewritten)):
        return None
    path, keyword = _locate(rewritten, rewritten, "#")
    return Fault(path, keyword, error)


@lru_cache(maxsize=256)
def enforceable_arguments(schema: str) -> str | Fault:
    """Return the JSON schema of a call's arguments with the type `object`, or the fault that makes it unenforceable."""
    if fault := fault_of(schema):
        return fault
    root: Node = json.loads(schema)
    if not any(key in root for key in ("type", *_COMPOSED)):
        return json.dumps({"type": "object", **root}, ensure_ascii=False)
    return schema if _is_object(root, root) else Fault("#", "type", "the arguments of a call must be an object")


def _is_object(root: Node, schema: Json, depth: int = 0) -> bool:
    """Return whether every value of a schema is an object, according to the schema's own keywords."""
    if not isinstance(schema, dict) or depth > _MAX_REFERENCES:
        return False
    if "type" in schema:
        return schema["type"] in ("object", ["object"])
    for key, judge in (("allOf", any), ("anyOf", all), ("oneOf", all)):
        if isinstance(branches := schema.get(key), list):
            return judge(_is_object(root, branch, depth + 1) for branch in branches)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return all(isinstance(value, dict) for value in values)
    return _is_object(root, target_of(root, schema.get("$ref")), depth + 1)


def _rewritten(schema: str) -> Node:
    """Check that the schema can be enforced. Raises Unenforceable."""
    if len(schema) > _MAX_CHARACTERS:
        raise Unenforceable(
            "#", "schema", (f"the schema has {len(schema)} characters, but at most {_MAX_CHARACTERS} are supported")
        )
    try:
        document = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise Unenforceable("#", "schema", f"the schema is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise Unenforceable("#", "schema", "the schema is not an object")
    if not any(key in document for key in _VALUE_KEYS) or ("properties" in document and "type" not in document):
        document = {"type": "object", **document}
    return Rewriter(document).document()


def _error(schema: Node) -> str:
    grammar = LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=None)
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return messages[0].strip().partition("\n")[0][:200] if failed else ""


def _locate(root: Node, schema: Node, path: str) -> tuple[str, str]:
    """Find the innermost subschema that cannot be enforced by itself, and the keyword that causes it."""
    for step, inner in subschemas(schema):
        if isinstance(inner, dict) and _error(_alone(root, inner)):
            return _locate(root, inner, f"{path}/{step}")
    for keyword in sorted(schema, key="type".__eq__):  # without its type a schema allows other things altogether
        if not _error(_alone(root, {key: value for key, value in schema.items() if key != keyword})):
            return path, keyword
    return path, "schema"


def _alone(root: Node, schema: Node) -> Node:
    return {**{key: root[key] for key in ("$defs", "definitions") if key in root}, **schema}


class EnforceableRequest(msgspec.Struct, frozen=True):
    """A request whose schemas can be enforced. `loosened`: by tool, why its arguments are unconstrained."""

    request: Request
    loosened: tuple[tuple[str, str], ...] = ()

    @property
    def names(self) -> str:
        """The loosened tools, for a response header."""
        return ",".join([re.sub(r"[^!-~]", "?", name) for name, _ in self.loosened]) if self.loosened else ""

    @property
    def detail(self) -> str:
        """The loosened tools with the reasons, for a decision record; "" for none."""
        return "; ".join(f"the arguments of {name} are not enforced: {what}" for name, what in self.loosened)


async def check_schemas(request: Request, *, calls_only: bool) -> EnforceableRequest:
    """Check the schemas that would constrain the answer to `request`; long schemas are checked in a thread.

    `calls_only`: the model answers only with calls, so offered tools constrain it. Raises InvalidGrammar, with path and
    keyword, for the response format or a tool that must be called.
    """
    form = "" if request.response_format is None else request.response_format.schema
    if len(form) + sum(len(tool.parameters) for tool in request.tools) > _AT_ONCE:
        return await asyncio.to_thread(check_schemas_now, request, calls_only=calls_only)
    return check_schemas_now(request, calls_only=calls_only)


def check_schemas_now(request: Request, *, calls_only: bool) -> EnforceableRequest:
    """Check the schemas as `check_schemas` does, in this thread."""
    form, choice = request.response_format, request.tool_choice
    must_call = choice.mode in ("required", "function")
    if form is not None and form.schema and not (must_call and request.tools) and (fault := fault_of(form.schema)):
        raise InvalidGrammar(f"`response_format`: {fault.message}", param="response_format")
    if choice.mode == "none" or not (must_call or (calls_only and form is None) or (form is not None and form.schema)):
        return EnforceableRequest(request)
    tools, loosened = list[Tool](), list[tuple[str, str]]()
    for tool in request.tools:
        called = choice.mode != "function" or tool.name == choice.name
        parameters = enforceable_arguments(tool.parameters) if called and tool.parameters != "{}" else tool.parameters
        if isinstance(parameters, Fault):
            if must_call:
                raise InvalidGrammar(f"`tools`: the parameters of {tool.name}: {parameters.message}", param="tools")
            loosened.append((tool.name, f"{parameters.keyword} at {parameters.path}"))
            parameters = _OBJECT
        tools.append(tool if parameters is tool.parameters else msgspec.structs.replace(tool, parameters=parameters))
    return EnforceableRequest(msgspec.structs.replace(request, tools=tuple(tools)), tuple(loosened))
