"""The signals of a claim about a policy: those of its conditions, and `outcome.*`, which tells what the policy decides.

A claim says what must be true for each request. `causeway-fleet prove` looks for one for which it is not; the key
`holds` of a test case evaluates one for the request of the case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..guard.classes import GUARD_CLASSES
from ..types import CachePlan, Decision, DeviceSetup, Estimates, Request, Snapshot
from .expression import compile_expression
from .signals import EvaluationFailure, Expression, RequiredSignals, SignalSpec, SignalType, Value, modalities


def _spec(name: str, kind: SignalType, meaning: str, values: tuple[str, ...] = ()) -> SignalSpec:
    return SignalSpec(f"outcome.{name}", kind, "", meaning, "", lambda r, s, e: None, values)


OUTCOMES: Mapping[str, SignalSpec] = {
    spec.name: spec
    for spec in (
        _spec(
            "leaves",
            "bool",
            "true: a cloud may get the request at once, after a failure or handoff, or as a shadow request",
        ),
        _spec("parts_leave", "bool", "true: a cloud may get audio, images or files of the request unchanged"),
        _spec("edge", "bool", "true: a target on the device may answer the request"),
        _spec("targets", "list", "names of the targets that may be tried, in order, without repetitions"),
        _spec("first", "string", 'name of the target that is tried first; "" if no target is tried'),
        _spec("regions", "list", 'regions of clouds that may get the request; "" is a cloud without a region'),
        _spec("route", "string", 'name of the route that decides the request; "" if no route decides'),
        _spec("handoff", "bool", "true: another target may take over after the first tokens of the device's answer"),
        _spec(
            "shadow",
            "bool",
            "true: after the answer, a copy of the request may also go from the device to a cloud, or the reverse",
        ),
        _spec("cached", "bool", "true: the answer may come from the cache, and a new answer is cached"),
        _spec("shared", "bool", "true: the cached answer may go to any client"),
        _spec("refused", "bool", "true: a rule of the guard refuses the request"),
        _spec("mask", "list", "classes of personal values that clouds get as placeholders", GUARD_CLASSES),
    )
}


def compile_claim(source: str) -> Expression:
    """Compile an expression of a claim. Raises ExpressionError, as `compile_expression`."""
    return compile_expression(source, OUTCOMES)


def outcome_values(
    decision: Decision | None, plan: CachePlan, request: Request, setup: DeviceSetup | None
) -> dict[str, Value]:
    """Return the values of `outcome.*` by name. `decision`: None if no target has the name that the client sent."""
    attempts = () if decision is None else decision.attempts
    targets = [one.target for one in attempts]
    away = [one for one in attempts if one.target.at == "cloud"]
    parts = set(modalities(request)[1:])
    cached = decision is not None and plan.exact is not None
    return {
        "outcome.leaves": bool(away),
        "outcome.parts_leave": any(parts - set(one.facts) for one in away),
        "outcome.edge": len(away) < len(attempts),
        "outcome.targets": list(dict.fromkeys(one.name for one in targets)),
        "outcome.first": targets[0].name if targets else "",
        "outcome.regions": sorted({"" if setup is None else setup.region_of(one.target) for one in away}),
        "outcome.route": "" if decision is None else decision.rule,
        "outcome.handoff": any(one.handoff is not None for one in attempts),
        "outcome.shadow": decision is not None and decision.shadow is not None,
        "outcome.cached": cached,
        "outcome.shared": cached and not (plan.private or (decision is not None and decision.private)),
        "outcome.refused": decision is not None and bool(decision.refused_by),
        "outcome.mask": [] if decision is None else list(decision.mask),
    }


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """A claim of a policy's owner: where `when` holds or cannot be evaluated, `holds` is true."""

    name: str
    when: Expression | None
    holds: Expression

    def is_kept(
        self,
        outcome: Mapping[str, Value],
        request: Request,
        snapshot: Snapshot,
        estimates: Estimates,
        temperature: float,
    ) -> bool | EvaluationFailure:
        """Return whether the claim is true for a request; EvaluationFailure if it cannot be evaluated, and so is not.

        Args:
            outcome: The policy's decision, from `outcome_values`.
            temperature: The value of `request.temperature` if the client sets none.
        """
        needs = RequiredSignals([one for one in (self.when, self.holds) if one is not None], temperature)
        values = needs.read(request, snapshot, estimates)
        for name, value in outcome.items():
            values.context.add_variable(OUTCOMES[name].variable, value)
        if self.when is not None and self.when.evaluate(values) is False:
            return True
        return self.holds.evaluate(values)
