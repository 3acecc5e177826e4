"""The decision: request, signals and policy give an ordered list of attempts, and a cache plan.

Pure: equal input, equal decision.

`decide` works in five steps:

1. Constraints: each one that holds binds the request, or its parts, to the device, or the request to regions, as its
   tags may (`router.residency`). A constraint that cannot be evaluated binds too (fail closed).
2. Route: the target whose answer is to be continued, the targets that the client named, or the first route that holds.
3. Exclusion: by constraint, by the client's preference, because the device has no cloud or no engine, by the abilities
   of a target. Each exclusion is a reason.
4. Order: `best_of` orders by score (`candidates.ranked`); the client's preference moves targets forward within what
   the route lists; targets that are down go last.
5. Plans: an attempt per target, with a handoff if a later target can take over, but never for a request that must stay
   on the device. A route's promise sets the handoff's threshold, or lets clouds go first (`_with_promise`). Parts that
   a target cannot take reach it as text or as soft tokens (`abilities.part_forms`).

In a policy with `session`, an earlier request of the session binds as constraints do (1), and the route may be replaced
by the target that the session asked before (2): `sessions`.

`plan_cache` applies the policy's cache rules, `fingerprint` computes a request's cache key, and `CachePlanner` both.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from operator import attrgetter
from typing import Final, TypeVar

import msgspec

from ..errors import ModelNotFound
from ..policy.compiled import CacheRule, Policy, Route, Rule
from ..policy.signals import (
    EvaluationFailure,
    SignalValues,
    is_sampled,
    modalities,
    required_abilities,
    wants_json,
    wants_tools,
)
from ..residency import Regions, narrowed, permits, region_tags, regions_of
from ..types import (
    AUTO,
    Ability,
    AttemptPlan,
    CachePlan,
    Decision,
    EnergySignals,
    Estimates,
    Handoff,
    Location,
    Modality,
    Prefer,
    Promise,
    PromiseSignals,
    Reason,
    Request,
    RequestFeatures,
    RoutingHints,
    Sampling,
    Session,
    Shadow,
    Snapshot,
    Target,
    replace_surrogates,
)
from .abilities import PartForms, part_forms, unmet_abilities
from .candidates import expected_tokens, expected_usd, expected_wh, most_usd, ranked
from .features import without_question
from .sessions import NO_SESSION, SESSION_BOUND, counts_prefix, pinned_route

_ONLY: Final[dict[Prefer | None, Location]] = {"only_on_device": "edge", "only_cloud": "cloud"}
_FIRST: Final[dict[Prefer | None, Location]] = {"prefer_on_device": "edge", "prefer_cloud": "cloud"}
_R = TypeVar("_R", bound=Rule)
_QUALITY: Final = "edge.quality"
_NO_ROUTE_HOLDS: Final = Reason("no_route", detail="no route holds")


class _Bindings(msgspec.Struct, frozen=True):
    """The constraints that bind a request, or its parts, to the device; its regions; what the guard's rules require."""

    on_device: tuple[Rule, ...] = ()
    parts: tuple[Rule, ...] = ()
    regions: Regions = None
    region_rule: str = ""  # name of the first constraint that binds it to regions; "" for its tags
    mask: tuple[str, ...] = ()  # classes of values that cloud targets get as placeholders
    refused_by: str = ""  # name of the rule of the guard that refuses the request; "" for none


_UNBOUND: Final = _Bindings()
_NO_EVIDENCE: Final = PromiseSignals(detail="no answer is labelled yet")


def decide(policy: Policy, request: Request, snapshot: Snapshot, estimates: Estimates) -> Decision:
    """Return the decision for a request: its attempts in order, with the reasons.

    Raises:
        ModelNotFound: No target has the name, or serves the model, that the client asked for.
    """
    if policy.budget_usd is None and snapshot.spend.usd_left is not None:  # of another policy
        spend = msgspec.structs.replace(snapshot.spend, usd_left=None, price=None)
        snapshot = msgspec.structs.replace(snapshot, spend=spend)
    if snapshot.energy.price is not None and not policy.paces_energy:  # likewise
        snapshot = msgspec.structs.replace(snapshot, energy=EnergySignals())
    named = named_route(policy, request)
    kinds = modalities(request)
    values = (policy.route_needs if named is None else policy.constraint_needs).read(request, snapshot, estimates)
    reasons: list[Reason] = []
    session = estimates.session if policy.session is not None else None
    bindings = _bind(policy, request, kinds, values, session, reasons)  # (1)
    if named is None:  # (2)
        route = _first_match(policy.routes, values, reasons)
    else:
        route = named
        reasons.append(_naming_reason(request, named))
    pinned, refused_by = "", bindings.refused_by
    if session is not None:
        route, pinned = pinned_route(policy, session, route, named, reasons)
    attempts: tuple[AttemptPlan, ...] = ()
    skipped_target = ""
    if route is None:
        reasons.append(_NO_ROUTE_HOLDS)
    elif not refused_by:
        leaving = session if session is not None and counts_prefix(policy) else NO_SESSION
        attempts, skipped_target = _plan(route, request, kinds, (snapshot, estimates), bindings, reasons, leaving)
        if snapshot.uncalibrated and named is None:
            _note_uncalibrated(policy, route, snapshot, attempts, reasons)
    shadow: Shadow | None = None
    if policy.shadow is not None and named is None and not (session is not None and session.tool_result):
        shadow = _shadow_of(policy.shadow, request, attempts, bindings)
    promise = None
    if route is not None and route.promise is not None:
        attempts, promise = _with_promise(route.name, route.promise, attempts, shadow, snapshot, reasons)
    decided = bool(attempts or refused_by)
    missing, able = ((), ()) if decided else unmet_abilities(policy, request, kinds, snapshot, route, named)
    on_device, regions = bool(bindings.on_device), bindings.regions
    return Decision(  # by position: sixteen names would cost as much as the route
        policy.name,
        policy.revision,
        "" if route is None else route.name,
        attempts,
        tuple(reasons),
        on_device or request.hints.prefer == "only_on_device",
        on_device,
        bool(bindings.parts),
        None if regions is None else tuple(sorted(regions)),
        missing,
        able,
        skipped_target,
        pinned,
        shadow,
        refused_by,
        bindings.mask,
        promise,
    )


_MAX_DECISIONS: Final = 256  # that are kept of a policy


def decide_memoized(
    policy: Policy, request: Request, snapshot: Snapshot, estimates: Estimates, features: RequestFeatures
) -> Decision:
    """Return what `decide` returns, from memory where features and availability alone decide. Raises as `decide`.

    Args:
        features: The request's, from `features_of`.
    """
    if not policy.reads_only_features or len(features.modalities) > 1:
        return decide(policy, request, snapshot, estimates)
    key = (features, snapshot.down, snapshot.absent, snapshot.uncalibrated)
    known = policy.decisions.get(key)
    if known is None:
        known = decide(policy, request, snapshot, estimates)
        if len(policy.decisions) >= _MAX_DECISIONS:
            policy.decisions.clear()
        if known.attempts:  # else the reasons name what else is missing
            policy.decisions[key] = known
    return known


def _with_promise(
    name: str,
    promise: Promise,
    attempts: tuple[AttemptPlan, ...],
    shadow: Shadow | None,
    snapshot: Snapshot,
    reasons: list[Reason],
) -> tuple[tuple[AttemptPlan, ...], Promise | None]:
    """Return the plans under a route's promise, and the promise if the answer may give a label for it.

    1. Device and cloud may answer, a shadow request may follow, and there is evidence: the threshold of the handoff is
       the one that the evidence allows, and never below the policy's own.
    2. Otherwise the clouds answer first, those that are down last, and none hands off; or the route stays as it is
       where its promise is for measured requests only. What is bound to the device stays there, without a promise.
    """
    state = snapshot.promises.get(name, _NO_EVIDENCE)
    if shadow is not None and state.threshold is not None:  # (1)
        reasons.append(Reason("promise_kept", rule=name, detail=f"{state.threshold:.3f}"))
        return tuple([_with_threshold(plan, state.threshold) for plan in attempts]), promise
    detail = "the request gives no label" if shadow is None else state.detail  # (2)
    reasons.append(Reason("promise_unmeasured", rule=name, detail=detail))
    measured = None if shadow is None else promise
    if promise.only_where_measured:
        return attempts, measured
    down = snapshot.down
    plans = dict.fromkeys(msgspec.structs.replace(plan, handoff=None) for plan in attempts)

    def rank(plan: AttemptPlan) -> tuple[bool, bool]:
        target = plan.target
        return target.key in down or target.name in down, target.at == "edge"

    return tuple(sorted(plans, key=rank)), measured


def _with_threshold(plan: AttemptPlan, threshold: float) -> AttemptPlan:
    if plan.handoff is None or plan.handoff.below >= threshold:
        return plan
    handoff = Handoff(plan.handoff.after_tokens, threshold, plan.handoff.within_s)
    return AttemptPlan(
        plan.target, handoff, plan.facts, plan.soft, plan.fusion, plan.wait_for
    )  # `replace` takes longer


def _shadow_of(
    shadow: Shadow, request: Request, attempts: tuple[AttemptPlan, ...], bindings: _Bindings
) -> Shadow | None:
    if bindings.on_device or bindings.parts or bindings.mask or bindings.regions is not None:
        return None
    return plan_shadow(shadow, request, attempts)


def _bind(
    policy: Policy,
    request: Request,
    kinds: list[Modality],
    values: SignalValues,
    session: Session | None,
    reasons: list[Reason],
) -> _Bindings:
    """Return what binds a request: constraints, its tags, and the earlier requests of its session."""
    bound: tuple[Rule, ...] = _binding_constraints(policy.constraints, values, reasons)
    kept: tuple[Rule, ...] = ()
    if policy.part_constraints and len(kinds) > 1:
        kept = _binding_constraints(policy.part_constraints, values, reasons)
    guard = _binding_constraints(policy.guard, values, reasons) if policy.guard else ()
    if guard and policy.guard_settings.on_failure == "hit" and len(kinds) > 1:
        kept = (*kept, *[rule for rule in guard if rule.action == "mask"])  # placeholders stand for text only
    regions, region_rule = _binding_regions(policy, request, values, reasons)
    if session is not None and (session.on_device or session.regions is not None):
        reasons.append(Reason("session_bound", rule=SESSION_BOUND.name))
        bound = (*bound, SESSION_BOUND) if session.on_device else bound
        if session.regions is not None:
            regions, region_rule = narrowed(regions, frozenset(session.regions)), region_rule or SESSION_BOUND.name
    if not guard:
        return _Bindings(bound, kept, regions, region_rule) if bound or kept or regions is not None else _UNBOUND
    mask = tuple(sorted({kind for rule in guard for kind in rule.classes}))
    refused_by = next((rule.name for rule in guard if rule.action == "refuse"), "")
    return _Bindings(bound, kept, regions, region_rule, mask, refused_by)


def bound_at_arrival(policy: Policy, request: Request, snapshot: Snapshot) -> tuple[bool, Regions]:
    """Return whether a request is bound to the device, and its regions, as far as no signal must be computed first."""
    values = policy.constraint_needs.read(request, snapshot, Estimates())

    def holds(constraint: Rule) -> bool:
        result = True if constraint.when is None else constraint.when.evaluate(values)
        return not result.absent if isinstance(result, EvaluationFailure) else result

    own = regions_of(request.hints.tags)
    regions = narrowed(own, *[one.regions for one in policy.region_constraints if holds(one)])
    return request.hints.prefer == "only_on_device" or any(map(holds, policy.constraints)), regions


def named_route(policy: Policy, request: Request) -> Route | None:
    """Return the targets that the client named; None if the policy's routes choose. Raises as `decide`."""
    named = None
    if request.model != AUTO:
        named = policy.named.get(request.model)
        if named is None:
            names = ", ".join(policy.model_names)
            raise ModelNotFound(f"Model `{request.model[:100]}` not found. Available: {names}.", param="model")
    return named


def _naming_reason(request: Request, named: Route) -> Reason:
    return Reason("model_named", detail=request.model)


def _plan(
    route: Route,
    request: Request,
    kinds: list[Modality],
    signals: tuple[Snapshot, Estimates],
    bindings: _Bindings,
    reasons: list[Reason],
    session: Session,
) -> tuple[tuple[AttemptPlan, ...], str]:
    """Return the plans, and the name of the target that would come first if it were not down ("" for none)."""
    snapshot = signals[0]
    bound, kept = bindings.on_device, bindings.parts
    prefer = request.hints.prefer
    forms = None if len(kinds) == 1 else part_forms(kinds, snapshot, route.fusion, kept=bool(kept))
    if forms is not None and kept and any(kind not in forms.texts for kind in kinds[1:]):
        bound = (*bound, *kept)  # no text stands for some of the parts: nothing of the request may leave
        bindings = msgspec.structs.replace(bindings, on_device=bound)
    required = required_abilities(request, kinds)
    allowed = _exclude(route, prefer, required, bindings, snapshot, forms, reasons)  # (3)
    if snapshot.spend.usd_left is not None or snapshot.energy.wh_left is not None:
        allowed = _affordable(allowed, route.name, request, signals, reasons)
    if not allowed:
        reasons.append(Reason("no_route", rule=route.name, detail="every target is excluded"))
        return (), ""
    if route.best_of is not None:  # (4)
        allowed = ranked(allowed, route.name, route.best_of, request, signals, reasons, session)
    preferred = _prefer(allowed, prefer, reasons)
    ordered = _move_down_targets_last(preferred, route.name, snapshot.down, reasons)
    skipped_target = "" if ordered[0].name == preferred[0].name else preferred[0].name
    if route.handoff is None or bound or prefer == "only_on_device":  # (5)
        plans = tuple([AttemptPlan(target) for target in ordered])
    else:
        handoff = route.handoff
        if snapshot.spend.price or snapshot.energy.price:
            handoff = _priced(handoff, ordered, request, signals)
        plans = plan_handoff(ordered, handoff, snapshot.down)
    return plans if forms is None else forms.noted(plans, route.wait_for), skipped_target


def _exclude(
    route: Route,
    prefer: Prefer | None,
    required: tuple[Ability, ...],
    bindings: _Bindings,
    snapshot: Snapshot,
    forms: PartForms | None,
    reasons: list[Reason],
) -> tuple[Target, ...]:
    """Return the targets of the route that may answer."""
    allowed: list[Target] = []
    only, bound, absent = _ONLY.get(prefer), bindings.on_device, snapshot.absent
    free = bindings is _UNBOUND and only is None and not absent
    if free and all(ability in target.can for target in route.targets for ability in required):
        return route.targets
    for target in route.targets:
        missing = [ability for ability in required if ability not in target.can]
        if missing and forms is not None:
            missing = forms.unmet(missing, target)
        if bound and target.at != "edge":
            reasons.append(Reason("constraint_excluded", rule=bound[0].name, target=target.key))
        elif bindings.regions is not None and (outside := _outside(target, bindings.regions, snapshot)):
            reasons.append(Reason("region_excluded", rule=bindings.region_rule, target=target.key, detail=outside))
        elif only is not None and target.at != only:
            reasons.append(Reason("preference_excluded", rule=prefer or "", target=target.key))
        elif (target.key if target.clouds else target.name) in absent:
            reasons.append(Reason("target_absent", rule=route.name, target=target.key, detail=_lack(target)))
        elif missing:
            reasons.append(Reason("target_unable", rule=route.name, target=target.key, detail=", ".join(missing)))
        else:
            allowed.append(target)
    return tuple(allowed)


def _affordable(
    targets: tuple[Target, ...], rule: str, request: Request, signals: tuple[Snapshot, Estimates], reasons: list[Reason]
) -> tuple[Target, ...]:
    """Return the targets whose answer costs at most what is left of the policy's budgets."""
    (snapshot, estimates), allowed = signals, []
    left, wh_left, tokens = snapshot.spend.usd_left, snapshot.energy.wh_left, expected_tokens(request)
    for target in targets:
        detail = ""
        if left is not None and target.price.costs:
            most = most_usd(target, request, estimates)
            if most > left or left < 0.0:
                detail = f"{most:.6f} USD at most, {max(0.0, left):.6f} USD left"
        if wh_left is not None and (wh := expected_wh(target, tokens, snapshot)) >= wh_left:
            detail = f"{wh:.6f} Wh, {max(0.0, wh_left):.6f} Wh left"
        if detail:
            reasons.append(Reason("budget_excluded", rule=rule, target=target.key, detail=detail))
        else:
            allowed.append(target)
    return tuple(allowed)


def _priced(
    handoff: Handoff, targets: tuple[Target, ...], request: Request, signals: tuple[Snapshot, Estimates]
) -> Handoff:
    """Return the handoff whose confidence is lower by what the first target that costs takes from the budget, and
    higher by what the rest of the device's answer takes from battery and heat, less what the cloud's answer does.
    """
    (snapshot, estimates), below, tokens = signals, handoff.below, expected_tokens(request)
    if price := snapshot.spend.price:
        for target in targets:  # `next` with a generator takes longer
            if target.price.costs:
                below -= price * expected_usd(target, tokens, estimates)
                break
    energy = snapshot.energy
    if energy.price:
        edge_wh = (tokens - handoff.after_tokens) * (energy.token_wh or 0.0)
        below += energy.price * (edge_wh - (energy.cloud_wh or 0.0))
    return Handoff(handoff.after_tokens, min(1.0, max(0.0, below)), handoff.within_s)


def _outside(target: Target, regions: frozenset[str], snapshot: Snapshot) -> str:
    """Return why a target is in none of the regions; "" if it is in one, or on the device."""
    region = "" if snapshot.setup is None else snapshot.setup.region_of(target)
    if target.at == "edge" or permits(regions, region):
        return ""
    return f"it is in {region}" if region else "its cloud has no region"


def _lack(target: Target) -> str:
    if target.at == "edge":
        return "this device runs no engine"
    return f"this device has no cloud `{target.cloud}`" if target.cloud else "no cloud is configured"


def _prefer(targets: tuple[Target, ...], prefer: Prefer | None, reasons: list[Reason]) -> tuple[Target, ...]:
    first = _FIRST.get(prefer)
    if first is None:
        return targets
    moved = tuple(sorted(targets, key=lambda target: target.at != first))
    reasons += [
        Reason("preference_ordered", rule=prefer or "", target=target.key)
        for target in moved
        if target.at == first and moved.index(target) < targets.index(target)
    ]
    return moved


def _move_down_targets_last(
    targets: tuple[Target, ...], rule: str, down: frozenset[str], reasons: list[Reason]
) -> tuple[Target, ...]:
    if not down:
        return targets
    are_down = [target for target in targets if target.key in down or target.name in down]
    reasons += [Reason("target_down", rule=rule, target=target.key) for target in are_down]
    return tuple(sorted(targets, key=are_down.__contains__))


def _note_uncalibrated(
    policy: Policy, route: Route, snapshot: Snapshot, attempts: tuple[AttemptPlan, ...], reasons: list[Reason]
) -> None:
    """Add a reason for each target whose calibrated signals are set aside and would be used by this decision."""
    if route.handoff is None and _QUALITY not in policy.route_needs.signals:
        return
    names = dict.fromkeys(plan.target.name for plan in attempts if plan.target.name in snapshot.uncalibrated)
    reasons += [Reason("calibration_set_aside", rule=route.name, target=name) for name in names]


def _binding_constraints(constraints: tuple[_R, ...], values: SignalValues, reasons: list[Reason]) -> tuple[_R, ...]:
    """Return the constraints, or guard rules, that apply, also unevaluable ones (fail closed). Appends to `reasons`."""
    bound: list[_R] = []
    for constraint in constraints:
        result = True if constraint.when is None else constraint.when.evaluate(values)
        if result is False:
            reasons.append(constraint.not_held)
            continue
        if isinstance(result, EvaluationFailure):
            reasons.append(_failure_reason(constraint, result))
            reasons.append(Reason(constraint.HELD, rule=constraint.name, detail="cannot be evaluated: it binds"))
        else:
            reasons.append(constraint.held)
        bound.append(constraint)
    return tuple(bound)


def _binding_regions(
    policy: Policy, request: Request, values: SignalValues, reasons: list[Reason]
) -> tuple[Regions, str]:
    """Return the regions that constraints and tags together allow, and the name of the first such constraint."""
    regions = regions_of(request.hints.tags) if request.hints.tags else None
    if not policy.region_constraints:
        return regions, ""
    bound = _binding_constraints(policy.region_constraints, values, reasons)
    return narrowed(regions, *[one.regions for one in bound]), bound[0].name if bound else ""


def _first_match(rules: tuple[_R, ...], values: SignalValues, reasons: list[Reason]) -> _R | None:
    """Return the first rule that holds; a rule that cannot be evaluated does not hold. Appends to `reasons`."""
    for rule in rules:
        result = True if rule.when is None else rule.when.evaluate(values)
        if result is True:
            reasons.append(rule.held)
            return rule
        reasons.append(rule.not_held if result is False else _failure_reason(rule, result))
    return None


def _failure_reason(rule: Rule, failure: EvaluationFailure) -> Reason:
    if failure.absent:
        return Reason("signal_absent", rule=rule.name, detail=failure.absent)
    return Reason("rule_failed", rule=rule.name, detail=failure.message)


# --- cache -----------------------------------------------------------------------------------------------------------

KEY_BYTES: Final = 16
_REFUSED: Final = "the guard refuses the request"

UNKEYED_FIELDS: Final[dict[str, str]] = {
    "stream": "only how the answer is delivered; a cached answer can be delivered either way",
    "include_usage": "usage is stored with every answer",
    "user": "OpenAI's abuse monitoring reads it, no model does",
    "hints": "only `prefer` changes the answer and is in the key; what tags, client and deadline decide (which target "
    "may answer, whose answer it is) is in the scope",
}

_keyed_fields = attrgetter(*[name for name in Request.__struct_fields__ if name not in UNKEYED_FIELDS])
_ENCODER = msgspec.msgpack.Encoder()


def fingerprint(request: Request, scope: bytes) -> bytes:
    """Return the cache key of a request: 16 bytes of BLAKE2b over its msgpack encoding.

    The key covers every field of `Request` that `UNKEYED_FIELDS` does not name, so a new field cannot make two requests
    collide. msgpack is self-delimiting, so two different requests never encode alike.

    Args:
        scope: Extra bytes in the key for context outside the request, such as the models behind the policy's names, or
            the client whose entries are private.
    """
    encoded = _ENCODER.encode((scope, request.hints.prefer, _keyed_fields(request)))
    return blake2b(encoded, digest_size=KEY_BYTES).digest()


def plan_cache(policy: Policy, request: Request, snapshot: Snapshot, estimates: Estimates) -> CachePlan:
    """Apply the cache rules: the first that holds decides; without one nothing is cached. Never raises."""
    reasons: list[Reason] = []
    values = policy.cache_needs.read(request, snapshot, estimates)
    private = bool(_binding_constraints(policy.constraints, values, reasons))
    within, _ = _binding_regions(policy, request, values, reasons)
    regions = None if within is None else tuple(sorted(within))
    guard = _binding_constraints(policy.guard, values, reasons) if policy.guard else ()
    rule = _first_match(policy.cache, values, reasons)
    bypass = _bypass_reason(policy, rule, request)
    if any(one.action == "refuse" for one in guard):
        bypass = _REFUSED
    if bypass and rule is not None and rule.exact is not None:
        reasons.append(Reason("cache_refused", rule=rule.name, detail=bypass))
    used = None if bypass else rule
    exact, semantic = (None, None) if used is None else (used.exact, used.semantic)
    return CachePlan(exact, semantic, "" if rule is None else rule.name, bypass, tuple(reasons), private, regions)


def early_bypass(policy: Policy, request: Request) -> str:
    """Return why this request cannot be cached under any rule; "" if the rules must be evaluated."""
    if not policy.cache:
        return "the policy has no cache rules"
    sampled = _sampled(policy, request)
    return "" if not sampled or any(rule.allow_sampled for rule in policy.cache) else sampled


def _bypass_reason(policy: Policy, rule: CacheRule | None, request: Request) -> str:
    """Return why the cache is bypassed, given the rule that holds; "" if it is used."""
    early = early_bypass(policy, request)
    if early:
        return early
    if rule is None:
        return "no cache rule of the policy holds"
    if rule.exact is None:
        return f"the cache rule `{rule.name}` excludes it"
    sampled = "" if rule.allow_sampled else _sampled(policy, request)
    return sampled or ("the request offers tools" if request.tools and not rule.allow_tools else "")


def _sampled(policy: Policy, request: Request) -> str:
    """Return why a second run could give another answer; "" if it could not."""
    if not is_sampled(request, policy.default_temperature):
        return ""
    temperature, default = request.sampling.temperature, policy.default_temperature
    if temperature is None and default > 0.0:
        return f"sampled: the request sets no temperature, and the policy's targets use up to {default:g}"
    return "sampled: temperature above 0" if temperature else "sampled: n above 1"


class KeyedCachePlan(msgspec.Struct, frozen=True):
    plan: CachePlan
    key: bytes | None  # None: the policy keeps this request out of the cache


@dataclass(eq=False, repr=False, slots=True)
class RequestMemo:
    """Values derived from one request: its features, and its last cache plan. The owner keeps it beside the request."""

    features: RequestFeatures | None = None
    policy: Policy | None = None
    snapshot: Snapshot | None = None
    planned: KeyedCachePlan | None = None


class CachePlanner:
    """Plans and keys cache entries.

    A plan is a pure function of policy, request and signals. It is computed once per request and snapshot, or once per
    request if the policy's cache rules read only the request.

    Args:
        scope: Extra cache-key bytes, such as hashes of the device's model files.
    """

    def __init__(self, scope: bytes = b"") -> None:
        self._scope = scope
        self._policy_scope: tuple[Policy | None, bytes] = (None, b"")  # the last policy and its scope

    def plan(self, policy: Policy, request: Request, snapshot: Snapshot, estimates: Estimates) -> KeyedCachePlan:
        """Evaluate the cache rules and compute the key."""
        plan = plan_cache(policy, request, snapshot, estimates)
        return KeyedCachePlan(plan, None if plan.exact is None else self._key(policy, request, plan))

    def plan_memoized(self, policy: Policy, request: Request, snapshot: Snapshot, memo: RequestMemo) -> KeyedCachePlan:
        """Plan without estimates. Reuses the memo if no signal of the policy's cache rules has changed."""
        planned = memo.planned
        valid = memo.policy is policy and (policy.cache_needs.request_only or memo.snapshot is snapshot)
        if planned is None or not valid:
            planned = memo.planned = self.plan(policy, request, snapshot, Estimates())
            memo.policy, memo.snapshot = policy, snapshot
        return planned

    def semantic_scope(self, policy: Policy, request: Request, plan: CachePlan) -> bytes:
        """Return the key that two requests must share before one may get the answer to the other's question.

        It covers everything in the exact key except the question: the conversation before, tools, formats, limits. It
        includes the client's name, so clients never share, even where the exact cache is shared.
        """
        client = request.hints.client.encode("utf-8", "replace")
        return self._key(policy, without_question(request), plan) + blake2b(client, digest_size=KEY_BYTES).digest()

    def _key(self, policy: Policy, request: Request, plan: CachePlan) -> bytes:
        if self._policy_scope[0] is not policy:
            targets = _ENCODER.encode((self._scope, policy.targets))
            self._policy_scope = (policy, blake2b(targets, digest_size=16).digest())
        bound = b"" if plan.regions is None else ",".join(region_tags(plan.regions)).encode() + b"\0"
        private = b"private:" + request.hints.client.encode("utf-8", "replace") if plan.private else b""
        return fingerprint(request, self._policy_scope[1] + bound + private)


# --- for decision records ---------------------------------------------------------------------------------------------

_TEXT: Final[tuple[Modality, ...]] = ("text",)
_NAME_CHARACTERS: Final = 128  # no target and no model of a policy has a longer name


def features_of(request: Request, *, is_text: bool = False) -> RequestFeatures:
    """Return the fields of a request that routing reads, without its content; `features.request_of` is the inverse.

    Args:
        is_text: Whether it is known to have nothing but texts.
    """
    plain = request.logprobs is None and not (request.tools or request.response_format)
    if plain and request.kind == "chat" and len(request.model) <= _NAME_CHARACTERS:
        kinds = _TEXT if is_text else tuple(modalities(request))
        limits = (request.n, request.max_tokens, request.sampling.temperature)
        return _chat_features(request.model, request.hints, kinds, request.stream, *limits)
    return _features(request, tuple(modalities(request)))


@lru_cache(256)
def _chat_features(
    model: str,
    hints: RoutingHints,
    kinds: tuple[Modality, ...],
    stream: bool,
    n: int,
    max_tokens: int | None,
    temperature: float | None,
) -> RequestFeatures:
    """Return the features of a chat that has nothing else; records of equal ones share them."""
    sampling = Sampling(temperature)
    request = Request(
        kind="chat", model=model, hints=hints, stream=stream, n=n, max_tokens=max_tokens, sampling=sampling
    )
    return _features(request, kinds)


def _features(request: Request, kinds: tuple[Modality, ...]) -> RequestFeatures:
    hints = request.hints
    return RequestFeatures(
        kind=request.kind,
        model=_name(request.model),
        client=_text(hints.client),
        tags=tuple([_text(tag) for tag in hints.tags]),
        prefer=hints.prefer,
        deadline_ms=hints.deadline_ms,
        stream=request.stream,
        n=request.n,
        prompts=len(request.prompts),
        max_tokens=request.max_tokens,
        temperature=request.sampling.temperature,
        modalities=kinds,
        offers_tools=bool(request.tools),
        tools=wants_tools(request),
        json=wants_json(request),
        logprobs=request.logprobs is not None,
    )


def _name(value: str) -> str:
    """Cut a name to one character more than a policy's longest name: it stays unknown."""
    return _text(value[: _NAME_CHARACTERS + 1])


def _text(value: str) -> str:
    """Replace lone surrogates, as signals do, with a fast path for ASCII."""
    return value if value.isascii() else replace_surrogates(value)


def plan_handoff(
    targets: tuple[Target, ...], handoff: Handoff, down: frozenset[str] = frozenset()
) -> tuple[AttemptPlan, ...]:
    """Plan one attempt per target, in order, with the handoff where it applies.

    1. Only an edge target hands off, because only the device's engine reports confidence.
    2. It hands off only if a later target that is not known to be down can take over.
    3. It then also becomes the last resort, without handoff: if all later targets fail, a doubtful answer is better.

    Args:
        down: Keys of targets that are known to be down.
    """
    plans: list[AttemptPlan] = []
    last_resort: list[AttemptPlan] = []
    for index, target in enumerate(targets):
        can_take_over = any(not down or later.key not in down for later in targets[index + 1 :])
        if target.at == "edge" and can_take_over:  # (1) (2)
            plans.append(AttemptPlan(target, handoff))
            last_resort.append(AttemptPlan(target))  # (3)
        else:
            plans.append(AttemptPlan(target))
    return tuple(plans + last_resort)


def plan_shadow(shadow: Shadow, request: Request, attempts: tuple[AttemptPlan, ...]) -> Shadow | None:
    """Return `shadow` if both sides can answer and their answers can be compared, else None.

    After the answer, a shadow request asks the other side the same question, to measure when the device is good enough.
    The daemon chooses which shadow requests are sent (a share, within a budget).

    1. The policy lets the device and the cloud answer this request.
    2. The answer is one text: no embedding, no tool calls, one choice.
    3. The prompt is one text, because the signals are estimated from it.
    4. The device's model answers without an adapter, because the signals were fitted without one.
    """
    sides = {plan.target.at for plan in attempts}
    one_text = request.kind != "embedding" and request.sequences == 1 and not wants_tools(request)
    if len(sides) < 2 or not one_text or any(plan.target.adapter for plan in attempts):
        return None
    return shadow if modalities(request) == ["text"] else None


def other_target(attempts: tuple[AttemptPlan, ...], answered: Target) -> Target | None:
    """Return the first target on the side that did not answer."""
    return next((plan.target for plan in attempts if plan.target.at != answered.at), None)


def without_down(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot as if no target were down: a job can wait for its first target."""
    return msgspec.structs.replace(snapshot, down=frozenset()) if snapshot.down else snapshot


def until_first_cloud(decision: Decision, down: frozenset[str]) -> Decision:
    """Return the decision of a job: its attempts up to the first one in the cloud. A job is not answered by a weaker
    fallback, and reaches a single cloud target, so that it takes effect there only once. Of a target in several clouds
    it is the first that is up.

    Args:
        down: Keys of targets that are known to be down.
    """
    for number, plan in enumerate(decision.attempts):
        if plan.target.at == "cloud":
            same = [one for one in decision.attempts if one.target.name == plan.target.name]
            chosen = next((one for one in same if one.target.key not in down), plan)
            return msgspec.structs.replace(decision, attempts=(*decision.attempts[:number], chosen))
    return decision
