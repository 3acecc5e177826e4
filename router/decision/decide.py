"""Request + signals + policy → an ordered list of attempts, with reasons. Pure: the same input, the same decision.

`decide` goes:
1. constraints: each that holds binds the request to the device; one that cannot be told binds as well (fail closed);
2. the candidates: the target that an answer is to be continued by, the targets that the caller named, or those of the
   first route that holds;
3. cut: by constraint, by the caller's wish, by what a target can do. Each cut is a reason;
4. order: the caller's preference moves targets forward within what the route lists; targets that are down go last;
5. plans: with the handoff where somebody can take over, and never for a request that stays on the device.
"""

from __future__ import annotations

from typing import TypeVar

from ..errors import InvalidRequest, ModelNotFound
from ..policy.compiled import CacheRule, Constraint, Policy, Route, Rule, attempt_plans
from ..policy.expression import EvaluationFailure, SignalValues
from ..policy.signals import is_sampled, modalities, wants_json, wants_tools
from ..types import (
    AUTO,
    Ability,
    AttemptPlan,
    CachePlan,
    Decision,
    Estimates,
    Location,
    Prefer,
    Reason,
    Request,
    Snapshot,
    Target,
)
from .continuation import PARAM, target_of

_ONLY: dict[Prefer | None, Location] = {"only_on_device": "edge", "only_cloud": "cloud"}
_FIRST: dict[Prefer | None, Location] = {"prefer_on_device": "edge", "prefer_cloud": "cloud"}
_MODALITIES: dict[str, Ability] = {"image": "image", "audio": "audio", "file": "file"}
_R = TypeVar("_R", bound=Rule)
_NONE: tuple[tuple[AttemptPlan, ...], str] = ((), "")
_NO_ROUTE_HOLDS = Reason("no_route", detail="no route holds")


def decide(policy: Policy, request: Request, snapshot: Snapshot, estimates: Estimates) -> Decision:
    """What shall be tried, in order, and why. Raises ModelNotFound, or InvalidRequest for a continuation of nobody."""
    named = () if request.model == AUTO else _named(policy, request.model)
    if request.resume:
        named = (_continued(policy, request, named),)
    reasons: list[Reason] = []
    facts = (policy.constraint_needs if named else policy.route_needs).read(request, snapshot, estimates)
    bound = _binding(policy.constraints, facts, reasons)  # (1)
    route = None
    if named:  # (2)
        reasons.append(
            Reason("continued", target=named[0].name) if request.resume else Reason("model_named", detail=request.model)
        )
    else:
        route = _first(policy.routes, facts, reasons)
    attempts, skipped_target = _NONE
    if named or route is not None:
        attempts, skipped_target = _attempts(request, snapshot, bound, named, route, reasons)
    else:
        reasons.append(_NO_ROUTE_HOLDS)
    return Decision(
        policy=policy.name,
        revision=policy.revision,
        rule="" if route is None else route.name,
        attempts=attempts,
        reasons=tuple(reasons),
        on_device=bool(bound) or request.hints.prefer == "only_on_device",
        private=bool(bound),
        skipped_target=skipped_target,
    )


def plan_cache(policy: Policy, request: Request, snapshot: Snapshot, estimates: Estimates) -> CachePlan:
    """What the policy's first cache rule that holds allows. No rule, no caching. Never raises."""
    reasons: list[Reason] = []
    facts = policy.cache_needs.read(request, snapshot, estimates)
    private = bool(_binding(policy.constraints, facts, reasons))
    rule = _first(policy.cache, facts, reasons)
    if rule is None or rule.exact is None:
        return CachePlan(rule="" if rule is None else rule.name, reasons=tuple(reasons), private=private)
    refusal = _cache_refusal(rule, request)
    if refusal:
        reasons.append(Reason("cache_refused", rule=rule.name, detail=refusal))
        return CachePlan(rule=rule.name, reasons=tuple(reasons), private=private)
    return CachePlan(exact=rule.exact, rule=rule.name, reasons=tuple(reasons), private=private)


def model_names(policy: Policy) -> tuple[str, ...]:
    """What a caller may put into `model`: auto, and the targets' names."""
    return (AUTO, *(target.name for target in policy.targets))


def _binding(constraints: tuple[Constraint, ...], facts: SignalValues, reasons: list[Reason]) -> tuple[Constraint, ...]:
    """The constraints that bind. Nobody knows is a yes."""
    bound: list[Constraint] = []
    for constraint in constraints:
        answer = True if constraint.when is None else constraint.when.evaluate(facts)
        if answer is False:
            reasons.append(constraint.not_held)
            continue
        if isinstance(answer, EvaluationFailure):
            reasons.append(_fault(constraint, answer))
            reasons.append(Reason("constraint_held", rule=constraint.name, detail="cannot be told: it binds"))
        else:
            reasons.append(constraint.held)
        bound.append(constraint)
    return tuple(bound)


def _first(rules: tuple[_R, ...], facts: SignalValues, reasons: list[Reason]) -> _R | None:
    """The first rule that holds. A rule that cannot be told does not hold, and the reasons say what it lacks."""
    for rule in rules:
        answer = True if rule.when is None else rule.when.evaluate(facts)
        if answer is True:
            reasons.append(rule.held)
            return rule
        reasons.append(rule.not_held if answer is False else _fault(rule, answer))
    return None


def _fault(rule: Rule, fault: EvaluationFailure) -> Reason:
    if fault.absent:
        return Reason("signal_absent", rule=rule.name, detail=fault.absent)
    return Reason("rule_failed", rule=rule.name, detail=fault.message)


def _named(policy: Policy, model: str) -> tuple[Target, ...]:
    """The target of that name; else all targets that serve the model of that name, in the policy's order."""
    found = tuple(t for t in policy.targets if t.name == model) or tuple(t for t in policy.targets if t.model == model)
    if not found:
        names = ", ".join(model_names(policy))
        raise ModelNotFound(f"the model `{model[:100]}` does not exist here; there are: {names}", param="model")
    return found


def _continued(policy: Policy, request: Request, named: tuple[Target, ...]) -> Target:
    """Whoever cut the answer: nobody else has its start. Raises InvalidRequest."""
    name = target_of(request.resume)
    for target in policy.targets:
        if target.name == name and target.at == "cloud" and (not named or target in named):
            return target
    told = f"`{PARAM}` belongs to no target of the policy in force, or to another model. Ask the question anew."
    raise InvalidRequest(told, param=PARAM)


def _attempts(
    request: Request,
    snapshot: Snapshot,
    bound: tuple[Constraint, ...],
    named: tuple[Target, ...],
    route: Route | None,
    reasons: list[Reason],
) -> tuple[tuple[AttemptPlan, ...], str]:
    """The plans, and the target that would come first if it were not down."""
    targets = route.targets if route is not None else named
    wanted = _wanted(request)
    left = _cut(targets, request.hints.prefer, bound, wanted, reasons)  # (3)
    if not left:
        reasons.append(Reason("no_route", rule="" if route is None else route.name, detail="every target was cut"))
        return _NONE
    liked = _prefer(left, request.hints.prefer, reasons)  # (4)
    ordered = _down_last(liked, snapshot.down, reasons)
    skipped_target = "" if ordered[0] is liked[0] else liked[0].name
    if route is None:
        return attempt_plans(ordered, None), skipped_target
    on_device = bool(bound) or request.hints.prefer == "only_on_device"
    if ordered == route.targets and not snapshot.down and not on_device:
        return route.plans, skipped_target
    return attempt_plans(ordered, None if on_device else route.handoff, snapshot.down), skipped_target  # (5)


def _cut(
    targets: tuple[Target, ...],
    prefer: Prefer | None,
    bound: tuple[Constraint, ...],
    wanted: tuple[Ability, ...],
    reasons: list[Reason],
) -> tuple[Target, ...]:
    left: list[Target] = []
    only = _ONLY.get(prefer)
    for target in targets:
        if bound and target.at != "edge":
            reasons.append(Reason("constraint_cut", rule=bound[0].name, target=target.name))
        elif only is not None and target.at != only:
            reasons.append(Reason("wish_cut", rule=prefer or "", target=target.name))
        elif missing := [ability for ability in wanted if ability not in target.can]:
            reasons.append(Reason("target_unable", target=target.name, detail=", ".join(missing)))
        else:
            left.append(target)
    return tuple(left)


def _prefer(targets: tuple[Target, ...], prefer: Prefer | None, reasons: list[Reason]) -> tuple[Target, ...]:
    first = _FIRST.get(prefer)
    if first is None:
        return targets
    moved = tuple(sorted(targets, key=lambda target: target.at != first))
    reasons += [
        Reason("wish_ordered", rule=prefer or "", target=target.name)
        for target in moved
        if target.at == first and moved.index(target) < targets.index(target)
    ]
    return moved


def _down_last(targets: tuple[Target, ...], down: frozenset[str], reasons: list[Reason]) -> tuple[Target, ...]:
    if not down:
        return targets
    reasons += [Reason("target_down", target=target.name) for target in targets if target.name in down]
    return tuple(sorted(targets, key=lambda target: target.name in down))


def _wanted(request: Request) -> tuple[Ability, ...]:
    """What a target must be able to do for this request."""
    wanted: list[Ability] = [request.kind]
    if wants_tools(request):
        wanted.append("tools")
    if wants_json(request):
        wanted.append("json")
    if request.logprobs is not None:
        wanted.append("logprobs")
    wanted += [_MODALITIES[modality] for modality in modalities(request) if modality != "text"]
    return tuple(wanted)


def _cache_refusal(rule: CacheRule, request: Request) -> str:
    if request.resume:
        return "the rest of another answer"
    if is_sampled(request) and not rule.allow_sampled:
        return "sampled: another run may answer otherwise"
    return "the request offers tools" if request.tools and not rule.allow_tools else ""
