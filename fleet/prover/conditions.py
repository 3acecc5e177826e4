"""Conditions in CEL as formulas: whether one is true, and whether it fails, as the library evaluates it.

1. `&&`, `||`, `?:` and `!` fail only if their result depends on an operand that fails.
2. Numbers, flags, membership in lists, and `exists` and `all` over a list have exact formulas.
3. A test of one text is evaluated for each text of the pool; of another text its result is a free fact.
4. A comparison with arithmetic has a name, and its formula is a definition of it: many proofs do without.
5. Anything else is a free fact, the same one wherever the expression occurs. A counterexample that depends on it counts
   only if `decide` confirms it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import z3

from causeway_server.router.policy.cel_library import cel
from causeway_server.router.policy.cel_source import Token, rewrite, scan, split, text_at, unbracketed
from causeway_server.router.policy.expression import fold_tag_literals
from causeway_server.router.policy.outcomes import OUTCOMES
from causeway_server.router.policy.signals import Expression

from .facts import DOUBLE, FALSE, NEAREST, TRUE, Element, Facts, Formula, Number, Text, counted

_RELATIONS: Final = {"==", "!=", "<", "<=", ">", ">=", "in"}
_LOGIC: Final = {"&&", "||", "?", "exists", "all", "exists_one", "map", "filter"}
_ARITHMETIC: Final = {*"+-*/%", "int", "double"}
_LEAST: Final = z3.BitVecVal(-(2**63), 64)


class Truth(NamedTuple):
    """The result of a condition. It is never both true and failed; it is false if neither."""

    holds: Formula
    fails: Formula

    @property
    def is_false(self) -> Formula:
        return z3.And(z3.Not(self.holds), z3.Not(self.fails))

    @property
    def binds(self) -> Formula:
        """Whether a constraint with this condition applies (fail closed)."""
        return z3.Or(self.holds, self.fails)


ALWAYS: Final = Truth(TRUE, FALSE)
OutcomeFact = Formula | Text | list[Element]
Bound = Mapping[str, Element]


class _NoFormulaError(Exception):
    """The expression has no formula: it becomes a free fact."""


def tokens_of(source: str) -> list[Token]:
    """Return the tokens of a condition as they are compiled."""
    return fold_tag_literals(rewrite(scan(source), OUTCOMES)[0])


class Conditions:
    """Formulas of a policy's conditions. `temperature`: of a request that sets none; `outcome`: facts of a claim."""

    def __init__(self, facts: Facts, temperature: float, outcome: Mapping[str, OutcomeFact] = {}) -> None:
        self._facts = facts
        self._temperature = temperature
        self._outcome = outcome

    def truth(self, expression: Expression | None) -> Truth:
        """Return the result of a condition; None: it always holds."""
        return ALWAYS if expression is None else self._condition(tokens_of(expression.source), {})

    def _condition(self, tokens: Sequence[Token], bound: Bound) -> Truth:
        tokens = list(tokens)
        if choice := _ternary(tokens):
            test, then, other = (self._condition(piece, bound) for piece in choice)
            holds = z3.Or(z3.And(test.holds, then.holds), z3.And(test.is_false, other.holds))
            fails = z3.Or(test.fails, z3.And(test.holds, then.fails), z3.And(test.is_false, other.fails))
            return Truth(holds, fails)
        if pieces := split(tokens, {"||"}):
            sides = [self._condition(piece, bound) for piece in pieces]
            holds = z3.Or(*[one.holds for one in sides])
            return Truth(holds, z3.And(z3.Not(holds), z3.Or(*[one.fails for one in sides])))
        if pieces := split(tokens, {"&&"}):
            sides = [self._condition(piece, bound) for piece in pieces]
            refuted = z3.Or(*[one.is_false for one in sides])
            return Truth(
                z3.And(*[one.holds for one in sides]), z3.And(z3.Not(refuted), z3.Or(*[o.fails for o in sides]))
            )
        if text_at(tokens, 0) == "!" and _last_operator(tokens[1:], {*_RELATIONS, *"+-*/%"}) < 0:
            inner = self._condition(tokens[1:], bound)
            return Truth(inner.is_false, inner.fails)
        inside = unbracketed(tokens)
        return self._condition(inside, bound) if inside is not tokens else self._leaf(tokens, bound)

    def _leaf(self, tokens: list[Token], bound: Bound) -> Truth:
        try:
            found = self._exact(tokens, bound)
        except _NoFormulaError:
            if bound:
                raise  # the whole macro is a free fact
            return self._free(tokens)
        if any(token.text in _ARITHMETIC for token in tokens) and not any(token.text in _LOGIC for token in tokens):
            source = " ".join(token.text for token in tokens)
            holds, fails = self._facts.define(f"={source}", found.holds), self._facts.define(f"={source}!", found.fails)
            return Truth(z3.And(holds, z3.Not(fails)), fails)
        return found

    def _free(self, tokens: list[Token]) -> Truth:
        source = " ".join(token.text for token in tokens)
        self._facts.opaque[source] = source
        fails = self._facts.flag(f"{source}!")
        if not any(token.text in _LOGIC for token in tokens):
            specs = {token.signal.name: token.signal for token in tokens if token.signal and not token.presence}
            missing = [z3.Not(self._facts.present(one)) for name, one in specs.items() if name not in self._outcome]
            fails = z3.Or(fails, *missing)
        return Truth(z3.And(self._facts.flag(source), z3.Not(fails)), fails)

    def _exact(self, tokens: list[Token], bound: Bound) -> Truth:
        first = tokens[0]
        if len(tokens) == 1 and first.text in ("true", "false"):
            return ALWAYS if first.text == "true" else Truth(FALSE, FALSE)
        if len(tokens) == 1 and first.signal is not None:
            return self._flag(first)
        if first.signal is not None and first.signal.type == "list" and text_at(tokens, 2) in ("exists", "all"):
            return self._quantified(tokens, bound)
        if (
            text_at(tokens, -2 % len(tokens)) == "in"
            and (spec := tokens[-1].signal) is not None
            and spec.type == "list"
        ):
            return self._member(tokens, bound)
        words = {
            token.text: token
            for token in tokens
            if token.text in bound
            or (token.signal is not None and token.signal.type == "string" and not token.presence)
        }
        others = any(token.signal is not None and token.text not in words for token in tokens)
        if words:
            if len(words) > 1 or others or any(token.text in _LOGIC for token in tokens):
                raise _NoFormulaError
            return self._test(next(iter(words.values())), tokens, bound)
        return self._relation(tokens, bound)

    def _flag(self, token: Token) -> Truth:
        spec = token.signal
        assert spec is not None
        if token.presence:
            return Truth(TRUE if spec.name in self._outcome else self._facts.present(spec), FALSE)
        if spec.type != "bool":
            raise _NoFormulaError
        found = self._outcome.get(spec.name)
        return Truth(found, FALSE) if found is not None else Truth(*self._facts.boolean(spec))

    # --- texts and lists ---------------------------------------------------------------------------------------------

    def _elements(self, token: Token) -> list[Element]:
        assert token.signal is not None
        found = self._outcome.get(token.signal.name)
        return found if isinstance(found, list) else self._facts.elements(token.signal)

    def _member(self, tokens: list[Token], bound: Bound) -> Truth:
        left, elements = tokens[:-2], self._elements(tokens[-1])
        if len(left) == 1 and left[0].kind == "string":
            value = _value(left[0].text)
            return Truth(z3.Or(FALSE, *[one.present for one in elements if one.text == value]), FALSE)
        raise _NoFormulaError

    def _test(self, word: Token, tokens: list[Token], bound: Bound) -> Truth:
        """Return the result of a test of one text, the only one that the expression names. (3)"""
        source = " ".join(token.text for token in tokens)
        program = cel.compile(source)
        can_fail = any(token.text in ("int", "double") for token in tokens)

        def result(text: str) -> bool | None:
            try:
                return bool(program.execute(cel.Context({word.text: text})))
            except Exception:  # undocumented ones of the binding
                return None

        def free(owner: str) -> Truth:
            if len(tokens) == 3 and tokens[1].text in ("==", "!="):
                return Truth(z3.BoolVal(tokens[1].text == "!="), FALSE)  # each text that is named is of the pool
            fails = self._facts.atom(owner, word.text, f"{source}!") if can_fail else FALSE
            return Truth(z3.And(self._facts.atom(owner, word.text, source), z3.Not(fails)), fails)

        element = bound.get(word.text)
        if element is not None:
            if element.text is None:
                return free(element.name)
            found = result(element.text)
            return Truth(z3.BoolVal(found is True), z3.BoolVal(found is None))
        spec = word.signal
        assert spec is not None
        told = self._outcome.get(spec.name)
        text = told if isinstance(told, Text) else self._facts.text(spec)
        missing = FALSE if isinstance(told, Text) else z3.Not(self._facts.present(spec))
        results = [(condition, result(option)) for condition, option in text.options]
        beyond = Truth(FALSE, FALSE) if z3.is_false(text.other) else free(text.name)
        holds = z3.Or(z3.And(text.other, beyond.holds), *[one for one, found in results if found])
        fails = z3.Or(missing, z3.And(text.other, beyond.fails), *[one for one, found in results if found is None])
        return Truth(z3.And(holds, z3.Not(missing)), fails)

    def _quantified(self, tokens: list[Token], bound: Bound) -> Truth:
        """Return the result of `list.exists(x, …)` or `list.all(x, …)`.

        The library fails at the first element for which the body fails, unless an earlier one decides: where both
        kinds are present, the result is a free fact, because it depends on the order.
        """
        name, macro, body = tokens[4].text, tokens[2].text, tokens[6:-1]
        if text_at(tokens, 1) != "." or text_at(tokens, 5) != "," or text_at(tokens, len(tokens) - 1) != ")":
            raise _NoFormulaError
        if len(unbracketed(tokens[3:])) != len(tokens[3:]) - 2 or name in bound:
            raise _NoFormulaError
        elements = self._elements(tokens[0])
        if bound:
            raise _NoFormulaError
        results = [(one, self._condition(body, {name: one})) for one in elements]
        is_outcome = tokens[0].signal is not None and tokens[0].signal.name in self._outcome
        ordered, unordered = (FALSE, FALSE), (FALSE, FALSE)  # whether an element decides, and whether one fails
        for one, result in results:
            decides = z3.And(one.present, result.holds if macro == "exists" else result.is_false)
            fails = z3.And(one.present, result.fails)
            if one.text is None or is_outcome:
                unordered = z3.Or(unordered[0], decides), z3.Or(unordered[1], fails)
            else:
                first = z3.And(z3.Not(ordered[0]), z3.Not(ordered[1]))
                ordered = z3.Or(ordered[0], z3.And(first, decides)), z3.Or(ordered[1], z3.And(first, fails))
        decided, fails = z3.Or(ordered[0], unordered[0]), ordered[1]
        if not all(z3.is_false(z3.simplify(result.fails)) for _, result in results):
            source = " ".join(token.text for token in tokens)
            self._facts.opaque[source] = source
            free = self._facts.flag(f"{source}!")  # whether it fails where the order decides
            anyone = z3.And(z3.Or(ordered[1], unordered[1]), z3.Or(z3.Not(decided), free))
            fails = z3.If(z3.Or(*unordered), anyone, ordered[1])
        return Truth(z3.And(decided if macro == "exists" else z3.Not(decided), z3.Not(fails)), fails)

    # --- numbers -----------------------------------------------------------------------------------------------------

    def _relation(self, tokens: list[Token], bound: Bound) -> Truth:
        at = _last_operator(tokens, _RELATIONS)
        if at < 0:
            raise _NoFormulaError
        left, sign, right = tokens[:at], tokens[at].text, tokens[at + 1 :]
        if sign == "in":
            if text_at(right, 0) != "[" or text_at(right, len(right) - 1) != "]":
                raise _NoFormulaError
            one = self._number(left)
            listed = [self._number(item) for item in split(right[1:-1], {","}) or [right[1:-1]]]
            equal = [_compared(one, "==", item) for item in listed]
            fails = z3.Or(*[found.fails for found in equal])
            return Truth(z3.And(z3.Or(*[found.holds for found in equal]), z3.Not(fails)), fails)
        try:
            return _compared(self._number(left), sign, self._number(right))
        except _NoFormulaError:
            if sign not in ("==", "!=") or not (_is_flag(left) and _is_flag(right)):
                raise
        sides = self._condition(left, bound), self._condition(right, bound)
        fails = z3.Or(sides[0].fails, sides[1].fails)
        equals = sides[0].holds == sides[1].holds
        return Truth(z3.And(equals if sign == "==" else z3.Not(equals), z3.Not(fails)), fails)

    def _number(self, tokens: Sequence[Token]) -> Number:
        tokens = unbracketed(list(tokens))
        for signs in ({"+", "-"}, {"*", "/", "%"}):
            if (at := _last_operator(tokens, signs)) > 0:
                return _computed(self._number(tokens[:at]), tokens[at].text, self._number(tokens[at + 1 :]))
        if text_at(tokens, 0) == "-":
            inner = self._number(tokens[1:])
            return Number(-inner.value if inner.is_int else z3.fpNeg(inner.value), *inner[1:])
        if len(tokens) == 1:
            return self._single(tokens[0])
        words = [token.text for token in tokens]
        if words[:2] == ["size", "("] and len(tokens) == 4:
            return self._size(tokens[2])
        if words[1:] == [".", "size", "(", ")"]:
            return self._size(tokens[0])
        if words[0] in ("int", "double") and text_at(tokens, 1) == "(":
            return _converted(self._number(tokens[1:]), words[0])
        raise _NoFormulaError

    def _single(self, token: Token) -> Number:
        if token.signal is not None and token.signal.type in ("int", "double") and not token.presence:
            return self._facts.number(token.signal, self._temperature)
        if token.kind != "number":
            raise _NoFormulaError
        value = _value(token.text)
        if isinstance(value, float):
            return Number(z3.FPVal(value, DOUBLE), FALSE, False)
        if not isinstance(value, int) or token.text[-1] in "uU":
            raise _NoFormulaError
        return Number(z3.BitVecVal(value, 64), FALSE, True)

    def _size(self, token: Token) -> Number:
        if token.signal is None or token.signal.type != "list":
            raise _NoFormulaError
        if token.signal.name not in self._outcome:
            return Number(self._facts.size(token.signal), FALSE, True)
        return Number(counted(one.present for one in self._elements(token)), FALSE, True)


def _value(literal: str) -> object:
    return cel.compile(literal).execute(cel.Context({}))


def _is_flag(tokens: list[Token]) -> bool:
    """Return whether an operand is true or false by its form."""
    one = tokens[0]
    if len(tokens) == 1:
        return one.text in ("true", "false") or (one.signal is not None and (one.presence or one.signal.type == "bool"))
    return one.text == "!" or len(unbracketed(tokens)) < len(tokens)


def _ternary(tokens: list[Token]) -> tuple[list[Token], list[Token], list[Token]] | None:
    """Return the parts of `a ? b : c`, where c may be another one; None if it is not."""
    depth, first, nested = 0, -1, 0
    for at, token in enumerate(tokens):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(token.text, 0)
        if depth == 0 and token.text == "?":
            first, nested = (at if first < 0 else first), nested + 1
        elif depth == 0 and token.text == ":":
            nested -= 1
            if nested == 0:
                return tokens[:first], tokens[first + 1 : at], tokens[at + 1 :]
    return None


def _last_operator(tokens: Sequence[Token], signs: set[str]) -> int:
    """Return the index of the last of these binary operators outside brackets; -1 if there is none."""
    depth, found = 0, -1
    for at, token in enumerate(tokens):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(token.text, 0)
        if depth == 0 and token.text in signs and at > 0:
            before = tokens[at - 1]
            ends_value = before.kind in ("number", "string") or before.text in (")", "]")
            if ends_value or (before.kind == "name" and before.text != "in"):
                found = at
    return found


def _as_double(number: Number) -> z3.ExprRef:
    return z3.fpSignedToFP(NEAREST, number.value, DOUBLE) if number.is_int else number.value


def _compared(left: Number, sign: str, right: Number) -> Truth:
    """Compare numbers; an int is converted to compare it with a double."""
    fails = z3.Or(left.error, right.error)
    if left.is_int and right.is_int:
        a, b = left.value, right.value
        equal = a == b
    else:
        a, b = _as_double(left), _as_double(right)
        equal = z3.fpEQ(a, b)
        if sign not in ("==", "!=") and (left.is_computed or right.is_computed):
            fails = z3.Or(fails, z3.fpIsNaN(a), z3.fpIsNaN(b))
    if sign in ("==", "!="):
        result = equal if sign == "==" else z3.Not(equal)
    else:
        result = {"<": a < b, "<=": a <= b, ">": a > b, ">=": a >= b}[sign]
    return Truth(z3.And(result, z3.Not(fails)), fails)


def _computed(left: Number, sign: str, right: Number) -> Number:
    """Calculate as the library does: an int that overflows fails, and so do an int with a double, and % of doubles."""
    a, b, fails = left.value, right.value, z3.Or(left.error, right.error)
    if left.is_int != right.is_int or (sign == "%" and not left.is_int):
        raise _NoFormulaError
    if not left.is_int:
        make = {"+": z3.fpAdd, "-": z3.fpSub, "*": z3.fpMul, "/": z3.fpDiv}[sign]
        return Number(make(NEAREST, a, b), fails, False, is_computed=True)
    if sign in ("/", "%"):
        fails = z3.Or(fails, b == 0, z3.And(a == _LEAST, b == -1))
        return Number(a / b if sign == "/" else z3.SRem(a, b), fails, True)
    if sign == "*":
        value, fits = a * b, z3.And(z3.BVMulNoOverflow(a, b, True), z3.BVMulNoUnderflow(a, b))
    else:
        value, alike = (a + b if sign == "+" else a - b), (a < 0) == (b < 0)
        fits = z3.Or(z3.Not(alike) if sign == "+" else alike, (value < 0) == (a < 0))
    return Number(value, z3.Or(fails, z3.Not(fits)), True)


def _converted(number: Number, kind: str) -> Number:
    if kind == "double":
        return Number(_as_double(number), number.error, False, number.is_computed)
    if number.is_int:
        return number
    limit = z3.FPVal(2.0**63, DOUBLE)
    fits = z3.And(number.value < limit, number.value > z3.fpNeg(limit))
    value = z3.fpToSBV(z3.RTZ(), number.value, z3.BitVecSort(64))
    return Number(value, z3.Or(number.error, z3.Not(fits)), True)
