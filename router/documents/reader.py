"""The conversion of a YAML tree to a msgspec struct. Every mistake is reported with its location, not only the first.

The struct is the grammar: its fields are the keys, `Meta` gives bounds and patterns, and `Meta(title=…)` describes the
expected value in messages. The JSON schema is made from the same struct, so editors and the daemon agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec
from msgspec import inspect as shapes

from ..renames import advice
from .strict_yaml import Mapping, Problem, Scalar, Sequence, SourceLocation, Tree, YamlError, read_yaml

T = TypeVar("T")
Plain = str | int | float | bool | list["Plain"] | dict[str, "Plain"]

_INT = re.compile(r"[-+]?(0|[1-9][0-9]{0,17})", re.ASCII)
_FLOAT = re.compile(r"[-+]?[0-9]{1,17}(\.[0-9]{1,17})?([eE][-+]?[0-9]{1,2})?", re.ASCII)


_SHAPES: dict[object, shapes.Type] = {}
"""The keys of each struct, cached because collecting them takes milliseconds, which is longer than reading a policy."""


class KeyLocations(msgspec.Struct, frozen=True):
    """The location of each key of a file, by path (``routes[1].when``)."""

    scalars: dict[str, Scalar]
    by_path: dict[str, SourceLocation]

    def find(self, path: str) -> SourceLocation:
        """Return the location of a key, or of the nearest enclosing key if the file does not have it."""
        while path and path not in self.by_path:
            path = path[: max(path.rfind("."), path.rfind("["), 0)]
        return self.by_path[path]


def read_struct(text: str, file: str, kind: type[T]) -> tuple[T | None, KeyLocations, tuple[Problem, ...]]:
    """Read `text` as `kind`. The value is None if and only if there are problems. Raise nothing."""
    try:
        tree = read_yaml(text, file)
    except YamlError as error:
        return None, KeyLocations({}, {"": SourceLocation(file)}), (error.problem,)
    root = _SHAPES.get(kind) or _SHAPES.setdefault(kind, shapes.type_info(kind))
    reader = _Reader(root)
    plain = reader.read(tree, root, "")
    locations = KeyLocations(reader.scalars, reader.locations)
    if reader.problems or plain is None:
        return None, locations, tuple(reader.problems)
    try:
        return msgspec.convert(plain, kind), locations, ()
    except msgspec.ValidationError as error:  # a bound that the reader below does not check
        return None, locations, (Problem(tree.location, str(error)),)


def _places(kind: shapes.Type, path: str) -> Iterator[str]:
    """Yield the path of every key below `kind`: ``routes[].use``, ``targets.NAME.at``."""
    if isinstance(kind, shapes.Metadata):
        yield from _places(kind.type, path)
    elif isinstance(kind, shapes.UnionType):
        for option in kind.types:
            yield from _places(option, path)
    elif isinstance(kind, shapes.VarTupleType):
        yield from _places(kind.item_type, f"{path}[]")
    elif isinstance(kind, shapes.DictType):
        yield from _places(kind.value_type, f"{path}.NAME")
    elif isinstance(kind, shapes.StructType):
        for field in kind.fields:
            below = f"{path}.{field.encode_name}" if path else field.encode_name
            yield below
            yield from _places(field.type, below)


def _example(name: str, kind: shapes.Type, title: str = "") -> str:
    """Return an example such as ``: write `version: 1` ``, or a description of the value; "" if neither is known."""
    if isinstance(kind, shapes.Metadata):
        own_title = (kind.extra_json_schema or {}).get("title", title)
        return _example(name, kind.type, str(own_title))
    if isinstance(kind, shapes.UnionType):
        return _example(name, _options(kind, None)[0], title)
    if isinstance(kind, shapes.LiteralType):
        return f": write {' or '.join(f'`{name}: {value}`' for value in kind.values)}"
    return f": it needs {title}" if title else ""


def _options(kind: shapes.UnionType, tree: Tree | None) -> list[shapes.Type]:
    """Return the types that a value may have: those of a list, of a mapping of known keys, or of plain values."""
    options = [option for option in kind.types if not isinstance(option, shapes.NoneType)]
    bare = [option.type if isinstance(option, shapes.Metadata) else option for option in options]
    of_list = [one for one, shape in zip(options, bare, strict=True) if isinstance(shape, shapes.VarTupleType)]
    of_keys = [one for one, shape in zip(options, bare, strict=True) if isinstance(shape, shapes.StructType)]
    if isinstance(tree, Mapping) and of_keys:
        return of_keys
    plain = [option for option in options if option not in of_list and option not in of_keys]
    return of_list if of_list and (isinstance(tree, Sequence) or not plain) else plain or options


class _Reader:
    def __init__(self, root: shapes.Type) -> None:
        self._root = root
        self.problems: list[Problem] = []
        self.scalars: dict[str, Scalar] = {}
        self.locations: dict[str, SourceLocation] = {}

    def read(self, tree: Tree, kind: shapes.Type, title: str) -> Plain | None:
        """Return the plain value, or None after reporting a problem."""
        self.locations.setdefault(tree.location.path, tree.location)
        if isinstance(kind, shapes.Metadata):
            own_title = (kind.extra_json_schema or {}).get("title", title)
            return self.read(tree, kind.type, own_title if isinstance(own_title, str) else title)
        if isinstance(kind, shapes.UnionType):  # `X | None`, or several plain types
            options = _options(kind, tree)
            return self.read(tree, options[0], title) if len(options) == 1 else self._plain(tree, title)
        if isinstance(tree, Scalar) and tree.kind == "null":
            entries = isinstance(kind, shapes.StructType | shapes.DictType | shapes.VarTupleType)
            advice = "indent its entries below it," if entries else "give a value"
            return self._report(tree, f"is empty: {advice} or leave the key out")
        if isinstance(kind, shapes.StructType):
            return self._struct(tree, kind)
        if isinstance(kind, shapes.DictType):
            return self._dict(tree, kind)
        if isinstance(kind, shapes.VarTupleType | shapes.FrozenSetType):
            return self._list(tree, kind)
        return self._scalar(tree, kind, title)

    def _struct(self, tree: Tree, kind: shapes.StructType) -> Plain | None:
        if not isinstance(tree, Mapping):
            return self._report(tree, "must be a mapping of keys to values")
        fields = {field.encode_name: field for field in kind.fields}
        values: dict[str, Plain] = {}
        for key, value in zip(tree.keys, tree.values, strict=True):
            field = fields.get(key.text)
            self.locations[key.location.path] = key.location
            if field is None:
                path = key.location.path
                renamed = advice("fleet.yaml", path) or advice("cases", path) or advice("policy", path)
                self.problems.append(Problem(key.location, renamed or f"unknown key{self._advice(key.text, fields)}"))
                continue
            plain = self.read(value, field.type, "")
            if plain is not None:
                values[key.text] = plain
        present = {key.text for key in tree.keys}
        for name, field in fields.items():
            if field.required and name not in present:
                self._report(tree, f"the key `{name}` is missing{_example(name, field.type)}")
        return values

    def _advice(self, key: str, fields: dict[str, shapes.Field]) -> str:
        """Return advice for an unknown key: a similar known key, else the place where the key belongs."""
        paths = [path.rpartition(".") for path in _places(self._root, "")]
        elsewhere = [f"`{parent}`" if parent else "the top level" for parent, _, name in paths if name == key]
        if elsewhere:
            return f" here: it belongs in {' or '.join(elsewhere)}; check the indentation"
        return did_you_mean(key, fields) or f"; known here: {', '.join(fields)}"

    def _dict(self, tree: Tree, kind: shapes.DictType) -> Plain | None:
        if not isinstance(tree, Mapping):
            return self._report(tree, "must be a mapping of names to values")
        if kind.min_length is not None and len(tree.keys) < kind.min_length:
            return self._report(tree, f"needs at least {kind.min_length} entry")
        values: dict[str, Plain] = {}
        for key, value in zip(tree.keys, tree.values, strict=True):
            self.locations[key.location.path] = key.location
            name = self.read(key, kind.key_type, "")
            plain = self.read(value, kind.value_type, "")
            if isinstance(name, str) and plain is not None:
                values[name] = plain
        return values

    def _list(self, tree: Tree, kind: shapes.VarTupleType | shapes.FrozenSetType) -> Plain | None:
        if not isinstance(tree, Sequence):
            return self._report(tree, "must be a list: [a, b]")
        if kind.min_length is not None and len(tree.items) < kind.min_length:
            return self._report(tree, f"needs at least {kind.min_length} entry")
        values = [self.read(item, kind.item_type, "") for item in tree.items]
        return [value for value in values if value is not None]

    def _scalar(self, tree: Tree, kind: shapes.Type, title: str) -> Plain | None:
        if not isinstance(tree, Scalar):
            return self._report(
                tree,
                f"must be {title or _TYPE_NAMES.get(type(kind), 'one value')}, not a {type(tree).__name__.lower()}",
            )
        self.scalars[tree.location.path] = tree
        for known, read in _SCALARS:
            if isinstance(kind, known):
                value, message = read(tree, kind, title)
                return value if value is not None else self._report(tree, message)
        raise TypeError(f"no reader for {kind}")  # a bug in one of our structs

    def _plain(self, tree: Tree, title: str) -> Plain | None:
        """Read a value of a plain type: text, number or boolean."""
        if isinstance(tree, Scalar):
            if tree.kind in _PLAIN_KINDS:
                return self._scalar(tree, _PLAIN_KINDS[tree.kind], title)
            advice = (
                "is empty: give a value or leave the key out" if tree.kind == "null" else "is a date: put it in quotes"
            )
            return self._report(tree, advice)
        return self._report(tree, f"must be one value, not a {type(tree).__name__.lower()}")

    def _report(self, tree: Tree, message: str) -> Plain | None:
        self.problems.append(Problem(tree.location, message))
        return None


_Read = tuple[Plain | None, str]  # the value, or None and what is wrong


def _text(scalar: Scalar, kind: shapes.Type, title: str) -> _Read:
    assert isinstance(kind, shapes.StrType)
    text = scalar.text
    if kind.max_length is not None and len(text) > kind.max_length:
        return None, f"longer than {kind.max_length} characters"
    if kind.pattern is not None and re.fullmatch(kind.pattern, text) is None:
        return None, f"`{_shorten(text)}` is not {title or f'of the form {kind.pattern}'}"
    if scalar.kind != "text":
        return None, f"`{_shorten(text)}` is read as {_ARTICLES[scalar.kind]}, not as text: put it in quotes"
    return text, ""


def _literal(scalar: Scalar, kind: shapes.Type, title: str) -> _Read:
    assert isinstance(kind, shapes.LiteralType)
    for value in kind.values:
        if scalar.text == str(value):
            return value, ""
    known = [str(value) for value in kind.values]
    if len(known) == 1:
        key = scalar.location.path.rpartition(".")[2]
        return None, f"`{_shorten(scalar.text)}` is not known: write `{key}: {known[0]}`"
    return None, f"`{_shorten(scalar.text)}` is not one of {', '.join(known)}{did_you_mean(scalar.text, known)}"


def _integer(scalar: Scalar, kind: shapes.Type, title: str) -> _Read:
    assert isinstance(kind, shapes.IntType)
    if scalar.kind != "int" or _INT.fullmatch(scalar.text) is None:
        return None, f"`{_shorten(scalar.text)}` is not {title or 'a whole number'}"
    return _bounded(int(scalar.text), kind)


def _number(scalar: Scalar, kind: shapes.Type, title: str) -> _Read:
    assert isinstance(kind, shapes.FloatType)
    # YAML 1.1 reads "1e3" as text (it requires a dot and a sign); all other readers read a number.
    plain = scalar.kind in ("int", "float") or (scalar.kind == "text" and scalar.offset == 0)
    if not plain or _FLOAT.fullmatch(scalar.text) is None:
        return None, f"`{_shorten(scalar.text)}` is not {title or 'a number'}"
    return _bounded(float(scalar.text), kind)


def _boolean(scalar: Scalar, kind: shapes.Type, title: str) -> _Read:
    if scalar.kind != "bool" or scalar.text not in ("true", "false"):
        return None, f"`{_shorten(scalar.text)}` is not true or false"
    return scalar.text == "true", ""


def _bounded(value: float, kind: shapes.IntType | shapes.FloatType) -> _Read:
    if kind.ge is not None and value < kind.ge:
        return None, f"{value:g} is less than {kind.ge:g}"
    if kind.gt is not None and value <= kind.gt:
        return None, f"{value:g} is not more than {kind.gt:g}"
    if kind.le is not None and value > kind.le:
        return None, f"{value:g} is more than {kind.le:g}"
    return value, ""


_SCALARS: tuple[tuple[type[shapes.Type], Callable[[Scalar, shapes.Type, str], _Read]], ...] = (
    (shapes.StrType, _text),
    (shapes.LiteralType, _literal),
    (shapes.BoolType, _boolean),
    (shapes.IntType, _integer),
    (shapes.FloatType, _number),
)
_PLAIN_KINDS: dict[str, shapes.Type] = {
    "text": shapes.StrType(),
    "int": shapes.IntType(),
    "float": shapes.FloatType(),
    "bool": shapes.BoolType(),
}
_ARTICLES = {"int": "a number", "float": "a number", "bool": "true or false", "null": "nothing", "other": "a date"}
_TYPE_NAMES: dict[type[shapes.Type], str] = {
    shapes.StrType: "text",
    shapes.BoolType: "true or false",
    shapes.IntType: "a whole number",
    shapes.FloatType: "a number",
    shapes.LiteralType: "one word",
}


def _shorten(text: str) -> str:
    return text if len(text) <= 60 else text[:57] + "…"


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``, did you mean `x`?`` to end a message with, or "" if no known word is similar."""
    from difflib import get_close_matches  # on demand: most documents have no error

    near = get_close_matches(word[:100], list(known), n=1, cutoff=0.6)
    return f", did you mean `{near[0]}`?" if near else ""
