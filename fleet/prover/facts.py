"""The facts of a request and a device as variables of z3, each made when a formula first needs it.

A number is a bit vector or a float of 64 bits, as in CEL, so that overflow and rounding are exact. A text is one of a
pool of texts, or another one, of which only the results of the policy's own tests are known (`Facts.atom`): each test
is then a free fact. The tags are a set of the pool's texts and of such other ones (`slots`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

import msgspec
import z3

from causeway_server.router.policy.cel_library import cel
from causeway_server.router.policy.cel_source import Token
from causeway_server.router.policy.expression import TAGS
from causeway_server.router.policy.lint import signal_range
from causeway_server.router.policy.signals import (
    AUDIO_S,
    AUDIO_SPEECH,
    IMAGE_PIXELS,
    IMAGES_TEXT,
    PART_SIGNALS,
    PII_CLASSES_SIGNAL,
    PII_COUNT,
    TEMPERATURE,
    SignalSpec,
)
from causeway_server.router.residency import PREFIX, regions_of

Formula: TypeAlias = z3.BoolRef
TRUE: Final = z3.BoolVal(True)
FALSE: Final = z3.BoolVal(False)
DOUBLE: Final = z3.Float64()
NEAREST: Final = z3.RNE()
PARTS: Final = ("image", "audio", "file")
OTHER: Final = "~"
"""A text that no policy names."""
_INDEX_BITS: Final = 16
_MOST: Final = 1e17  # the largest value of a signal; the smallest one above 0 is its inverse
_ZERO: Final = z3.BitVecVal(0, 64)
_WITHOUT: Final = {IMAGE_PIXELS: _ZERO, AUDIO_S: z3.FPVal(0.0, DOUBLE), IMAGES_TEXT: FALSE, AUDIO_SPEECH: FALSE}


class Number(NamedTuple):
    """A number of CEL. `error`: whether it has no value. `is_computed`: a double that may be NaN."""

    value: z3.ExprRef
    error: Formula
    is_int: bool
    is_computed: bool = False


class Text(NamedTuple):
    """A text. `options`: each text of the pool, and whether it is that. `other`: whether it is none of these."""

    name: str
    options: tuple[tuple[Formula, str], ...]
    other: Formula


class Element(NamedTuple):
    """A member of a list, if it is `present`. `text`: None for one that is not of the pool."""

    name: str
    text: str | None
    present: Formula


class Atom(msgspec.Struct, frozen=True):
    """A test of a text outside the pool: `source` over the variable `word`, applied to the fact `owner`."""

    owner: str
    word: str
    source: str


class Facts:
    """The variables of all formulas of one proof."""

    def __init__(self, conditions: Sequence[Sequence[Token]], regions: Iterable[str]) -> None:
        self.variables: dict[str, z3.ExprRef] = {}  # `NAME?` says whether the signal NAME is present
        self.rules: list[Formula] = []  # conditions of real requests and devices, such as ranges
        self.beyond: list[Formula] = []  # a text is not of the pool; without such texts every model is a real request
        self.atoms: dict[str, Atom] = {}  # the tests of such texts by the name of their variable
        self.opaque: dict[str, str] = {}  # expressions without a formula by variable; `NAME!` says whether one fails
        # Names of formulas that are slow to solve, which many proofs do not need, each with its formula.
        self.definitions: dict[str, tuple[Formula, Formula]] = {}
        self.choices: dict[str, Text] = {}
        found = {text for tokens in conditions for text in _pool(tokens)}
        self.texts = tuple(sorted(found | {OTHER}))
        tags = {text.casefold() for text in self.texts}
        named = {region for tag in tags for region in regions_of((tag,)) or ()}
        self.regions = tuple(sorted({*regions, *named, "elsewhere"}))
        in_region = {PREFIX + region for region in self.regions} if len(self.regions) > 1 else set()
        self.tags = tuple(sorted(tags | in_region))
        macros = sum(token.text in ("exists", "all") for tokens in conditions for token in tokens)
        self.slots = [Element(f"slot{at}", None, self.flag(f"slot{at}")) for at in range(1 + 2 * macros)]
        self.beyond += [slot.present for slot in self.slots]
        self.bound_by_slot = self.flag("tags.bound")
        self.rules.append(z3.Implies(self.bound_by_slot, z3.Or(*self.beyond)))

    # --- variables ---------------------------------------------------------------------------------------------------

    def flag(self, name: str) -> Formula:
        """Return a Boolean variable."""
        return self._variable(name, z3.BoolSort())

    def _variable(self, name: str, sort: z3.SortRef) -> z3.ExprRef:
        if name not in self.variables:
            self.variables[name] = z3.Const(name, sort)
        return self.variables[name]

    def choice(self, name: str, options: Sequence[str], *, is_open: bool = False) -> Text:
        """Return a text variable. `is_open`: it may also be a text that is not among the options."""
        if name not in self.choices:
            index = self._variable(name, z3.BitVecSort(_INDEX_BITS))
            other = index == len(options) if is_open else FALSE
            self.rules.append(z3.ULT(index, len(options) + is_open))
            self.beyond.extend([other] if is_open else [])
            self.choices[name] = Text(name, tuple((index == at, text) for at, text in enumerate(options)), other)
        return self.choices[name]

    def integer(self, name: str, least: float = 0.0, most: float = float("inf")) -> z3.ExprRef:
        """Return a variable of a 64-bit integer."""
        is_new = name not in self.variables
        found = self._variable(name, z3.BitVecSort(64))
        if is_new:
            self.rules += [found >= int(max(least, -_MOST)), found <= int(min(most, _MOST))]
        return found

    def double(self, name: str, least: float = 0.0, most: float = float("inf")) -> z3.ExprRef:
        """Return a variable of a finite double."""
        is_new = name not in self.variables
        found = self._variable(name, DOUBLE)
        if is_new:
            self.rules += [found >= z3.FPVal(max(least, -_MOST), DOUBLE), found <= z3.FPVal(min(most, _MOST), DOUBLE)]
            self.rules.append(z3.Or(z3.fpIsZero(found), z3.fpAbs(found) >= z3.FPVal(1 / _MOST, DOUBLE)))
        return found

    # --- signals -----------------------------------------------------------------------------------------------------

    def part(self, kind: str) -> Formula:
        found = self.flag(f"part.{kind}")
        self._rule_once(z3.Implies(found, self.is_kind("chat")))
        return found

    def is_kind(self, kind: str) -> Formula:
        kinds = self.choice("request.kind", ("chat", "completion", "embedding"))
        return next(condition for condition, text in kinds.options if text == kind)

    def present(self, spec: SignalSpec) -> Formula:
        """Return whether a signal has a value."""
        if spec.name == TEMPERATURE or spec.type == "list":
            return TRUE
        known = self.flag(f"{spec.name}?")
        if not spec.absent:
            self._rule_once(known)
        if spec.name in PART_SIGNALS:
            part = self.part(PART_SIGNALS[spec.name])
            self._rule_once(z3.Implies(known, part))
            return z3.Or(known, z3.Not(part)) if spec.name in _WITHOUT else known
        return known

    def number(self, spec: SignalSpec, temperature: float) -> Number:
        """Return a signal with a number. `temperature`: of a request that sets none."""
        missing = z3.Not(self.present(spec))
        if spec.name == TEMPERATURE:
            value = z3.If(self.flag("temperature_set"), self.double(spec.name, 0.0, 2.0), z3.FPVal(temperature, DOUBLE))
            return Number(z3.If(self.is_kind("embedding"), z3.FPVal(0.0, DOUBLE), value), FALSE, False)
        make = self.integer if spec.type == "int" else self.double
        return Number(self._of_parts(spec, make(spec.name, *signal_range(spec))), missing, spec.type == "int")

    def boolean(self, spec: SignalSpec) -> tuple[Formula, Formula]:
        """Return a signal that is true or false, and whether it is absent."""
        known, value = self.present(spec), self._of_parts(spec, self.flag(spec.name))
        if spec.name == "request.tools":
            self._rule_once(z3.Implies(value, self.flag("offers_tools")))
        return z3.And(known, value), z3.Not(known)

    def _of_parts(self, spec: SignalSpec, value: z3.ExprRef) -> z3.ExprRef:
        return z3.If(self.flag(f"{spec.name}?"), value, _WITHOUT[spec.name]) if spec.name in _WITHOUT else value

    def text(self, spec: SignalSpec) -> Text:
        return self.choice(spec.name, spec.values or self.texts, is_open=not spec.values)

    def elements(self, spec: SignalSpec) -> list[Element]:
        """Return the possible members of a list."""
        if spec.name == TAGS:
            known = [Element("", tag, self.flag(f"tag:{tag}")) for tag in self.tags]
            return known + self.slots
        if spec.name == "request.modalities":
            return [Element("", "text", TRUE), *[Element("", kind, self.part(kind)) for kind in PARTS]]
        found = [Element("", value, self.flag(f"{spec.name}:{value}")) for value in sorted(spec.values)]
        if spec.name == PII_CLASSES_SIGNAL:
            count = self.integer(PII_COUNT)
            self._rule_once(z3.Or(*[one.present for one in found]) == (count > 0))
        return found

    def size(self, spec: SignalSpec) -> z3.ExprRef:
        """Return the number of members of a list."""
        known = [one.present for one in self.elements(spec) if one.text is not None]
        if spec.name != TAGS:
            return counted(known)
        more = self.integer("tags.more", 0, 1_000_000)
        slots = [one.present for one in self.slots]
        self._rule_once(z3.And(more >= counted(slots), (more > 0) == z3.Or(*slots)))
        return counted(known) + more

    def atom(self, owner: str, word: str, source: str) -> Formula:
        """Return whether a test holds for a text outside the pool."""
        name = f"{owner}|{source}"
        self.atoms[name] = Atom(owner, word, source)
        return self.flag(name)

    def define(self, name: str, formula: Formula) -> Formula:
        """Return a variable that stands for a formula."""
        found = self.flag(name)
        self.definitions[name] = (found, formula)
        return found

    def _rule_once(self, rule: Formula) -> None:
        if not any(rule.eq(one) for one in self.rules):
            self.rules.append(rule)


def counted(flags: Iterable[Formula]) -> z3.ExprRef:
    """Return how many flags are true, as an int of CEL."""
    ones = (z3.If(flag, z3.BitVecVal(1, 64), z3.BitVecVal(0, 64)) for flag in flags)
    return sum(ones, z3.BitVecVal(0, 64))


def _pool(tokens: Sequence[Token]) -> Iterable[str]:
    """Yield the texts that a condition names, and some of other lengths."""
    measures = any(token.text == "size" for token in tokens)
    for token in tokens:
        if token.kind == "number" and token.text.isdigit() and measures:
            yield from (OTHER * count for count in range(1, min(int(token.text) + 2, 12)))
        if token.kind == "string" and isinstance(value := cel.compile(token.text).execute(cel.Context({})), str):
            yield value
