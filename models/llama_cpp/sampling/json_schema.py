"""JSON schemas as GBNF, the grammar language of llama.cpp.

llama-cpp-python's converter does the main work. It trusts its input, so a schema is first checked and rewritten into
forms that the converter handles correctly; afterwards its unbounded rules (values that nest for ever) are bounded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache

from llama_cpp.llama_grammar import json_schema_to_gbnf

from router.errors import InvalidGrammar
from router.tool_calls.formats import NO_FRAME, CallFrame

_MAX_CHARACTERS = 64 * 1024  # of a schema
_MAX_DEPTH = 24  # of a schema
_MAX_NODES = 2000
_MAX_REPEATS = 512  # of minLength, maxItems, a pattern's {n}: each becomes that many rules
_MAX_GBNF = 512 * 1024
_NESTING = 6  # depth of a value without a schema
_MAX_CALLS = 8  # in one answer that is constrained to calls
_FRAMED = "framed-value"
_SMALL_RANGE = 512  # integers that are listed one by one
_STRUCTURE = frozenset(
    {"type", "properties", "items", "prefixItems", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "pattern"}
    | {"format", "additionalProperties", "minLength", "maxLength", "required"}
)
_UNSUPPORTED = ("not", "if", "patternProperties", "dependentSchemas", "unevaluatedProperties", "$dynamicRef")

_SCALARS = r"""char ::= [^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F] [0-9a-fA-F])
string ::= "\"" char* "\"" space
integral-part ::= "0" | [1-9] [0-9]? [0-9]? [0-9]? [0-9]? [0-9]? [0-9]? [0-9]? [0-9]? [0-9]? [0-9]? [0-9]? [0-9]? [0-9]?
decimal-part ::= [0-9] [0-9]? [0-9]? [0-9]? [0-9]? [0-9]? [0-9]? [0-9]? [0-9]? [0-9]?
number ::= "-"? integral-part ("." decimal-part)? ([eE] [-+]? [0-9] [0-9]?)? space
integer ::= "-"? integral-part space
boolean ::= ("true" | "false") space
null ::= "null" space
space ::= " "?"""

Schema = Mapping[str, object]


@lru_cache(maxsize=128)
def schema_to_gbnf(schema: str) -> str:
    """Convert a JSON schema to GBNF with the root rule `root`.

    Args:
        schema: JSON text; "{}" means any JSON object.

    Raises:
        InvalidGrammar: the schema is invalid, unsupported or too large; the message has the path in the schema.
    """
    if len(schema) > _MAX_CHARACTERS:
        raise InvalidGrammar(f"the schema has {len(schema)} characters; the most is {_MAX_CHARACTERS}")
    try:
        document = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar(f"the schema is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise InvalidGrammar("the schema is not an object")
    if not _STRUCTURE & document.keys():
        document = {**document, "type": "object"}
    try:
        gbnf = json_schema_to_gbnf(json.dumps(_SchemaRewriter().rewrite(document, "#", 0)))
    except InvalidGrammar:
        raise
    # The converter has assertions and unchecked accesses; whatever it raises, it cannot read this schema.
    except Exception as error:
        raise InvalidGrammar(
            f"the schema cannot be turned into a grammar: {str(error) or type(error).__name__}"
        ) from error
    if len(gbnf) > _MAX_GBNF:
        raise InvalidGrammar(f"the schema allows too much: its grammar has more than {_MAX_GBNF} characters")
    return _with_bounded_values(gbnf)


def framed(gbnf: str, frame: CallFrame) -> str:
    """Put the text of `frame` around and between the values of a grammar from `schema_to_gbnf`."""
    if frame == NO_FRAME:
        return gbnf
    before, between, after = map(json.dumps, (frame.before, frame.between, frame.after))
    more = f" ({between} {_FRAMED}){{0,{_MAX_CALLS - 1}}}" if frame.between else ""
    return f"root ::= {before} {_FRAMED}{more} {after}\n" + re.sub(r"(?m)^root ::=", f"{_FRAMED} ::=", gbnf)


def _with_bounded_values(gbnf: str) -> str:
    """Replace the converter's rules for scalars, and for values without a schema, by bounded ones."""
    bounded = [*_SCALARS.splitlines(), *_any_values()]
    names = {line.split(" ::= ")[0] for line in bounded}
    return "\n".join([*(line for line in gbnf.splitlines() if line.split(" ::= ")[0] not in names), *bounded])


def _any_values() -> list[str]:
    """Return the rules `value`, `object` and `array`, with values nested at most _NESTING deep."""
    lines: list[str] = []
    for depth in range(_NESTING):
        here, inner = (f"json-depth-{depth}-" if depth else ""), f"json-depth-{depth + 1}-value"
        member = f'string ":" space {inner}'
        lines += [
            f"{here}value ::= {here}object | {here}array | string | number | boolean | null",
            f'{here}object ::= "{{" space ( {member} ("," space {member})* )? "}}" space',
            f'{here}array ::= "[" space ( {inner} ("," space {inner})* )? "]" space',
        ]
    return [*lines, f"json-depth-{_NESTING}-value ::= string | number | boolean | null"]


class _SchemaRewriter:
    """Checks one schema and rewrites it into forms that the converter handles correctly."""

    def __init__(self) -> None:
        self._nodes = 0

    def rewrite(self, schema: object, path: str, depth: int) -> dict[str, object]:
        """Rewrite (1) any value, (2) no value, (3) const and enum, (4) type lists, (5) integer ranges, (6) the rest."""
        self._nodes += 1
        if depth > _MAX_DEPTH or self._nodes > _MAX_NODES:
            raise InvalidGrammar(f"{path}: the schema is too deep or too large")
        if schema is True:  # (1)
            return {"type": "value"}
        if not isinstance(schema, dict):  # (2)
            raise InvalidGrammar(f"{path}: no value fits this schema")
        for key in _UNSUPPORTED:
            if key in schema:
                raise InvalidGrammar(f"{path}/{key}: not supported")
        self._check_bounds(schema, path)
        definitions = self._definitions(schema, path, depth)
        if not _STRUCTURE & schema.keys():  # (1), at most with a description
            return {**definitions, "type": "value"}
        for key in ("const", "enum"):  # (3)
            if key in schema:
                return {**definitions, key: schema[key]}
        types = schema.get("type")
        if isinstance(types, list):  # (4)
            rest = {key: value for key, value in schema.items() if key != "type"}
            return {**definitions, "anyOf": [self.rewrite({**rest, "type": type_}, path, depth + 1) for type_ in types]}
        if types == "integer" and (bounded := _bounded_integer(schema)) is not None:  # (5)
            return {**definitions, **bounded}
        return {**self._members(schema, path, depth), **definitions}  # (6)

    def _members(self, schema: Schema, path: str, depth: int) -> dict[str, object]:
        members: dict[str, object] = {
            key: value for key, value in schema.items() if key not in {"description", "title"}
        }
        if "type" not in schema and schema.keys() & {"pattern", "format", "minLength", "maxLength"}:
            members["type"] = "string"
        if properties := self._properties(schema, path, depth):
            members["properties"] = properties
        for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            if key in schema:
                if properties and key != "prefixItems":
                    raise InvalidGrammar(f"{path}/{key}: not supported beside properties")
                schemas = schema[key]
                if not isinstance(schemas, list) or not schemas:
                    raise InvalidGrammar(f"{path}/{key}: not a list of schemas")
                members[key] = [
                    self.rewrite(item, f"{path}/{key}/{index}", depth + 1) for index, item in enumerate(schemas)
                ]
        for key in ("items", "additionalProperties"):
            if schema.get(key) is False and key == "additionalProperties":
                continue
            if key in schema:
                members[key] = self.rewrite(schema[key], f"{path}/{key}", depth + 1)
        if schema.get("type") == "array" and "items" not in members and "prefixItems" not in members:
            members["items"] = {"type": "value"}
        return members

    def _properties(self, schema: Schema, path: str, depth: int) -> dict[str, object]:
        """Rewrite `properties`; a name that is only in `required` may have any value."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict):
            raise InvalidGrammar(f"{path}/properties: not an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise InvalidGrammar(f"{path}/required: not a list of names")
        named = {name: self.rewrite(item, f"{path}/properties/{name}", depth + 1) for name, item in properties.items()}
        return named | {name: {"type": "value"} for name in required if name not in named}

    def _definitions(self, schema: Schema, path: str, depth: int) -> dict[str, object]:
        """Rewrite the `$defs`, for the references to them."""
        return {
            key: {name: self.rewrite(item, f"{path}/{key}/{name}", depth + 1) for name, item in schemas.items()}
            for key in ("$defs", "definitions")
            if isinstance(schemas := schema.get(key), dict)
        }

    def _check_bounds(self, schema: Schema, path: str) -> None:
        for key in ("minLength", "maxLength", "minItems", "maxItems"):
            bound = schema.get(key, 0)
            if not isinstance(bound, int) or not 0 <= bound <= _MAX_REPEATS:
                raise InvalidGrammar(f"{path}/{key}: an integer up to {_MAX_REPEATS}, not {bound!r}")
        for key, high in (("minLength", "maxLength"), ("minItems", "maxItems")):
            if high in schema and _int_or_zero(schema.get(key, 0)) > _int_or_zero(schema[high]):
                raise InvalidGrammar(f"{path}/{high}: less than {key}")
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and any(
            int(n) > _MAX_REPEATS for n in re.findall(r"\d{1,9}(?=[,}])|\d{10}", pattern)
        ):
            raise InvalidGrammar(f"{path}/pattern: repeats more than {_MAX_REPEATS} times")
        reference = schema.get("$ref")
        if reference is not None and not (isinstance(reference, str) and reference.startswith("#/")):
            raise InvalidGrammar(f"{path}/$ref: only references into this schema (#/…) are followed")
        if "enum" in schema and (not isinstance(schema["enum"], list) or not schema["enum"]):
            raise InvalidGrammar(f"{path}/enum: not a list of values")


def _bounded_integer(schema: Schema) -> dict[str, object] | None:
    """Bound an integer, which the converter does not: list a small range, or at least exclude negative numbers."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if isinstance(low, int) and isinstance(high, int) and 0 <= high - low < _SMALL_RANGE:
        return {"enum": list(range(low, high + 1))}
    return {"type": "integral-part"} if isinstance(low, int) and low >= 0 else None


def _int_or_zero(value: object) -> int:
    return value if isinstance(value, int) else 0
