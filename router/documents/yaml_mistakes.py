"""Explains in plain words why a text is not YAML: what PyYAML reports is about its parser, not about the file."""

from __future__ import annotations

import re

from yaml import Mark, MarkedYAMLError

_KEY = re.compile(r"\s*(?:- +)*[\w.-]+\s*$")  # the line up to a colon, if that is a key
_NO_SPACE = re.compile(r"\s*(?:- +)*[\w.-]+:[^\s:/]")
_INDENTATION = re.compile(r"( *)((?:- +)*)[^\s#]")
_BRACKETS = {"while parsing a flow sequence": ("[", "]"), "while parsing a flow mapping": ("{", "}")}


def explain(error: MarkedYAMLError, text: str) -> tuple[str, Mark | None]:
    """Return what is wrong and what to write, and where. An unknown problem keeps PyYAML's words."""
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
    return f"the indentation does not fit: a {what} in column {mark.column + 1}, those above are in column {known}"


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
