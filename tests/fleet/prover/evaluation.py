"""Formulas of z3 as Python functions, so that a million decisions can be compared with them in minutes.

Python's floats are IEEE doubles and its ints are masked to 64 bits, so that each operation is the one of the formula.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence

import z3

BITS = 64
MASK = (1 << BITS) - 1
Values = Mapping[str, bool | int | float]


def signed(value: int, bits: int = BITS) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def divided(a: float, b: float) -> float:
    if b:
        return a / b
    return math.nan if not a or math.isnan(a) else math.copysign(math.inf, a) * math.copysign(1.0, b)


def quotient(a: int, b: int) -> int:
    a, b = signed(a), signed(b)
    if not b:
        return MASK if a >= 0 else 1
    return (abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)) & MASK


def remainder(a: int, b: int) -> int:
    return a if not b else (signed(a) - signed(b) * signed(quotient(a, b))) & MASK


def to_int(value: float) -> int:
    return int(value) & MASK if math.isfinite(value) else 0  # out of range: guarded by the formula


_FUNCTIONS: tuple[Callable[..., object], ...] = (signed, divided, quotient, remainder, to_int)
NAMES: dict[str, object] = {"math": math, **{one.__name__: one for one in _FUNCTIONS}}


def compiled(formulas: Sequence[z3.ExprRef]) -> Callable[[Values], tuple[object, ...]]:
    """Return a function from the values of variables to those of the formulas."""
    writer = _Writer()
    results = ", ".join([writer.name_of(formula) for formula in formulas])
    scope: dict[str, object] = {**NAMES, **writer.constants}
    exec("def evaluate(v):\n" + "\n".join(writer.lines) + f"\n    return ({results},)\n", scope)
    found = scope["evaluate"]
    assert callable(found)
    return found


class _Writer:
    """Writes a line for each term of the formulas, once."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.constants: dict[str, object] = {}
        self._names: dict[int, str] = {}

    def name_of(self, term: z3.ExprRef) -> str:
        key = term.get_id()
        if key not in self._names:
            text = self._source(term)
            self._names[key] = text
            if not text.isidentifier():
                self._names[key] = f"t{len(self.lines)}"
                self.lines.append(f"    {self._names[key]} = {text}")
        return self._names[key]

    def _source(self, term: z3.ExprRef) -> str:
        kind = term.decl().kind()
        if kind == z3.Z3_OP_UNINTERPRETED:
            return f"v[{term.decl().name()!r}]"
        if z3.is_bv_value(term):
            return repr(term.as_long())
        if z3.is_fp_value(term):
            name = f"k{len(self.constants)}"
            self.constants[name] = float_of(term)
            return name
        args = [self.name_of(one) for one in term.children() if not z3.is_fprm(one)]
        if kind in _JOINED:
            return "(" + f" {_JOINED[kind]} ".join(args) + ")"
        if kind in (z3.Z3_OP_BADD, z3.Z3_OP_BSUB, z3.Z3_OP_BMUL):
            return f"({f' {_SIGNS[kind]} '.join(args)}) & {MASK}"
        return _FORMS[kind].format(*args)


def _infix(sign: str, form: str = "{}") -> str:
    return f"{form.format('{0}')} {sign} {form.format('{1}')}"


_JOINED = {z3.Z3_OP_AND: "and", z3.Z3_OP_OR: "or"}
_SIGNS = {z3.Z3_OP_BADD: "+", z3.Z3_OP_BSUB: "-", z3.Z3_OP_BMUL: "*"}
_FORMS = {
    z3.Z3_OP_TRUE: "True",
    z3.Z3_OP_FALSE: "False",
    z3.Z3_OP_SLT: _infix("<", "signed({})"),
    z3.Z3_OP_SLEQ: _infix("<=", "signed({})"),
    z3.Z3_OP_SGT: _infix(">", "signed({})"),
    z3.Z3_OP_SGEQ: _infix(">=", "signed({})"),
    z3.Z3_OP_FPA_LT: _infix("<"),
    z3.Z3_OP_FPA_LE: _infix("<="),
    z3.Z3_OP_FPA_GT: _infix(">"),
    z3.Z3_OP_FPA_GE: _infix(">="),
    z3.Z3_OP_FPA_EQ: _infix("=="),
    z3.Z3_OP_NOT: "not {0}",
    z3.Z3_OP_IMPLIES: "(not {0} or {1})",
    z3.Z3_OP_ITE: "({1} if {0} else {2})",
    z3.Z3_OP_EQ: "{0} == {1}",
    z3.Z3_OP_BNEG: f"(-{{0}}) & {MASK}",
    z3.Z3_OP_BSDIV: "quotient({0}, {1})",
    z3.Z3_OP_BSREM: "remainder({0}, {1})",
    z3.Z3_OP_BSMUL_NO_OVFL: f"signed({{0}}) * signed({{1}}) <= {MASK >> 1}",
    z3.Z3_OP_BSMUL_NO_UDFL: f"signed({{0}}) * signed({{1}}) >= {-(1 << 63)}",
    z3.Z3_OP_FPA_IS_NAN: "math.isnan({0})",
    z3.Z3_OP_FPA_IS_INF: "math.isinf({0})",
    z3.Z3_OP_FPA_NEG: "-{0}",
    z3.Z3_OP_FPA_ADD: "{0} + {1}",
    z3.Z3_OP_FPA_SUB: "{0} - {1}",
    z3.Z3_OP_FPA_MUL: "{0} * {1}",
    z3.Z3_OP_FPA_DIV: "divided({0}, {1})",
    z3.Z3_OP_FPA_TO_FP: "float(signed({0}))",
    z3.Z3_OP_FPA_TO_SBV: "to_int({0})",
}


def float_of(term: z3.FPNumRef) -> float:
    """Return a constant of 64 bits."""
    return float(struct.unpack("<d", z3.simplify(z3.fpToIEEEBV(term)).as_long().to_bytes(8, "little"))[0])
