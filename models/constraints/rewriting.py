"""Rewriting of a JSON schema (draft 2020-12) into forms that llguidance enforces exactly; other parts are named.

llguidance refuses most keywords that it does not know. The rules here are for the others: those that it reads more
loosely than a validator (a rewritten schema is as strict or stricter), and refused forms that a small rewriting makes
enforceable. `docs/explanation/models.md` has the table; `tests/models/constraints` compares with `jsonschema`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Final

Json = dict[str, "Json"] | list["Json"] | str | int | float | bool | None
Node = dict[str, Json]

_MAX_DEPTH: Final = 64
_MAX_NODES: Final = 20_000
_MAX_ITEMS: Final = 512
_MAX_LENGTH: Final = 4096
_EXACT: Final = 2**53  # integers up to here are exact as the doubles that llguidance reads
_BOUNDS: Final = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_DIGITS: Final = 1e-9  # the step of numbers that have none

_KEPT: Final = frozenset(
    "$ref $id $anchor type const enum allOf anyOf oneOf items prefixItems additionalItems minItems maxItems properties"
    " additionalProperties patternProperties required minProperties maxProperties minLength maxLength pattern format"
    " minimum maximum exclusiveMinimum exclusiveMaximum multipleOf $defs definitions".split()
)
"""Keywords that are copied. Every other keyword is an annotation, unknown to all drafts, or in `_REFUSED`. Without
`$schema`, llguidance reads the rewritten schema as draft 2020-12.
"""
_REFUSED: Final = frozenset(
    "not if contains uniqueItems propertyNames dependentRequired dependentSchemas dependencies unevaluatedItems"
    " unevaluatedProperties $dynamicRef $recursiveRef".split()
)
_NO_EFFECT: Final[Mapping[str, tuple[Json, ...]]] = {
    "uniqueItems": (False,),
    "propertyNames": (True, {}, {"type": "string"}),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}
_APPLICATORS: Final = ("$ref", "allOf", "anyOf", "oneOf")
_SCHEMA_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMA_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS: Final = ("items", "additionalProperties")

_YEAR: Final = r"(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # 0000 is not a year
_LEAP: Final = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE: Final = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    rf"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_TIME: Final = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_COUNT: Final = "[0-9]{1,6}"
_CLOCK: Final = f"T(?:{_COUNT}H(?:{_COUNT}M(?:{_COUNT}S)?)?|{_COUNT}M(?:{_COUNT}S)?|{_COUNT}S)"
_DAYS: Final = f"(?:{_COUNT}Y(?:{_COUNT}M(?:{_COUNT}D)?)?|{_COUNT}M(?:{_COUNT}D)?|{_COUNT}D)"
_LABEL: Final = r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?"
_FORMAT_PATTERNS: Final[Mapping[str, str]] = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "duration": f"^P(?:{_COUNT}W|{_DAYS}(?:{_CLOCK})?|{_CLOCK})$",
    "hostname": rf"^{_LABEL}(?:\.{_LABEL}){{0,3}}$",
}
"""Patterns for formats that llguidance reads too loosely: leap days and seconds, year 0, length and case."""
_FORMATS_ENFORCED: Final = frozenset("email ipv4 ipv6 uuid uri".split())
_FORMATS_REFUSED: Final = frozenset(
    "idn-email idn-hostname uri-reference iri iri-reference uri-template json-pointer relative-json-pointer"
    " regex".split()
)
"""Formats of the draft that cannot be enforced. Any other name is an annotation, as it is for validators."""

_PATTERN_PART: Final = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", re.DOTALL)
_CLASS_FAULT: Final = re.compile(r"\\[WDAbBGZz]|(?<!\\)\[|&&|--|~~", re.DOTALL)  # also set operations of Rust's classes
_ANY: Final = frozenset({r"[\s\S]", r"[\S\s]", r"[\d\D]", r"[\D\d]", r"[\w\W]", r"[\W\w]"})
_NARROWED: Final[Mapping[str, str]] = {r"\W": r"[^\p{L}\p{M}\p{N}_]", r"\D": r"\P{N}"}
r"""Narrower classes for `\w` and `\d`, because Python counts letters and digits of all scripts and ECMA-262 only
ASCII.
"""
_DECIMAL: Final = re.compile(
    r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*(?:\\d\*\\\.\?\\d(?:(?P<free>\*)|\{0,(?P<places>\d+)\}0\*)\$"
    r"|\(\?:\\d\{0,(?P<digits>\d+)\}\|\(\?=\[\\d\.\]\{1,\d+\}0\*\$\)"
    r"(?:\\d\*\\\.\\d\*|\\d\{0,\d+\}\\\.\\d\{0,(?P<both>\d+)\})0\*\$\))"
)
"""The pattern that pydantic 2.12 writes for decimals, the only look-ahead in ordinary schemas."""
_ESCAPES_REFUSED: Final = frozenset("<>AbBGZzkK123456789")


class Unenforceable(Exception):
    """A keyword that cannot be enforced. `path`: JSON pointer of its schema, from `#` on."""

    def __init__(self, path: str, keyword: str, reason: str) -> None:
        super().__init__(f"{path}: {keyword}: {reason}")
        self.path = path
        self.keyword = keyword
        self.reason = reason


class Rewriter:
    """Rewrites one schema document."""

    def __init__(self, root: Node) -> None:
        self._root = root
        self._nodes = 0
        self._elsewhere: dict[str, Json] = {}  # by pointer: schemas that stand in members which are not kept
        self._closes = not _composes(root)

    def document(self) -> Node:
        """Return the root in enforceable forms, with all definitions that it refers to. Raises Unenforceable."""
        rewritten = self.rewrite(self._root)
        assert isinstance(rewritten, dict)
        moved: Node = {}
        while self._elsewhere:
            pointer, target = self._elsewhere.popitem()
            if pointer not in moved:
                moved[pointer] = True  # it may refer to itself
                moved[pointer] = self.rewrite(target, f"#/{pointer}")
        return {**rewritten, "$defs": {**_mapping(rewritten.get("$defs")), **moved}} if moved else rewritten

    def rewrite(self, schema: Json, path: str = "#", depth: int = 0) -> Json:
        """Return the schema in enforceable forms. Raises Unenforceable."""
        self._nodes += 1
        if depth > _MAX_DEPTH or self._nodes > _MAX_NODES:
            raise Unenforceable(path, "schema", "the schema is nested too deeply or is too large")
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise Unenforceable(path, "schema", "the schema is neither an object nor a boolean")
        node: Node = {key: value for key, value in schema.items() if key in _KEPT}
        for keyword in sorted(_REFUSED & schema.keys()):
            if schema[keyword] not in _NO_EFFECT.get(keyword, ()):
                self._replace(node, schema, keyword, path)
        if isinstance(reference := node.get("$ref"), str) and reference.startswith("#/"):
            node["$ref"] = self._kept(reference)
        for rule in _RULES:
            rule(node, path)
        if self._closes and node.get("properties") and "patternProperties" not in node:
            # Small models go on and on with properties that were not asked for.
            node.setdefault("additionalProperties", False)
        if "oneOf" in node:
            node["oneOf"] = self._resolved_branches(node["oneOf"], schema.get("discriminator"))
        self._rewrite_members(node, path, depth)
        return node

    def _rewrite_members(self, node: Node, path: str, depth: int) -> None:
        for key in _SCHEMA_MAPS:
            if key in node:
                members = node[key]
                if not isinstance(members, dict):
                    raise Unenforceable(path, key, "the value is not an object")
                node[key] = {
                    name: self.rewrite(member, f"{path}/{key}/{_escaped(name)}", depth + 1)
                    for name, member in members.items()
                }
        for key in _SCHEMA_LISTS:
            if key in node:
                branches = node[key]
                if not isinstance(branches, list) or not branches:
                    raise Unenforceable(path, key, "the value is not a list of schemas")
                node[key] = [self.rewrite(one, f"{path}/{key}/{at}", depth + 1) for at, one in enumerate(branches)]
        for key in _SCHEMAS:
            if key in node:
                node[key] = self.rewrite(node[key], f"{path}/{key}", depth + 1)

    def _replace(self, node: Node, schema: Node, keyword: str, path: str) -> None:
        """Replace an unsupported keyword by others if that is simple. Raises Unenforceable."""
        value = schema[keyword]
        plain = not any(key in node for key in _APPLICATORS)
        if keyword == "unevaluatedProperties" and plain and "additionalProperties" not in node:
            node["additionalProperties"] = value
        elif keyword == "unevaluatedItems" and plain and "items" not in node:
            node["items"] = value
        elif keyword == "uniqueItems" and isinstance(most := node.get("maxItems"), int) and most <= 1:
            pass
        elif keyword == "propertyNames" and not node.get("properties") and "patternProperties" not in node:
            self._name_properties(node, _mapping(value), path)
        else:
            raise Unenforceable(path, keyword, "the keyword is not supported")

    def _name_properties(self, node: Node, names: Node, path: str) -> None:
        """Replace `propertyNames` by properties of these names. Raises Unenforceable."""
        member = node.pop("additionalProperties", True)
        node["additionalProperties"] = False
        listed, pattern = names.get("enum"), names.get("pattern")
        if isinstance(listed, list) and names.keys() <= {"type", "enum"}:
            node["properties"] = {name: member for name in listed if isinstance(name, str)}
        elif isinstance(pattern, str) and names.keys() <= {"type", "pattern"}:
            node["patternProperties"] = {pattern: member}
        else:
            raise Unenforceable(path, "propertyNames", "only a pattern or an enum of names is supported")

    def _resolved_branches(self, branches: Json, discriminator: Json) -> Json:
        """Replace references by definitions, to see which branches exclude each other. A discriminator is required."""
        if not isinstance(branches, list):
            return branches
        name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        resolved: list[Json] = []
        for branch in branches:
            target = branch
            for _ in range(_MAX_DEPTH):
                if not (isinstance(target, dict) and target.keys() == {"$ref"}):
                    break
                target = target_of(self._root, target["$ref"])
            if isinstance(target, dict) and isinstance(name, str) and name in _mapping(target.get("properties")):
                required = target.get("required", [])
                target = {**target, "required": [*(required if isinstance(required, list) else []), name]}
            resolved.append(branch if target is None else target)
        return resolved

    def _kept(self, reference: str) -> str:
        """Return a reference to its target's place in the rewritten schema, such as for OpenAPI's `components`."""
        target = target_of(self._root, reference)
        if target is None or _is_kept(reference[2:].split("/")):
            return reference
        self._elsewhere[reference[2:]] = target
        return f"#/$defs/{_escaped(reference[2:])}"


def target_of(root: Node, reference: Json) -> Json:
    """Return the schema that a reference into this document names, None if it cannot be resolved."""
    if not isinstance(reference, str) or not reference.startswith("#/") or "%" in reference:
        return None
    found: Json = root
    for step in reference[2:].split("/"):
        name = step.replace("~1", "/").replace("~0", "~")
        found = _mapping(found).get(name)
    return found


def _earlier_drafts(node: Node, path: str) -> None:
    """Convert the forms of drafts 4 to 2019-09 to draft 2020-12: tuples, and flags that make a bound exclusive."""
    others = node.pop("additionalItems", None)
    if isinstance(node.get("items"), list):
        node["prefixItems"] = node.pop("items")
        if others is not None:
            node["items"] = others
    for bound, exclusive in zip(_BOUNDS[::2], _BOUNDS[1::2], strict=True):
        if isinstance(node.get(exclusive), bool) and node.pop(exclusive) and bound in node:
            node[exclusive] = node.pop(bound)


def _bounded_repeats(node: Node, path: str) -> None:
    """Bound `minItems` and `maxItems`, as llguidance writes each item out. A higher minimum cannot be lowered."""
    for low, high, most in (("minItems", "maxItems", _MAX_ITEMS), ("minLength", "maxLength", _MAX_LENGTH)):
        if isinstance(limit := node.get(high), int) and limit > most:
            node[high] = most
        if isinstance(least := node.get(low), int) and least > most:
            raise Unenforceable(path, low, f"a value above {most} is not supported")
    for key in ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"):
        if isinstance(value := node.get(key), float) and value.is_integer():
            node[key] = int(value)


def _exact_numbers(node: Node, path: str) -> None:
    """Adapt numbers to llguidance's doubles: move rounded bounds inwards, refuse values that it would change."""
    for key, inward in (("minimum", math.inf), ("maximum", -math.inf)):
        value = node.get(key)
        if isinstance(value, int) and abs(value) > _EXACT:
            node[key] = int(math.nextafter(float(value), inward))
    for key in ("exclusiveMinimum", "exclusiveMaximum"):
        if isinstance(value := node.get(key), int) and abs(value) > _EXACT:
            raise Unenforceable(path, key, f"integers beyond {_EXACT} are not supported")
    step = node.get("multipleOf")
    if isinstance(step, float) and not step.is_integer() and step != 2.0 ** round(math.log2(abs(step) or 1)):
        raise Unenforceable(path, "multipleOf", "only whole numbers and powers of 2 are exact in JSON's numbers")
    _bounded_digits(node)
    for key in ("const", "enum"):
        if key in node and _beyond_doubles(node[key]):
            raise Unenforceable(path, key, f"integers beyond {_EXACT} are not supported")


def _bounded_digits(node: Node) -> None:
    """Bound the length of numbers: models repeat digits, and many digits round to an exclusive bound."""
    types = node.get("type")
    kinds = types if isinstance(types, list) else [types]
    if not ("integer" in kinds or "number" in kinds):
        return
    if "number" in kinds:
        node.setdefault("multipleOf", _DIGITS)
    bounds = [node[key] for key in _BOUNDS if key in node]
    if all(isinstance(value, int | float) and abs(value) < _EXACT for value in bounds):
        for bound, exclusive, limit in zip(_BOUNDS[::2], _BOUNDS[1::2], (1 - _EXACT, _EXACT - 1), strict=True):
            if exclusive not in node:
                node.setdefault(bound, limit)


def _checked_format(node: Node, path: str) -> None:
    name = node.pop("format", None)
    if not isinstance(name, str):
        return
    if name in _FORMATS_REFUSED:
        raise Unenforceable(path, "format", f"the format {name} is not supported")
    if name in _FORMATS_ENFORCED:
        node["format"] = name
    elif pattern := _FORMAT_PATTERNS.get(name):
        if "pattern" in node:
            # A second pattern, in a schema of its own; what has no type there may be of any.
            others = node.get("allOf", [])
            node["allOf"] = [*(others if isinstance(others, list) else []), {"pattern": pattern}]
        else:
            node["pattern"] = pattern


def _portable_patterns(node: Node, path: str) -> None:
    if isinstance(pattern := node.get("pattern"), str):
        node["pattern"] = _portable(pattern, path, "pattern")
    if isinstance(members := node.get("patternProperties"), dict):
        node["patternProperties"] = {_portable(name, path, "patternProperties"): one for name, one in members.items()}


def _portable(pattern: str, path: str, keyword: str) -> str:
    """Return a pattern that means the same to Rust, ECMA-262 and Python, or a narrower one. Raises Unenforceable."""
    if decimal := _DECIMAL.fullmatch(pattern):
        return _plain_decimal(**decimal.groupdict())
    parts: list[str] = []
    for part in _PATTERN_PART.findall(pattern):
        refused = part[0] == "\\" and part[1:] in _ESCAPES_REFUSED
        if refused or (len(part) > 1 and part[0] == "[" and part not in _ANY and _CLASS_FAULT.search(part[1:])):
            raise Unenforceable(
                path, keyword, f"`{part}` is not supported, because implementations read it differently"
            )
        parts.append("(?s:.)" if part in _ANY else _NARROWED.get(part, part))
    return "".join(parts)


def _plain_decimal(free: str | None, places: str | None, digits: str | None, both: str | None) -> str:
    """Return a pattern without look-ahead for decimals in their usual form, which pydantic's pattern allows too."""
    whole = "[0-9]+" if digits is None else f"[0-9]{{1,{digits}}}" if int(digits) else "0"
    most = int(places or both or 0)
    fraction = r"(?:\.[0-9]+)?" if free else rf"(?:\.[0-9]{{1,{most}}})?" if most else ""
    return f"^[+-]?{whole}{fraction}$"


def _counted_properties(node: Node, path: str) -> None:
    """Adapt bounds on the number of properties: an unlisted name may come twice but counts once."""
    required = node.get("required", [])
    fixed = len(required) if isinstance(required, list) else 0
    least, most = node.get("minProperties", 0), node.get("maxProperties")
    if isinstance(least, int) and least - fixed > 1 and node.get("additionalProperties") is not False:
        raise Unenforceable(
            path, "minProperties", "the value may be at most one more than the number of required properties"
        )
    if isinstance(most, int) and most < fixed:
        raise Unenforceable(path, "maxProperties", "the value is less than the number of required properties")


_RULES: Final[tuple[Callable[[Node, str], None], ...]] = (
    _earlier_drafts,
    _bounded_repeats,
    _exact_numbers,
    _checked_format,
    _portable_patterns,
    _counted_properties,
)


def subschemas(node: Node) -> Iterator[tuple[str, Json]]:
    """Return the schemas directly inside a rewritten schema, each with its path relative to it."""
    for key in _SCHEMA_MAPS:
        yield from ((f"{key}/{_escaped(name)}", member) for name, member in _mapping(node.get(key)).items())
    for key in _SCHEMA_LISTS:
        branches = node.get(key)
        yield from ((f"{key}/{at}", one) for at, one in enumerate(branches if isinstance(branches, list) else ()))
    yield from ((key, node[key]) for key in _SCHEMAS if key in node)


def _composes(schema: Json) -> bool:
    """Return whether a schema composes objects of parts (`allOf`), each of which must allow the others' properties."""
    if isinstance(schema, list):
        return any(map(_composes, schema))
    if not isinstance(schema, dict):
        return False
    parts = sum(key in schema for key in (*_APPLICATORS, "properties", "additionalProperties"))
    return (
        "allOf" in schema or (parts > 1 and any(key in schema for key in _APPLICATORS)) or _composes([*schema.values()])
    )


def _is_kept(steps: list[str]) -> bool:
    """Return whether a JSON pointer leads only through keywords that are copied."""
    inside_schema = True
    for step in steps:
        if inside_schema and step not in _KEPT:
            return False
        inside_schema = not inside_schema or step not in (*_SCHEMA_MAPS, *_SCHEMA_LISTS)
    return True


def _mapping(value: Json) -> Node:
    return value if isinstance(value, dict) else {}


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _beyond_doubles(value: Json) -> bool:
    if isinstance(value, list):
        return any(map(_beyond_doubles, value))
    if isinstance(value, dict):
        return any(map(_beyond_doubles, value.values()))
    return isinstance(value, int) and abs(value) > _EXACT
