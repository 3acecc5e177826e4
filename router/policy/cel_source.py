"""The source of a CEL expression as tokens: signal names are rewritten to flat variables, literals are checked, and the
expression is split into its single conditions.

The scanner knows only the part of the grammar that is needed to find names: strings, comments, numbers and brackets.
The compiler does the rest. Lexical grammar: https://github.com/google/cel-spec/blob/master/doc/langdef.md#syntax
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from ..documents.reader import did_you_mean
from ..renames import advice
from .signals import GROUPS, SIGNALS, SignalSpec, find_signal

MAX_NESTING = 24

Kind = Literal["space", "string", "number", "name", "sign"]

_RAW = r"""\"{3}(?s:.*?)\"{3}|'{3}(?s:.*?)'{3}|"[^"\n]*"|'[^'\n]*'"""
_ESCAPED = r"""\"{3}(?:\\(?s:.)|[^\\])*?\"{3}|'{3}(?:\\(?s:.)|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'"""
_TOKEN = re.compile(
    rf"""(?P<space>\s+|//[^\n]*)
      | (?P<string>(?:[rR][bB]?|[bB][rR])(?:{_RAW})|[bB]?(?:{_ESCAPED}))
      | (?P<number>0[xX][0-9a-fA-F]+[uU]?|[0-9]*\.[0-9]+(?:[eE][+-]?[0-9]+)?|[0-9]+(?:[eE][+-]?[0-9]+|[uU])?)
      | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<sign>&&|\|\||[=!<>]=|(?s:.))""",
    re.VERBOSE | re.ASCII,
)
_KEYWORDS = frozenset({"true", "false", "null", "in"})
_MACROS = frozenset({"exists", "all", "exists_one", "map", "filter"})
FUNCTIONS = frozenset({"has", "size", "int", "double", "string"})
METHODS = frozenset({"size", "contains", "startsWith", "endsWith", "matches"}) | _MACROS


class ExpressionError(ValueError):
    """An invalid expression. `offset` is the position in its source; None means the expression as a whole."""

    def __init__(self, message: str, offset: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.offset = offset


class Token(msgspec.Struct, frozen=True):
    kind: Kind
    text: str  # the text to compile
    offset: int  # where the original text starts in the source
    end: int
    signal: SignalSpec | None = None  # set for a signal's flat variable
    presence: bool = False  # whether the variable tests the signal's presence


def scan(source: str) -> list[Token]:
    """Return all tokens, spaces and comments included. Raises ExpressionError if brackets nest too deep to parse."""
    tokens: list[Token] = []
    depth = 0
    for match in _TOKEN.finditer(source):
        kind: Kind = match.lastgroup  # type: ignore[assignment]  # exactly one group matches
        tokens.append(Token(kind, match.group(), match.start(), match.end()))
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(match.group(), 0)
        if depth > MAX_NESTING:
            raise ExpressionError(f"brackets nest deeper than {MAX_NESTING}", match.start())
    return tokens


def rewrite(
    tokens: list[Token], more: Mapping[str, SignalSpec] = {}
) -> tuple[list[Token], frozenset[str], frozenset[str]]:
    """Replace signals by flat variables. Returns the tokens, the signals, and the signals inside `has()`.

    Args:
        more: Signals beside those of policies.

    Raises:
        ExpressionError: A signal, a function or a name does not exist.
    """
    return _Rewriter(tokens, more).run()


class _Rewriter:
    def __init__(self, tokens: list[Token], more: Mapping[str, SignalSpec]) -> None:
        self.more = more
        self.tokens = [token for token in tokens if token.kind != "space"]
        self.bound = self._bound_names()
        self.out: list[Token] = []

    def run(self) -> tuple[list[Token], frozenset[str], frozenset[str]]:
        at = 0
        while at < len(self.tokens):
            at += self._step(at)
        _check_literals(self.out)
        named = frozenset(token.signal.name for token in self.out if token.signal is not None)
        known = frozenset(token.signal.name for token in self.out if token.signal is not None and token.presence)
        return self.out, named, known

    def _step(self, at: int) -> int:
        """Handle the token at `at`. Returns the number of tokens consumed."""
        token = self.tokens[at]
        if token.kind != "name" or token.text in _KEYWORDS:
            self.out.append(token)
            return 1
        if text_at(self.tokens, at - 1) == ".":
            self._method(token, at)
            return 1
        if token.text == "has" and text_at(self.tokens, at + 1) == "(":
            return self._has(token, at)
        if text_at(self.tokens, at + 1) == "(":
            if token.text not in FUNCTIONS:
                raise ExpressionError(f"unknown function `{token.text}`{_known(token.text, FUNCTIONS)}", token.offset)
            self.out.append(token)
            return 1
        if token.text in self.bound:
            self.out.append(token)
            return 1
        spec, length = self._signal(at)
        self.out.append(Token("name", spec.variable, token.offset, self.tokens[at + length - 1].end, spec))
        return length

    def _method(self, token: Token, at: int) -> None:
        if text_at(self.tokens, at + 1) != "(":
            raise ExpressionError(f"`.{token.text}`: a signal has no fields", token.offset)
        if token.text not in METHODS:
            raise ExpressionError(f"unknown function `{token.text}`{_known(token.text, METHODS)}", token.offset)
        self.out.append(token)

    def _has(self, token: Token, at: int) -> int:
        spec, length = self._signal(at + 2)
        end = at + 2 + length
        if text_at(self.tokens, end) != ")":
            raise ExpressionError("has() takes one signal: has(device.battery)", token.offset)
        self.out.append(Token("name", spec.presence_variable, token.offset, self.tokens[end].end, spec, presence=True))
        return 3 + length

    def _signal(self, at: int) -> tuple[SignalSpec, int]:
        """Return the signal at tokens `group . name`, or `cloud . NAME . name`, and the number of these tokens."""
        group, dot, name = text_at(self.tokens, at), text_at(self.tokens, at + 1), text_at(self.tokens, at + 2)
        path = f"{group}.{name}" if dot == "." else group
        offset = self.tokens[min(at, len(self.tokens) - 1)].offset
        if (spec := self.more.get(path) or find_signal(path)) is not None:
            return spec, 3
        if group == "cloud" and dot == "." and text_at(self.tokens, at + 3) == ".":
            path = f"{path}.{text_at(self.tokens, at + 4)}"
            if (spec := find_signal(path)) is not None:
                return spec, 5
        if group in GROUPS and dot != ".":
            members = ", ".join(known for known in SIGNALS if known.startswith(f"{group}."))
            raise ExpressionError(f"`{group}` is a group of signals, name one: {members}", offset)
        if message := advice("signal", path):
            raise ExpressionError(message, offset)
        near = did_you_mean(path, {**SIGNALS, **self.more}) or did_you_mean(
            path, {known.partition(".")[2] for known in SIGNALS}
        )
        raise ExpressionError(f"unknown signal `{path}`{near}", offset)

    def _bound_names(self) -> frozenset[str]:
        """Return the variables of macros: the x of `list.exists(x, …)`."""
        names: set[str] = set()
        for at, token in enumerate(self.tokens):
            if token.text in _MACROS and text_at(self.tokens, at - 1) == "." and text_at(self.tokens, at + 1) == "(":
                name = self.tokens[at + 2] if at + 2 < len(self.tokens) else token
                if name.text in GROUPS or "__" in name.text:
                    raise ExpressionError(f"`{name.text}` cannot be a variable here: use another name", name.offset)
                names.add(name.text)
        return frozenset(names)


def _known(word: str, names: frozenset[str]) -> str:
    return did_you_mean(word, names) or f"; known: {', '.join(sorted(names))}"


# --- comparisons that would always be false --------------------------------------------------------------------------

_FAMILY: Mapping[str, str] = {"int": "a number", "double": "a number", "bool": "true or false", "string": "text"}


def _check_literals(tokens: list[Token]) -> None:
    """Refuse `==` and `in` between types that never match: CEL evaluates them to false, so no rule holds."""
    for at, token in enumerate(tokens):
        if token.signal is None or token.presence:
            continue
        left, right = text_at(tokens, at - 1), text_at(tokens, at + 1)
        if right in ("==", "!="):
            _check_equal(token, token.signal, tokens, at + 2)
        if left in ("==", "!=") and right not in (".", "["):
            _check_equal(token, token.signal, tokens, at - 2)
        if left == "in" and right not in (".", "["):
            _check_member(token, token.signal, tokens[at - 2])
        if right == "in" and text_at(tokens, at + 2) == "[":
            _check_equal(token, token.signal, tokens, at + 3)


def _check_equal(token: Token, spec: SignalSpec, tokens: list[Token], at: int) -> None:
    other = tokens[at] if 0 <= at < len(tokens) else token
    family = _family(other)
    if other.text == "null":
        raise ExpressionError(
            f"{spec.name} is never null; use has({spec.name}) to test whether it is known", token.offset
        )
    if family is None:
        return
    if spec.type == "list":
        if other.kind == "string":
            raise ExpressionError(f"{spec.name} is a list: write {other.text} in {spec.name}", token.offset)
        return
    if family != _FAMILY[spec.type]:
        raise ExpressionError(f"{spec.name} is {_FAMILY[spec.type]}, never {other.text}", token.offset)
    _check_value(spec, other)


def _check_member(token: Token, spec: SignalSpec, other: Token) -> None:
    if spec.type != "list":
        raise ExpressionError(f"{spec.name} is not a list: compare with ==", token.offset)
    if _family(other) not in (None, "text"):
        raise ExpressionError(f"{spec.name} is a list of text, so {other.text} is never in it", token.offset)
    _check_value(spec, other)


def _check_value(spec: SignalSpec, literal: Token) -> None:
    value = literal.text[1:-1]
    if spec.values and literal.kind == "string" and "\\" not in value and value not in spec.values:
        near = did_you_mean(value, spec.values) or f"; it is one of {', '.join(spec.values)}"
        raise ExpressionError(f"{spec.name} is never {literal.text}{near}", literal.offset)


def _family(token: Token) -> str | None:
    """Return the type of a single token in words; None if one token is not enough to tell."""
    if token.signal is not None:
        return "true or false" if token.presence else _FAMILY.get(token.signal.type)
    if token.kind in ("string", "number"):
        return "text" if token.kind == "string" else "a number"
    return "true or false" if token.text in ("true", "false") else None


def text_at(tokens: Sequence[Token], at: int) -> str:
    """Return the text of the token at an index; "" outside of the list."""
    return tokens[at].text if 0 <= at < len(tokens) else ""


# --- one condition at a time -----------------------------------------------------------------------------------------


def conditions(tokens: list[Token]) -> list[list[Token]]:
    """Return the operands of `&&`, `||` and `?:`, inside grouping brackets and negation, too. Each must be a bool."""
    found: list[list[Token]] = []
    pending = [tokens]
    while pending:
        part = _unwrap(pending.pop())
        pieces = split(part, {"?", ":"}) or split(part, {"||"}) or split(part, {"&&"})
        if pieces:
            pending.extend(reversed(pieces))
        else:
            found.append(part)
    return found


def needed_signals(tokens: list[Token], *, negated: bool = False) -> frozenset[str]:
    """Return the signals without which the condition cannot be true (`negated`: cannot be false)."""
    if pieces := split(tokens, {"?", ":"}):
        first, *rest = [needed_signals(piece, negated=negated) for piece in pieces]
        return first | frozenset.intersection(*rest)
    for sign, one_side_is_enough in (("||", not negated), ("&&", negated)):
        if pieces := split(tokens, {sign}):
            sides = [needed_signals(piece, negated=negated) for piece in pieces]
            return frozenset.intersection(*sides) if one_side_is_enough else frozenset.union(*sides)
    if tokens and tokens[0].text == "!":
        return needed_signals(tokens[1:], negated=not negated)
    if tokens and tokens[0].text == "(" and _closing(tokens) == len(tokens) - 1:
        return needed_signals(tokens[1:-1], negated=negated)
    return frozenset(token.signal.name for token in tokens if token.signal is not None and not token.presence)


def macro_signals(tokens: list[Token]) -> frozenset[str]:
    """Return the signals inside `exists`, `all` and similar macros. If one of them is absent, the library fails, even
    where another element decides. By the language definition `["x", "a"].exists(t, t == "a" || device.battery > 0.5)`
    is true without a battery, since the second element decides; the library fails at the first.
    """
    found: set[str] = set()
    for at, token in enumerate(tokens):
        if token.text in _MACROS and text_at(tokens, at - 1) == "." and text_at(tokens, at + 1) == "(":
            inside = tokens[at + 1 :]
            body = inside[: _closing(inside)]
            found |= {one.signal.name for one in body if one.signal is not None and not one.presence}
    return frozenset(found)


def measures_text(tokens: list[Token]) -> bool:
    """Return whether `size()` is applied to a text, of which the library counts the UTF-8 bytes."""
    elements = {
        text_at(tokens, at + 2)
        for at, token in enumerate(tokens)
        if token.text in _MACROS and text_at(tokens, at - 1) == "."
    }

    def is_text(token: Token) -> bool:
        return token.kind == "string" or token.text in elements or _family(token) == "text"

    for at, token in enumerate(tokens):
        if token.text != "size" or text_at(tokens, at + 1) != "(":
            continue
        of = at - 2 if text_at(tokens, at - 1) == "." else at + 2
        if 0 <= of < len(tokens) and is_text(tokens[of]) and text_at(tokens, of + 1) in (".", ")"):
            return True
    return False


def unbracketed(tokens: list[Token]) -> list[Token]:
    """Remove brackets around the whole expression."""
    while tokens and tokens[0].text == "(" and _closing(tokens) == len(tokens) - 1:
        tokens = tokens[1:-1]
    return tokens


def _unwrap(tokens: list[Token]) -> list[Token]:
    """Remove brackets around the whole expression, and the `!` before them."""
    bare = tokens
    while bare and bare[0].text == "!":
        bare = bare[1:]
    inside = unbracketed(bare)
    return tokens if inside is bare else _unwrap(inside)


def _closing(tokens: list[Token]) -> int:
    depth = 0
    for at, token in enumerate(tokens):
        depth += _DEPTH.get(token.text, 0)
        if depth == 0:
            return at
    return len(tokens)


def split(tokens: list[Token], signs: set[str]) -> list[list[Token]]:
    """Split at these operators outside brackets; [] if there is none."""
    pieces: list[list[Token]] = [[]]
    depth = 0
    for token in tokens:
        sign = token.text
        depth += _DEPTH.get(sign, 0)
        if depth == 0 and sign in signs:
            pieces.append([])
        else:
            pieces[-1].append(token)
    return pieces if len(pieces) > 1 else []


_DEPTH = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}
