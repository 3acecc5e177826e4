"""JSON schemas as GBNF, the grammar that llama.cpp holds an answer to.

llama-cpp-python's converter does the main work. It trusts its input, so a schema is checked and put into the forms that
the converter reads rightly first, and what it leaves unbounded (values nested for ever) is bounded after.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache

from llama_cpp.llama_grammar import json_schema_to_gbnf

from router.errors import InvalidGrammar

_MOST_TEXT = 64 * 1024  # characters of a schema
_DEEPEST = 24  # of a schema
_MOST_NODES = 2000
_MOST_REPEATS = 512  # of minLength, maxItems, a pattern's {n}: each becomes that many rules
_MOST_GBNF = 512 * 1024
_NESTING = 6  # of a value that no schema describes
_SMALL_RANGE = 512  # whole numbers that are listed one by one
_STRUCTURE = frozenset(
    {
        "type",
        "properties",
        "items",
        "prefixItems",
        "enum",
        "const",
        "anyOf",
        "oneOf",
        "allOf",
        "$ref",
        "pattern",
        "format",
    }
    | {"additionalProperties", "minLength", "maxLength", "required"}
)
_REFUSED = ("not", "if", "patternProperties", "dependentSchemas", "unevaluatedProperties", "$dynamicRef")

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
    """GBNF (root rule `root`) of a JSON schema; "{}" is any JSON object. Raises InvalidGrammar, naming the place."""
    if len(schema) > _MOST_TEXT:
        raise InvalidGrammar(f"the schema has {len(schema)} characters; the most is {_MOST_TEXT}")
    try:
        document = json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar(f"the schema is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise InvalidGrammar("the schema is not an object")
    if not _STRUCTURE & document.keys():
        document = {**document, "type": "object"}
    try:
        gbnf = json_schema_to_gbnf(json.dumps(_Reader(document).read(document, "#", 0)))
    except InvalidGrammar:
        raise
    # The converter asserts, and stumbles over what it does not expect; either way it is the schema that it cannot read.
    except Exception as error:
        raise InvalidGrammar(
            f"the schema cannot be turned into a grammar: {str(error) or type(error).__name__}"
        ) from error
    if len(gbnf) > _MOST_GBNF:
        raise InvalidGrammar("the schema allows too much: its grammar has no bound worth having")
    return _with_bounded_values(gbnf)


def _with_bounded_values(gbnf: str) -> str:
    """Own scalar rules, and any-value rules that end at a depth, in the place of the converter's."""
    own = [*_SCALARS.splitlines(), *_any_values()]
    names = {line.split(" ::= ")[0] for line in own}
    return "\n".join([*(line for line in gbnf.splitlines() if line.split(" ::= ")[0] not in names), *own])


def _any_values() -> list[str]:
    """`value`, `object` and `array`, in which values nest _NESTING deep."""
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


class _Reader:
    """Checks one schema and rewrites it into what the converter reads rightly."""

    def __init__(self, document: Schema) -> None:
        self._document = document
        self._nodes = 0

    def read(self, schema: object, path: str, depth: int) -> dict[str, object]:
        """(1) Anything, (2) nothing, (3) given values, (4) a list of types, (5) a whole number's range, (6) rest."""
        self._nodes += 1
        if depth > _DEEPEST or self._nodes > _MOST_NODES:
            raise InvalidGrammar(f"{path}: the schema is too deep or too large")
        if schema is True:  # (1)
            return {"type": "value"}
        if not isinstance(schema, dict):  # (2)
            raise InvalidGrammar(f"{path}: not a schema that anything fits")
        for key in _REFUSED:
            if key in schema:
                raise InvalidGrammar(f"{path}/{key}: not supported")
        self._check_bounds(schema, path)
        definitions = self._definitions(schema, path, depth)
        if not _STRUCTURE & schema.keys():  # (1), with a description at most
            return {**definitions, "type": "value"}
        for key in ("const", "enum"):  # (3)
            if key in schema:
                return {**definitions, key: schema[key]}
        kinds = schema.get("type")
        if isinstance(kinds, list):  # (4)
            rest = {key: value for key, value in schema.items() if key != "type"}
            return {**definitions, "anyOf": [self.read({**rest, "type": kind}, path, depth + 1) for kind in kinds]}
        if kinds == "integer" and (ranged := _ranged(schema)) is not None:  # (5)
            return {**definitions, **ranged}
        return {**self._members(schema, path, depth), **definitions}  # (6)

    def _members(self, schema: Schema, path: str, depth: int) -> dict[str, object]:
        read: dict[str, object] = {key: value for key, value in schema.items() if key not in {"description", "title"}}
        if "type" not in schema and schema.keys() & {"pattern", "format", "minLength", "maxLength"}:
            read["type"] = "string"
        if properties := self._properties(schema, path, depth):
            read["properties"] = properties
        for key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            if key in schema:
                if properties and key != "prefixItems":
                    raise InvalidGrammar(f"{path}/{key}: not supported beside properties")
                several = schema[key]
                if not isinstance(several, list) or not several:
                    raise InvalidGrammar(f"{path}/{key}: not a list of schemas")
                read[key] = [self.read(one, f"{path}/{key}/{place}", depth + 1) for place, one in enumerate(several)]
        for key in ("items", "additionalProperties"):
            if schema.get(key) is False and key == "additionalProperties":
                continue
            if key in schema:
                read[key] = self.read(schema[key], f"{path}/{key}", depth + 1)
        if schema.get("type") == "array" and "items" not in read and "prefixItems" not in read:
            read["items"] = {"type": "value"}
        return read

    def _properties(self, schema: Schema, path: str, depth: int) -> dict[str, object]:
        """The named members; one that is only required may be anything."""
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict):
            raise InvalidGrammar(f"{path}/properties: not an object")
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise InvalidGrammar(f"{path}/required: not a list of names")
        named = {name: self.read(one, f"{path}/properties/{name}", depth + 1) for name, one in properties.items()}
        return named | {name: {"type": "value"} for name in required if name not in named}

    def _definitions(self, schema: Schema, path: str, depth: int) -> dict[str, object]:
        """`$defs` travel along, so that references find them."""
        return {
            key: {name: self.read(one, f"{path}/{key}/{name}", depth + 1) for name, one in several.items()}
            for key in ("$defs", "definitions")
            if isinstance(several := schema.get(key), dict)
        }

    def _check_bounds(self, schema: Schema, path: str) -> None:
        for key in ("minLength", "maxLength", "minItems", "maxItems"):
            bound = schema.get(key, 0)
            if not isinstance(bound, int) or not 0 <= bound <= _MOST_REPEATS:
                raise InvalidGrammar(f"{path}/{key}: a whole number up to {_MOST_REPEATS}, not {bound!r}")
        for key, high in (("minLength", "maxLength"), ("minItems", "maxItems")):
            if high in schema and _whole(schema.get(key, 0)) > _whole(schema[high]):
                raise InvalidGrammar(f"{path}/{high}: less than {key}")
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and any(
            int(n) > _MOST_REPEATS for n in re.findall(r"\d{1,9}(?=[,}])|\d{10}", pattern)
        ):
            raise InvalidGrammar(f"{path}/pattern: repeats more than {_MOST_REPEATS} times")
        reference = schema.get("$ref")
        if reference is not None and not (isinstance(reference, str) and reference.startswith("#/")):
            raise InvalidGrammar(f"{path}/$ref: only references into this schema (#/…) are followed")
        if "enum" in schema and (not isinstance(schema["enum"], list) or not schema["enum"]):
            raise InvalidGrammar(f"{path}/enum: not a list of values")


def _ranged(schema: Schema) -> dict[str, object] | None:
    """A whole number between bounds, of which the converter knows none: each listed, or at least no negative ones."""
    low, high = schema.get("minimum"), schema.get("maximum")
    if isinstance(low, int) and isinstance(high, int) and 0 <= high - low < _SMALL_RANGE:
        return {"enum": list(range(low, high + 1))}
    return {"type": "integral-part"} if isinstance(low, int) and low >= 0 else None


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0
