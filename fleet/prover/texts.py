"""A text with given results of the policy's tests of texts, found by z3's theory of strings."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from re import _parser as sre  # it has no public name
from typing import Final

import z3

from causeway_server.router.policy.cel_library import cel
from causeway_server.router.policy.cel_source import scan

from .facts import OTHER, Atom, Formula

_TIMEOUT_MS: Final = 1000
_CHARACTERS: Final = z3.AllChar(z3.ReSort(z3.StringSort()))
_CATEGORIES: Final = {"DIGIT": ("09",), "WORD": ("az", "AZ", "09", "__"), "SPACE": ("  ", "\t\t")}


class Impossible(Exception):
    """No text has these results of tests. `conflict`: some of the tests, which exclude each other."""

    def __init__(self, conflict: Collection[Atom]) -> None:
        super().__init__()
        self.conflict = conflict


def realised(tests: Mapping[Atom, bool], but: Collection[str]) -> str:
    """Return a text, none of `but`, with these results of tests. Raises Impossible, or LookupError if unknown."""
    programs = [(cel.compile(one.source.removesuffix("!")), one, result) for one, result in tests.items()]

    def fits(text: str) -> bool:
        return text not in but and all(_result(p, one, text) == result for p, one, result in programs)

    plain = next(filter(fits, (OTHER * count for count in range(1, 2 + len(but)))), None)
    if plain is not None:
        return plain
    solver, text = z3.Solver(), z3.String("text")
    solver.set("timeout", _TIMEOUT_MS)
    solver.add(*[text != z3.StringVal(one) for one in but])
    named: dict[str, Atom] = {}
    inexact: set[Atom] = set()
    for one, result in tests.items():
        try:
            formula, exact = _of_test(one, text)
        except (KeyError, re.error):
            continue  # the test has no formula: a text without it may still fit
        named[f"test{len(named)}"] = one
        inexact |= set() if exact else {one}
        solver.assert_and_track(formula == result, list(named)[-1])
    found = solver.check()
    if found == z3.sat and fits(value := str(solver.model().eval(text, model_completion=True).as_string())):
        return value
    conflict = {named[str(one)] for one in solver.unsat_core()} if found == z3.unsat else inexact
    if found == z3.unsat and inexact.isdisjoint(conflict):
        raise Impossible(conflict)
    raise LookupError


def _result(program: cel.Program, atom: Atom, text: str) -> bool:
    try:
        return program.execute(cel.Context({atom.word: text})) is True and not atom.source.endswith("!")
    except Exception:  # undocumented ones of the binding
        return atom.source.endswith("!")


def _of_test(atom: Atom, text: z3.SeqRef) -> tuple[Formula, bool]:
    """Return the formula of a test, and whether it is exact. Raises KeyError: the test has no formula."""
    tokens = [token for token in scan(atom.source) if token.kind != "space"]
    values = [cel.compile(one.text).execute(cel.Context({})) for one in tokens if one.kind in ("string", "number")]
    form = " ".join(
        {atom.word: "x"}.get(one.text, "y" if one.kind in ("string", "number") else one.text) for one in tokens
    )
    if re.fullmatch(r"x in \[ y( , y)* \]", form):
        return z3.Or(*[text == z3.StringVal(value) for value in values]), True
    if form == "x . matches ( y )":
        return _matches(values[0], text)
    if found := re.fullmatch(r"(?:size \( x \)|x \. size \( \)) (\S+) y", form):
        return _compared(z3.Length(text), found[1], values[0]), False  # the library counts bytes
    if found := re.fullmatch(r"x (==|!=|<|<=|>|>=) y", form):
        equal, less = text == z3.StringVal(values[0]), z3.InRe(text, _before(values[0]))
        forms = {"==": equal, "<": less, "<=": z3.Or(less, equal), ">": z3.Not(z3.Or(less, equal)), ">=": z3.Not(less)}
        return forms.get(found[1], z3.Not(equal)), True
    method = {
        "startsWith": z3.PrefixOf,
        "endsWith": z3.SuffixOf,
        "contains": lambda part, whole: z3.Contains(whole, part),
    }
    return method[form.removeprefix("x . ").removesuffix(" ( y )")](z3.StringVal(values[0]), text), True


def _compared(left: z3.ExprRef, sign: str, right: object) -> Formula:
    if sign in ("==", "!="):
        return left == right if sign == "==" else left != right
    return {"<": left < right, "<=": left <= right, ">": left > right, ">=": left >= right}[sign]


def _before(value: str) -> z3.ReRef:
    """Return the texts before one in the order of code points, which is that of UTF-8."""
    smaller = [
        z3.Concat(z3.Re(value[:at]), z3.Range("\0", chr(ord(one) - 1)), z3.Full(z3.ReSort(z3.StringSort())))
        for at, one in enumerate(value)
        if one != "\0"
    ]
    return _union([*[z3.Re(value[:at]) for at in range(len(value))], *smaller, z3.Empty(z3.ReSort(z3.StringSort()))])


# --- regular expressions ----------------------------------------------------------------------------------------------


def _matches(pattern: str, text: z3.SeqRef) -> tuple[Formula, bool]:
    """Return whether a regular expression occurs in a text; the library finds it anywhere."""
    parsed = sre.parse(pattern)
    if parsed.state.flags & ~re.UNICODE.value:
        raise KeyError(pattern)
    items = list(parsed)
    anchored = [bool(items) and str(items[at][1]) == place for at, place in ((0, "AT_BEGINNING"), (-1, "AT_END"))]
    items = items[1:] if anchored[0] else items
    items = items[:-1] if anchored[1] and items else items
    around = [z3.Re("") if one else z3.Full(z3.ReSort(z3.StringSort())) for one in anchored]
    return z3.InRe(text, z3.Concat(around[0], _sequence(items), around[1])), "CATEGORY" not in str(items)


def _sequence(items: Iterable[tuple[object, object]]) -> z3.ReRef:
    parts = [_item(str(kind), value) for kind, value in items]
    return z3.Re("") if not parts else parts[0] if len(parts) == 1 else z3.Concat(*parts)


def _item(kind: str, value: object) -> z3.ReRef:
    """Return a part of a regular expression. Raises KeyError: z3 has no such part."""
    if kind == "LITERAL" and isinstance(value, int):
        return z3.Re(chr(value))
    if kind == "ANY":
        return z3.Diff(_CHARACTERS, z3.Re("\n"))
    if kind == "NOT_LITERAL" and isinstance(value, int):
        return z3.Diff(_CHARACTERS, z3.Re(chr(value)))
    if kind == "RANGE" and isinstance(value, tuple):
        return z3.Range(chr(value[0]), chr(value[1]))
    if kind == "CATEGORY":
        return _union([z3.Range(*pair) for pair in _CATEGORIES[str(value).removeprefix("CATEGORY_")]])
    if kind == "IN" and isinstance(value, list):
        negated = str(value[0][0]) == "NEGATE"
        found = _union([_item(str(one), many) for one, many in value[negated:]])
        return z3.Diff(_CHARACTERS, found) if negated else found
    if kind == "BRANCH" and isinstance(value, tuple):
        return _union([_sequence(branch) for branch in value[1]])
    if kind == "SUBPATTERN" and isinstance(value, tuple):
        return _sequence(value[3])
    if kind in ("MAX_REPEAT", "MIN_REPEAT") and isinstance(value, tuple):
        least, most, inner = value
        repeated = _sequence(inner)
        return (
            z3.Concat(z3.Loop(repeated, least, least), z3.Star(repeated))
            if str(most) == "MAXREPEAT"
            else z3.Loop(repeated, least, most)
        )
    raise KeyError(kind)


def _union(parts: list[z3.ReRef]) -> z3.ReRef:
    return parts[0] if len(parts) == 1 else z3.Union(*parts)
