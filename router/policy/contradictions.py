"""Finds conditions that can never hold: bounds outside a signal's range, or that exclude each other.

Only what is certain is reported: comparisons of one signal with one literal, joined by `&&` and `||`. Anything else
counts as a condition that may hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from .cel_source import Token, rewrite, scan, split, unbracketed
from .signals import TEMPERATURE, SignalSpec

_RANGE: Final = re.compile(r"(\d+)\.\.(\d+)")
_NOT_NEGATIVE: Final = frozenset({"tokens", "ms", "MB", "W", "tokens/s", "USD", "requests", "s", "pixels"})
_RANGES: Final[Mapping[str, tuple[float, float]]] = {"request.n": (1.0, math.inf), TEMPERATURE: (0.0, 2.0)}
_MIRRORED: Final = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "=="}


class _Comparison(msgspec.Struct, frozen=True):
    signal: SignalSpec
    sign: str
    value: float | str | bool
    written: str


def contradiction(source: str) -> str:
    """Return why a valid condition can never hold; "" if it may."""
    tokens, _, _ = rewrite(scan(source))
    return _never(tokens, source)


def _never(tokens: list[Token], source: str) -> str:
    tokens = unbracketed(tokens)
    if split(tokens, {"?", ":"}):
        return ""
    if alternatives := split(tokens, {"||"}):
        reasons = [_never(part, source) for part in alternatives]
        return "; ".join(reasons) if all(reasons) else ""
    parts = list(_conjuncts(tokens))
    for part in parts:
        if split(part, {"||"}) and (reason := _never(part, source)):
            return reason
    return _excluded([found for part in parts if (found := _comparison(part, source)) is not None])


def _conjuncts(tokens: list[Token]) -> Iterator[list[Token]]:
    tokens = unbracketed(tokens)
    pieces = [] if split(tokens, {"?", ":"}) or split(tokens, {"||"}) else split(tokens, {"&&"})
    if not pieces:
        yield tokens
    for piece in pieces:
        yield from _conjuncts(piece)


def _comparison(tokens: list[Token], source: str) -> _Comparison | None:
    """Return the comparison of a signal with a literal; None for anything else."""
    written = source[tokens[0].offset : tokens[-1].end] if tokens else ""
    negated = len(tokens) == 2 and tokens[0].text == "!"
    if (len(tokens) == 1 or negated) and (spec := tokens[-1].signal) is not None:
        known = "has " if tokens[-1].presence else ""
        if spec.type == "bool" or known:
            return _Comparison(spec, f"{known}is", not negated, written)
    if len(tokens) < 3 or any(token.presence for token in tokens):
        return None
    first, last = tokens[0].signal, tokens[-1].signal
    if first is not None:
        spec, sign, literal = first, tokens[1].text, tokens[2:]
    elif last is not None:
        spec, sign, literal = last, _MIRRORED.get(tokens[-2].text, ""), tokens[:-2]
    else:
        return None
    value = _literal(literal)
    return None if value is None or sign not in _MIRRORED else _Comparison(spec, sign, value, written)


def _literal(tokens: list[Token]) -> float | str | None:
    text = "".join(token.text for token in tokens)
    if len(tokens) == 1 and tokens[0].kind == "string" and text[0] in "\"'" and "\\" not in text:
        return text[1:-1]
    try:
        return float(text) if tokens[-1].kind == "number" and len(tokens) <= 2 else None
    except ValueError:
        return None


def _excluded(comparisons: list[_Comparison]) -> str:
    """Return which comparisons cannot hold together, or with the range of their signal; "" if all can."""
    by_signal: dict[str, list[_Comparison]] = {}
    for one in comparisons:
        by_signal.setdefault(one.signal.name, []).append(one)
    return next((reason for found in by_signal.values() if (reason := _conflict(found))), "")


def _conflict(found: list[_Comparison]) -> str:
    spec = found[0].signal
    fixed = [one for one in found if one.sign in ("is", "==") and not isinstance(one.value, float)]
    for one in fixed:
        if one.value != fixed[0].value:
            return f"`{fixed[0].written}` and `{one.written}` exclude each other"
    absent = [one for one in found if one.sign == "has is" and one.value is False]
    needed = [one for one in found if one.sign != "has is"]
    if absent and needed:
        return f"`{needed[0].written}` needs the signal that `{absent[0].written}` requires to be absent"
    low, high = _range(spec)
    bounds = [(one, *_interval(one)) for one in found if isinstance(one.value, float)]
    for one, least, most in bounds:
        if not _overlap(spec, (low, False), (high, False), least, most):
            return f"`{one.written}`: {spec.name} is {_shown(low, high)}"
    for index, (one, least, most) in enumerate(bounds):
        for other, other_least, other_most in bounds[:index]:
            if not _overlap(spec, other_least, other_most, least, most):
                return f"`{other.written}` and `{one.written}` exclude each other"
    return ""


_Bound = tuple[float, bool]  # value, and whether it is excluded


def _interval(comparison: _Comparison) -> tuple[_Bound, _Bound]:
    value = float(comparison.value)
    low: _Bound = (value, comparison.sign == ">") if comparison.sign in (">", ">=", "==") else (-math.inf, False)
    high: _Bound = (value, comparison.sign == "<") if comparison.sign in ("<", "<=", "==") else (math.inf, False)
    return low, high


def _overlap(spec: SignalSpec, low: _Bound, high: _Bound, least: _Bound, most: _Bound) -> bool:
    bottom, top = max(low, least), min(high, (most[0], most[1]), key=lambda bound: (bound[0], not bound[1]))
    if spec.type == "int":
        lowest = math.floor(bottom[0]) + 1 if bottom[1] and math.isfinite(bottom[0]) else bottom[0]
        highest = math.ceil(top[0]) - 1 if top[1] and math.isfinite(top[0]) else top[0]
        return lowest <= highest
    return bottom[0] < top[0] or (bottom[0] == top[0] and not bottom[1] and not top[1])


def _range(spec: SignalSpec) -> tuple[float, float]:
    match = _RANGE.fullmatch(spec.unit)
    if match is not None:
        return float(match[1]), float(match[2])
    return _RANGES.get(spec.name, (0.0 if spec.unit in _NOT_NEGATIVE else -math.inf, math.inf))


def _shown(low: float, high: float) -> str:
    return f"at least {low:g}" if math.isinf(high) else f"{low:g} to {high:g}"
