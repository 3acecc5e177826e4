"""Rewriting of a text of the previous version: names are replaced in place; comments and layout stay."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from decimal import Decimal, InvalidOperation
from typing import Literal

import msgspec

from ..documents import strict_yaml
from ..documents.strict_yaml import Scalar, SourceLocation, Tree, read_yaml
from ..errors import ConfigError
from ..policy.cel_source import ExpressionError, scan
from ..renames import GATEWAY_METRICS, MOVED_CLOUD_KEYS, RENAMED, TOKEN_TYPES, Renamed, find

DocumentKind = Literal["edge.yaml", "gateway.yaml", "fleet.yaml", "policy", "cases", "metrics"]
"""`metrics`: any text that names metrics, such as alert rules and dashboards."""
BEFORE = ".before"
"""The suffix of the copy of an original file."""

_BREAK = re.compile(r"\s*\n\s*")
_STEP = re.compile(r"\[\]|[^.\[\]]+")
_EXPRESSIONS = tuple(f"{rules}[].when" for rules in ("constraints", "routes", "cache"))
_SIGNAL_LISTS: dict[DocumentKind, tuple[str, ...]] = {
    "fleet.yaml": ("cohorts.NAME.signals[]",),
    "cases": ("cases[].expect.reasons[].detail", "cases[].expect.cache_reasons[].detail"),
}
_METRIC = re.compile(
    rf"\b({'|'.join(re.escape(one.old) for one in RENAMED['metric'])})(?=(?:_(?:total|bucket|sum|count|created))?\b)"
)
_BEFORE = re.compile(rf"\b{GATEWAY_METRICS}\w*")
_TOKENS = re.compile(r"\bcauseway_[a-z]+_(?:tenant_)?tokens(?:_total)?\{[^}]*\}")
_TYPE = re.compile(r"""\btype\s*[=!]~?\s*\\?["'][^"']*["']""")
_TYPES = re.compile(rf"\b({'|'.join(TOKEN_TYPES)})\b")


class Change(msgspec.Struct, frozen=True):
    """A replacement. `new` is "" for a key that is deleted."""

    line: int
    old: str
    new: str

    def __str__(self) -> str:
        if not self.old:
            return f"line {self.line}: `{_BREAK.sub(', ', self.new.lstrip(', '))}` was added."
        return f"line {self.line}: `{self.old}` is now `{self.new}`." if self.new else f"line {self.line}: deleted."


class Rewritten(msgspec.Struct, frozen=True):
    """A text with the present names. `changes`: the replacements by line; `left`: the names that must be changed by
    hand, as sentences with file and line.
    """

    text: str
    changes: tuple[Change, ...] = ()
    left: tuple[str, ...] = ()

    def report(self, file: str) -> Iterator[str]:
        """Yield a line for each change in the file, and for each change that must be made by hand."""
        yield from (f"{file}: {change}" for change in self.changes)
        yield from self.left
        if self.changes:
            yield f"{file}: rewritten. The original is {file}{BEFORE}."
        elif not self.left:
            yield f"{file}: nothing to rewrite."


class Edit(msgspec.Struct, frozen=True, order=True):
    """A replacement of a text at its place. `old` is "" where text is added."""

    line: int  # from 0
    column: int  # from 0
    old: str
    new: str


def rewrite(text: str, file: str, kind: DocumentKind) -> Rewritten:
    """Return a text with the present names. `file`: its path, for messages. ConfigError names file, line and key: the
    document cannot be read, or a key cannot be replaced.
    """
    lines = text.splitlines(keepends=True)
    left: tuple[str, ...] = ()
    if kind == "metrics":
        edits = list(_metric_edits(lines))
        left = tuple(_left(lines, file))
    elif not any(line.strip() and not line.lstrip().startswith("#") for line in lines):
        return Rewritten(text)  # comments only
    else:
        try:
            tree = read_yaml(text, file)
        except strict_yaml.YamlError as error:
            raise ConfigError(error.problem.message, where=str(error.problem.location)) from error
        edits = [*_key_edits(tree, kind, lines), *_signal_edits(tree, kind, lines)]
        if kind == "edge.yaml":
            edits += _cloud_edits(tree, lines)
    return applied(lines, edits, file, left)


def applied(lines: list[str], edits: Sequence[Edit], file: str, left: tuple[str, ...] = ()) -> Rewritten:
    """Return the text of the lines with the edits. Raises ConfigError for a line that is not as an edit expects."""
    for edit in sorted(edits, reverse=True):
        line = lines[edit.line]
        if not line[edit.column :].startswith(edit.old):
            raise ConfigError("This line cannot be rewritten. Edit the line by hand.", where=f"{file}:{edit.line + 1}")
        lines[edit.line] = line[: edit.column] + edit.new + line[edit.column + len(edit.old) :]
    changes = tuple(Change(edit.line + 1, edit.old.strip(), edit.new.strip()) for edit in sorted(edits))
    return Rewritten("".join(lines), changes, left)


# --- keys ------------------------------------------------------------------------------------------------------------


def steps_of(path: str) -> tuple[str, ...]:
    return tuple(_STEP.findall(path))


def _key_edits(tree: Tree, kind: DocumentKind, lines: Sequence[str]) -> Iterator[Edit]:
    found = RENAMED[kind] if kind != "metrics" else ()
    rows = [(steps_of(one.old), steps_of(one.new)[-1:], one) for one in found if not one.new.startswith("clouds.")]
    if kind == "fleet.yaml":
        settings = ("cohorts", "NAME", "settings")
        rows += [((*settings, one.old), (one.new,) if one.new else (), one) for one in RENAMED["edge.yaml"]]
    for steps, new, renamed in rows:
        for parent, key, value in keys_at(tree, steps):
            if not new:
                yield from _deletion(key, renamed, lines)
                continue
            if key.text != new[0]:
                if any(other.text == new[0] for other in parent.keys):
                    raise ConfigError(
                        f"{renamed.sentence} Both names are set. Delete one of them.", where=str(key.location)
                    )
                yield replaced(key, new[0])
            if renamed.per_million:
                yield replaced(value, _per_million(renamed, value))
            if isinstance(value, Scalar) and value.text in renamed.values:
                yield replaced(value, renamed.values[value.text])


def keys_at(tree: Tree, steps: Sequence[str]) -> Iterator[tuple[strict_yaml.Mapping, Scalar, Tree]]:
    """Yield the keys at a path, each with its mapping and its value."""
    first, *rest = steps
    if first == "[]":
        for item in tree.items if isinstance(tree, strict_yaml.Sequence) else ():
            yield from keys_at(item, rest)
    elif isinstance(tree, strict_yaml.Mapping):
        for key, value in zip(tree.keys, tree.values, strict=True):
            if first not in ("NAME", key.text):
                continue
            if rest:
                yield from keys_at(value, rest)
            else:
                yield tree, key, value


def replaced(scalar: Tree, new: str) -> Edit:
    """Return the edit that replaces a scalar. Raises ConfigError for one that is written with escapes."""
    where = scalar.location
    if not isinstance(scalar, Scalar) or scalar.offset is None:
        raise ConfigError(
            f"The name is now `{new}`, but the old name is written with escapes. Edit the old name by hand.",
            where=str(where),
        )
    return Edit(where.line - 1, where.column - 1 + scalar.offset, scalar.text, new)


def _per_million(renamed: Renamed, value: Tree) -> str:
    """Return the new form of a price of 1,000 tokens. Raises ConfigError if it is not a number."""
    try:
        price = Decimal(value.text if isinstance(value, Scalar) else "") * 1000
    except InvalidOperation:
        raise ConfigError(f"{renamed.sentence} This price is not a number.", where=str(value.location)) from None
    return renamed.per_million.replace("#", f"{price.normalize():f}")


def _deletion(key: Scalar, renamed: Renamed, lines: Sequence[str]) -> Iterator[Edit]:
    """Empty the lines of a key in block style and of its value."""
    start, column = key.location.line - 1, key.location.column - 1
    if lines[start][:column].strip() or key.offset is None:
        raise ConfigError(renamed.sentence, where=str(key.location))
    end = start
    for number in range(start + 1, len(lines)):
        content = lines[number].strip()
        if content and not content.startswith("#"):
            if len(lines[number]) - len(lines[number].lstrip()) <= column:
                if content[0] in "]}":
                    raise ConfigError(renamed.sentence, where=str(key.location))
                break
            end = number
    for number in range(start, end + 1):
        yield Edit(number, 0, lines[number], "")


# --- the clouds of a device ------------------------------------------------------------------------------------------


def _cloud_edits(tree: Tree, lines: Sequence[str]) -> Iterator[Edit]:
    """Move the address and the key of the only cloud from the section `cloud` to `clouds.main`."""
    if not isinstance(tree, strict_yaml.Mapping):
        return
    sections = dict(zip([key.text for key in tree.keys], zip(tree.keys, tree.values, strict=True), strict=True))
    section, values = sections.get("cloud", (None, None))
    if section is None or not isinstance(values, strict_yaml.Mapping):
        return
    moved = [key for key in values.keys if key.text in MOVED_CLOUD_KEYS]
    if not moved:
        return
    renamed = find("edge.yaml", f"cloud.{moved[0].text}")
    assert renamed is not None
    line = section.location.line - 1
    inline = {key.location.line - 1 for key in values.keys} == {line}
    is_block = "{" not in lines[line].partition("#")[0]
    if "clouds" in sections or section.location.column != 1 or not (inline or is_block):
        raise ConfigError(f"{renamed.sentence} Edit this section by hand.", where=str(section.location))
    if inline:
        entries = _entries(values.keys, lines[line])
        clouds = [_renamed_entry(key, entries[key.text]) for key in moved]
        others = [text for key, text in entries.items() if key not in MOVED_CLOUD_KEYS]
        kept = f"cloud: {{{', '.join(others)}}}\n" if others else ""
        yield Edit(line, 0, lines[line], f"clouds: {{main: {{{', '.join(clouds)}}}}}\n{kept}")
        return
    entries = {key.text: lines[key.location.line - 1][key.location.column - 1 :].rstrip() for key in moved}
    text = "".join(f"    {_renamed_entry(key, entries[key.text])}\n" for key in moved)
    kept = lines[line] if len(moved) < len(values.keys) else ""
    yield Edit(line, 0, lines[line], f"clouds:\n  main:\n{text}{kept}")
    for key in moved:
        yield from _deletion(key, renamed, lines)


def _entries(keys: Sequence[Scalar], line: str) -> dict[str, str]:
    """Return the entries of a mapping in one line by their keys."""
    starts = [key.location.column - 1 for key in keys]
    ends = [*starts[1:], line.rindex("}")]
    return {key.text: line[start:end].strip(" ,") for key, start, end in zip(keys, starts, ends, strict=True)}


def _renamed_entry(key: Scalar, entry: str) -> str:
    return MOVED_CLOUD_KEYS[key.text] + entry[entry.index(":") :]


# --- signals ---------------------------------------------------------------------------------------------------------


def _signal_edits(tree: Tree, kind: DocumentKind, lines: Sequence[str]) -> Iterator[Edit]:
    for path in _SIGNAL_LISTS.get(kind, ()):
        for scalar in scalars_at(tree, path):
            if (renamed := find("signal", scalar.text)) is not None:
                yield replaced(scalar, renamed.new)
    for path in _EXPRESSIONS if kind == "policy" else ():
        for scalar in scalars_at(tree, path):
            yield from _expression_edits(scalar, lines)


def scalars_at(tree: Tree, path: str) -> Iterator[Scalar]:
    """Yield the scalars at the path of a key, in which `NAME` stands for any key and `[]` for any item of a list."""
    steps = steps_of(path)
    if steps[-1] != "[]":
        values = [value for _, _, value in keys_at(tree, steps)]
    else:
        lists = [value for _, _, value in keys_at(tree, steps[:-1])]
        values = [item for one in lists if isinstance(one, strict_yaml.Sequence) for item in one.items]
    yield from (value for value in values if isinstance(value, Scalar))


def _expression_edits(scalar: Scalar, lines: Sequence[str]) -> Iterator[Edit]:
    try:
        tokens = [token for token in scan(scalar.text) if token.kind != "space"]
    except ExpressionError:
        return  # refused where the policy is compiled
    found: list[tuple[int, int, Renamed]] = []
    for before, group, dot, name in zip([None, *tokens], tokens, tokens[1:], tokens[2:], strict=False):
        renamed = find("signal", f"{group.text}.{name.text}") if dot.text == "." else None
        if renamed is not None and (before is None or before.text != "."):
            found.append((group.offset, name.end, renamed))
    at = scalar.location
    if scalar.offset is not None:
        for start, end, renamed in found:
            yield Edit(at.line - 1, at.column - 1 + scalar.offset + start, scalar.text[start:end], renamed.new)
    elif found:
        yield from _edits_of_lines(at, found, lines)


def _edits_of_lines(
    at: SourceLocation, found: Sequence[tuple[int, int, Renamed]], lines: Sequence[str]
) -> Iterator[Edit]:
    """Find the signals of an expression that spans several lines, which are indented below its key."""
    first = lines[at.line - 1]
    indent = len(first) - len(first.lstrip(" -"))
    end = at.line
    while end < len(lines) and (not lines[end].strip() or len(lines[end]) - len(lines[end].lstrip(" ")) > indent):
        end += 1
    edits: list[Edit] = []
    for renamed in {one.old: one for _, _, one in found}.values():
        pattern = re.compile(rf"(?<![\w.]){re.escape(renamed.old)}(?!\w)")
        edits += [
            Edit(number, match.start(), match[0], renamed.new)
            for number in range(at.line - 1, end)
            for match in pattern.finditer(lines[number], at.column - 1 if number == at.line - 1 else 0)
        ]
    if len(edits) != len(found):
        raise ConfigError(found[0][2].sentence + " Edit this expression by hand.", where=str(at))
    yield from edits


# --- metrics ---------------------------------------------------------------------------------------------------------


def _metric_edits(lines: Sequence[str]) -> Iterator[Edit]:
    for number, line in enumerate(lines):
        for match in _METRIC.finditer(line):
            renamed = find("metric", match[1])
            if renamed is not None and renamed.new:
                yield Edit(number, match.start(), match[1], renamed.new)
        for selector in _TOKENS.finditer(line):
            for label in _TYPE.finditer(line, *selector.span()):
                for value in _TYPES.finditer(line, *label.span()):
                    yield Edit(number, value.start(), value[1], TOKEN_TYPES[value[1]])


def _left(lines: Sequence[str], file: str) -> Iterator[str]:
    """Yield advice about each metric that was removed or whose labels changed, and about unknown ones."""
    for number, line in enumerate(lines, start=1):
        for match in _BEFORE.finditer(line):
            known = _METRIC.match(line, match.start())
            renamed = None if known is None else find("metric", known[1])
            if renamed is None:
                yield f"{file}:{number}: `{match[0]}` is not the name of a metric. Rewrite it by hand."
            elif not renamed.new:
                yield f"{file}:{number}: {renamed.sentence}"
