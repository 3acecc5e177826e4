"""The formulas of policies beside `decide` and `plan_cache`, at drawn requests, devices and sessions."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping

import msgspec
import z3

from causeway_server.fleet.prover.conditions import OutcomeFact
from causeway_server.fleet.prover.facts import Text
from causeway_server.fleet.prover.outcome import Outcome, World, expressions_of
from causeway_server.router.decision.decide import decide, plan_cache
from causeway_server.router.errors import InvalidRequest, ModelNotFound
from causeway_server.router.policy.compiled import Policy, with_variants
from causeway_server.router.policy.outcomes import outcome_values
from causeway_server.router.types import AUTO

from .evaluation import compiled
from .pairs import Draw, Facts, Valuation


class Disagreement(msgspec.Struct, frozen=True):
    name: str
    decided: object
    by_formula: object
    pair: Facts


class Agreement:
    """Compares one policy's formulas with its decisions. `seen`: how often each fact of an outcome was true.

    Args:
        variants: The variants that answer, by target. What the device knows of a model holds for its variants, too.
    """

    def __init__(self, policy: Policy, seed: int, variants: Mapping[str, str] = {}) -> None:
        self.policy, self._variants = policy, variants
        self._world = World([policy])
        outcome = Outcome(self._world, policy)
        self._names, formulas = _flat(outcome.facts)
        exact = list(self._world.facts.definitions.values())
        self.formulas = [z3.substitute(formula, *exact) if exact else formula for formula in formulas]
        self._evaluate = compiled(self.formulas)
        self._draw = Draw(random.Random(seed), self._world, list(expressions_of(policy)))
        self._valuation = Valuation(self._world, policy, variants)
        self.seen: Counter[str] = Counter()
        self.compared = 0

    def disagreements(self, count: int) -> Iterator[Disagreement]:
        """Compare `count` drawn pairs; yield where formula and decision differ."""
        for _ in range(count):
            pair = self._with_projectors(self._draw.pair())
            try:
                values = self._valuation.values(pair)
            except OverflowError:
                continue
            self.compared += 1
            found = _read(self._names, self._evaluate(values))
            for name, decided in self._decided(pair).items():
                self.seen[name] += bool(decided)
                if found[name] != decided:
                    yield Disagreement(name, decided, found[name], pair)

    def values_by_z3(self) -> tuple[list[z3.ExprRef], tuple[object, ...]]:
        """Return the formulas as z3 simplifies them at a drawn pair, and their values as they were evaluated here."""
        values = self._valuation.values(self._draw.pair())
        variables = self._world.facts.variables
        pairs = [(one, _constant(one, values.get(name, False))) for name, one in variables.items()]
        return [z3.simplify(z3.substitute(one, *pairs)) for one in self.formulas], self._evaluate(values)

    def _decided(self, pair: Facts) -> Mapping[str, object]:
        (request, snapshot, estimates), policy = pair, self.policy
        if self._variants and (request.model == AUTO or request.model in policy.target_names):
            policy = with_variants(policy, self._variants)
            names = {
                (old.at, old.served): new.served for old, new in zip(self.policy.targets, policy.targets, strict=True)
            }
            candidates = tuple(
                msgspec.structs.replace(one, model=names.get((one.at, one.model), one.model))
                for one in estimates.candidates or ()
            )
            estimates = msgspec.structs.replace(estimates, candidates=candidates or estimates.candidates)
        try:
            decision = decide(policy, request, snapshot, estimates)
        except (ModelNotFound, InvalidRequest):
            decision = None
        plan = plan_cache(policy, request, snapshot, estimates)
        found = outcome_values(decision, plan, request, snapshot.setup)
        return {name: set(value) if isinstance(value, list) else value for name, value in found.items()}

    def _with_projectors(self, pair: Facts) -> Facts:
        request, snapshot, estimates = pair
        if not self._variants or snapshot.setup is None:
            return pair
        projectors = dict(snapshot.setup.projectors)
        for old, new in zip(self.policy.targets, with_variants(self.policy, self._variants).targets, strict=True):
            projectors[new.model] = projectors.get(old.model, ())
        setup = msgspec.structs.replace(snapshot.setup, projectors=projectors)
        return request, msgspec.structs.replace(snapshot, setup=setup), estimates


def _constant(variable: z3.ExprRef, value: float) -> z3.ExprRef:
    if z3.is_bool(variable):
        return z3.BoolVal(bool(value))
    if z3.is_bv(variable):
        return z3.BitVecVal(int(value), variable.size())
    return z3.FPVal(float(value), variable.sort())


def _flat(outcome: Mapping[str, OutcomeFact]) -> tuple[list[tuple[str, object]], list[z3.ExprRef]]:
    """Return the outcome's formulas, each with its name, and the text of which it tells whether it is one."""
    names: list[tuple[str, object]] = []
    formulas: list[z3.ExprRef] = []
    for name, fact in outcome.items():
        texts = [(one.present, one.text) for one in fact] if isinstance(fact, list) else None
        texts = list(fact.options) if isinstance(fact, Text) else texts
        for formula, text in [(fact, None)] if texts is None else texts:
            names.append((name, text))
            formulas.append(formula)
    return names, formulas


def _read(names: list[tuple[str, object]], values: tuple[object, ...]) -> dict[str, object]:
    found: dict[str, object] = {"outcome.targets": set(), "outcome.regions": set(), "outcome.mask": set()}
    for (name, text), value in zip(names, values, strict=True):
        known = found.get(name)
        if text is None:
            found[name] = bool(value)
        elif isinstance(known, set):
            known |= {text} if value else set()
        elif value:
            found[name] = text if known is None else f"{known} and {text}"
    return found
