"""The parser of a strict subset of YAML, mappings, lists and scalars: text → a tree of nodes with source locations.

Anchors and aliases, tags, merge keys, duplicate keys, keys that are not text, and several documents are refused,
because each can give a file another meaning than it seems to have. Files of more than 256 KB or more than 16 levels are
refused, too.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec
import yaml
from yaml import Mark, MarkedYAMLError
from yaml.events import AliasEvent, NodeEvent
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

MAX_BYTES = 256 * 1024
MAX_DEPTH = 16
_MAX_NODES = 10_000  # of one file; no handwritten file has so many

Severity = Literal["error", "warning"]
ScalarKind = Literal["text", "int", "float", "bool", "null", "other"]
_KINDS: dict[str, ScalarKind] = {"str": "text", "int": "int", "float": "float", "bool": "bool", "null": "null"}


class SourceLocation(msgspec.Struct, frozen=True):
    """A position in a file. Line and column count from 1; `path` is the key (``routes[1].when``), "" for the file."""

    file: str
    line: int = 0
    column: int = 0
    path: str = ""

    def __str__(self) -> str:
        position = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{position}: {self.path}" if self.path else position

    def shifted(self, columns: int) -> SourceLocation:
        return msgspec.structs.replace(self, column=self.column + columns)


class Problem(msgspec.Struct, frozen=True):
    location: SourceLocation
    message: str
    severity: Severity = "error"

    def __str__(self) -> str:
        return f"{self.location}: {self.message}"


class Scalar(msgspec.Struct, frozen=True):
    location: SourceLocation
    text: str  # as written, without quotes
    kind: ScalarKind
    offset: int | None  # columns from the location to the text's first character; None if the text spans lines

    def value(self) -> str | int | float | bool | None:
        """Return what the scalar stands for. Dates, and numbers in octal or base 60, stay text."""
        if self.kind == "null":
            return None
        if self.kind == "bool":
            return self.text.lower() in ("true", "yes", "on")
        try:
            if self.kind in ("int", "float"):
                return (int if self.kind == "int" else float)(self.text.replace("_", ""))
        except ValueError:
            pass
        return self.text


class Sequence(msgspec.Struct, frozen=True):
    location: SourceLocation
    items: tuple[Tree, ...]


class Mapping(msgspec.Struct, frozen=True):
    location: SourceLocation
    keys: tuple[Scalar, ...]
    values: tuple[Tree, ...]


Tree = Scalar | Sequence | Mapping


class YamlError(Exception):
    """The text is not YAML, or uses a part of YAML that is refused. It contains the problem that ended the parsing."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def read_yaml(text: str, file: str) -> Tree:
    """Parse `text`. `file` is its name in messages. Raises only YamlError, whatever the text is."""
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise YamlError(Problem(SourceLocation(file), f"the file is larger than {MAX_BYTES // 1024} KiB"))
    try:
        loader = _Loader(text, file)
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        explanation, mark = explain(error, text)
        raise YamlError(Problem(_location(file, mark), f"the file is not valid YAML: {explanation}")) from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        # PyYAML raises ValueError for escapes beyond Unicode and for absurd version directives.
        raise YamlError(Problem(SourceLocation(file), f"the file is not valid YAML: {_first_line(error)}")) from error
    if node is None:
        raise YamlError(Problem(SourceLocation(file, 1, 1), "the file is empty"))
    return _convert(node, file, "")


class _Loader(yaml.SafeLoader):
    """Composes nodes and refuses aliases, anchors, tags, deep nesting and huge files."""

    def __init__(self, text: str, file: str) -> None:
        super().__init__(text)
        self._file = file
        self._depth = 0
        self._count = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        event: NodeEvent = self.peek_event()  # type: ignore[no-untyped-call]
        self._refuse_features(event)
        self._depth += 1
        self._count += 1
        if self._depth > MAX_DEPTH or self._count > _MAX_NODES:
            message = f"nested deeper than {MAX_DEPTH} levels" if self._depth > MAX_DEPTH else "too many entries"
            raise self._error(event, message)
        node: Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def _refuse_features(self, event: NodeEvent) -> None:
        if isinstance(event, AliasEvent):
            raise self._error(event, f"aliases are not allowed (*{event.anchor}): repeat the value")
        if event.anchor is not None:
            raise self._error(event, f"anchors are not allowed (&{event.anchor}): repeat the value where it is used")
        tag = getattr(event, "tag", None)
        if tag is not None:
            raise self._error(event, f"tags are not allowed ({tag}): put a value that starts with ! in quotes")

    def _error(self, event: NodeEvent, message: str) -> YamlError:
        return YamlError(Problem(_location(self._file, event.start_mark), message))  # type: ignore[arg-type]  # of C


def _location(file: str, mark: Mark | None, path: str = "") -> SourceLocation:
    return SourceLocation(file) if mark is None else SourceLocation(file, mark.line + 1, mark.column + 1, path)


def _convert(node: Node, file: str, path: str) -> Tree:
    location = _location(file, node.start_mark, path)
    if isinstance(node, ScalarNode):
        return _scalar(node, location)
    if isinstance(node, SequenceNode):
        return Sequence(location, tuple(_convert(item, file, f"{path}[{i}]") for i, item in enumerate(node.value)))
    assert isinstance(node, MappingNode)
    return _mapping(node, file, location)


def _mapping(node: MappingNode, file: str, location: SourceLocation) -> Mapping:
    keys: list[Scalar] = []
    values: list[Tree] = []
    seen: set[str] = set()
    for key_node, value_node in node.value:
        key_location = _location(file, key_node.start_mark, location.path)
        if not isinstance(key_node, ScalarNode):
            raise YamlError(Problem(key_location, "a key must be text"))
        if key_node.tag.endswith(":merge"):
            raise YamlError(Problem(key_location, "merge keys (<<) are not allowed: repeat the keys"))
        key = _scalar(key_node, key_location)
        path = f"{location.path}.{key.text}" if location.path else key.text
        key_location = msgspec.structs.replace(key_location, path=path)
        if key.text in seen:
            raise YamlError(Problem(key_location, "the key appears twice"))
        seen.add(key.text)
        keys.append(msgspec.structs.replace(key, location=key_location))
        values.append(_convert(value_node, file, path))
    return Mapping(location, tuple(keys), tuple(values))


def _scalar(node: ScalarNode, location: SourceLocation) -> Scalar:
    text: str = node.value
    if any("\ud800" <= char <= "\udfff" for char in text):
        raise YamlError(Problem(location, "the value has a character that is not Unicode text (a lone surrogate)"))
    quoted = node.style in ("'", '"')
    one_line = node.start_mark.line == node.end_mark.line and node.style not in ("|", ">")
    # Escapes shift the columns: only plain text, and quoted text without escapes, keeps them.
    width = node.end_mark.column - node.start_mark.column
    exact = one_line and width == len(text) + (2 if quoted else 0)
    kind = _KINDS.get(node.tag.rpartition(":")[2], "other")
    return Scalar(location, text, kind, int(quoted) if exact else None)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


_KEY = re.compile(r"\s*(?:- +)*[\w.-]+\s*$")  # the line up to a colon, if that is a key
_NO_SPACE = re.compile(r"\s*(?:- +)*[\w.-]+:[^\s:/]")
_INDENTATION = re.compile(r"( *)((?:- +)*)[^\s#]")
_BRACKETS = {"while parsing a flow sequence": ("[", "]"), "while parsing a flow mapping": ("{", "}")}


def explain(error: MarkedYAMLError, text: str) -> tuple[str, Mark | None]:
    """Return why a text is not YAML, with the correction, and where; PyYAML's message, which describes its parser and
    not the file, for an unknown problem alone.
    """
    problem, context = error.problem or "", error.context or ""
    mark, start = error.problem_mark, error.context_mark
    lines = text.splitlines()
    if mark is None:
        return problem or context, start
    line = lines[mark.line] if mark.line < len(lines) else ""
    if "'\\t'" in problem:
        return "a tab: indent with spaces", mark
    if context in _BRACKETS and start is not None:
        opening, closing = _BRACKETS[context]
        return f"the `{opening}` of line {start.line + 1} is not closed: a `,` or `{closing}` is missing", mark
    if problem.startswith("expected the node content") and "<stream end>" in problem:
        return "the file ends within a `[` or `{` that is not closed", mark
    if problem == "found unexpected end of stream" and start is not None:
        return f"the quote of line {start.line + 1} is not closed", mark
    if problem == "could not find expected ':'" and start is not None:
        return "a key without a colon: write `key: value`, or indent a value that continues the line above", start
    if problem.startswith("expected <block end>") and start is not None:
        return _block_end(problem, line, lines, mark), mark
    if problem == "mapping values are not allowed here":
        return _second_colon(lines, line, mark), mark
    if "that cannot start any token" in problem or "expected alphabetic or numeric character" in problem:
        character = line[mark.column : mark.column + 1] if start is None else line[start.column : start.column + 1]
        return f"a value cannot start with {character}: put the whole value in quotes", start or mark
    return problem or context, mark


def _block_end(problem: str, line: str, lines: list[str], mark: Mark) -> str:
    if "<scalar>" in problem and line[: mark.column].strip():
        return "text after a closing quote: put the whole value in quotes, such as '\"a\" in request.tags'"
    item = "sequence" in problem or "'-'" in problem
    what = "list item" if item else "key"
    columns = _columns(lines[: mark.line], items=item)
    if not columns or columns[0][0] == mark.column + 1:
        return f"a {what} where the lines above have a {'key' if item else 'list item'}: check the indentation"
    known = " or ".join(f"{column} (line {number})" for column, number in columns)
    return f"the indentation does not fit: a {what} in column {mark.column + 1}, but those above are in column {known}"


def _columns(lines: list[str], *, items: bool) -> list[tuple[int, int]]:
    """Return column and line of the last key (or list item) of each block open after `lines`, innermost first."""
    found: list[tuple[int, int]] = []
    limit = max(map(len, lines), default=0) + 1
    for number in range(len(lines), 0, -1):
        match = _INDENTATION.match(lines[number - 1])
        if match is None or len(match[1]) >= limit:
            continue
        limit, dashes = len(match[1]), match[2]
        if items and dashes:
            found.append((limit + 1, number))
        elif not items:
            found.append((limit + len(dashes) + 1, number))
    return found


def _second_colon(lines: list[str], line: str, mark: Mark) -> str:
    """Explain a `key:` where a value has already begun: on the same line, or on the line above."""
    above = next((at for at in range(mark.line - 1, -1, -1) if lines[at].strip()), None)
    if above is None or not _KEY.match(line[: mark.column]):
        return "a value that contains `: ` needs quotes around the whole value"
    if _NO_SPACE.match(lines[above]):
        return f"line {above + 1} has no space after its colon: write `key: value`"
    return (
        f"this key is indented deeper than line {above + 1}, which already has a value: align it with that line's key"
    )
