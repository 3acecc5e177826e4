"""Request + signals + policy → an ordered list of attempts, and a cache plan. Pure: equal input, equal decision.

`decide` works in five steps:

1. Constraints: each one that holds binds the request, or its parts, to the device. A constraint that cannot be
   evaluated binds too (fail closed).
2. Route: the target of the answer that the client continues, the targets that the client named, or the first route
   that holds.
3. Exclusion: by constraint, by the client's preference, because the device has no cloud or no engine, by the abilities
   of a target. Each exclusion is a reason.
4. Order: the client's preference moves targets forward within what the route lists; targets that are down go last.
5. Plans: with the handoff where a later target can take over, and never for a request that stays on the device. Parts
   that a target cannot take reach it as text or as soft tokens (`abilities.part_forms`).

`plan_cache` applies the policy's cache rules, `fingerprint` is a request's cache key, `CachePlanner` joins the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from operator import attrgetter
from typing import Final, TypeVar

import msgspec

from ..errors import ModelNotFound
from ..policy.compiled import CacheRule, Constraint, Policy, Route, Rule, chosen_by_name
from ..policy.signals import (
    EvaluationFailure,
    SignalValues,
    is_sampled,
    modalities,
    required_abilities,
    wants_json,
    wants_tools,
)
from ..types import (
    AUTO,
    Ability,
    AttemptPlan,
    CachePlan,
    Decision,
    Estimates,
    Handoff,
    Location,
    Modality,
    Prefer,
    Reason,
    Request,
    RequestFeatures,
    Shadow,
    Snapshot,
    Target,
    replace_surrogates,
)
from .abilities import PartForms, part_forms, unmet_abilities
from .attempts import continuing_target, split_token
from .features import without_question

_ONLY: Final[dict[Prefer | None, Location]] = {"only_on_device": "edge", "only_cloud": "cloud"}
_FIRST: Final[dict[Prefer | None, Location]] = {"prefer_on_device": "edge", "prefer_cloud": "cloud"}
_ABSENT: Final[dict[Location, str]] = {"edge": "this device runs no engine", "cloud": "no cloud is configured"}
_R = TypeVar("_R", bound=Rule)
_QUALITY: Final = "edge.quality"
_NO_ROUTE_HOLDS: Final = Reason("no_route", detail="no route holds")


def decide(policy: Policy, request: Request, snapshot: Snapshot, estimates: Estimates) -> Decision:
    """Return the attempts for a request, in order, and why.

    Raises:
        ModelNotFound: no target has the name, or serves the model, that the client asked for.
        InvalidRequest: the continue token belongs to no target of this policy.
    """
    named = _named(policy, request)
    kinds = modalities(request)
    values = (policy.route_needs if named is None else policy.constraint_needs).read(request, snapshot, estimates)
    reasons: list[Reason] = []
    bound = _binding_constraints(policy.constraints, values, reasons)  # (1)
    kept: tuple[Constraint, ...] = ()
    if policy.part_constraints and len(kinds) > 1:
        kept = _binding_constraints(policy.part_constraints, values, reasons)
    if named is None:  # (2)
        route = _first_match(policy.routes, values, reasons)
    else:
        route = named
        reasons.append(_naming_reason(request, named))
    attempts: tuple[AttemptPlan, ...] = ()
    skipped_target = ""
    if route is None:
        reasons.append(_NO_ROUTE_HOLDS)
    else:
        attempts, skipped_target = _plan(route, request, kinds, snapshot, bound, kept, reasons)
        if snapshot.uncalibrated and named is None:
            _note_uncalibrated(policy, route, snapshot, attempts, reasons)
    missing, able = ((), ()) if attempts else unmet_abilities(policy, request, kinds, snapshot, route, named)
    return Decision(
        policy=policy.name,
        revision=policy.revision,
        rule="" if route is None else route.name,
        attempts=attempts,
        reasons=tuple(reasons),
        on_device=bool(bound) or request.hints.prefer == "only_on_device",
        private=bool(bound),
        parts_on_device=bool(kept),
        missing_abilities=missing,
        able_targets=able,
        skipped_target=skipped_target,
        shadow=None
        if policy.shadow is None or named is not None or bound or kept
        else plan_shadow(policy.shadow, request, attempts),
    )


def _named(policy: Policy, request: Request) -> Route | None:
    """Return the targets that the client chose itself; None if the policy's routes choose."""
    named = None
    if request.model != AUTO:
        named = policy.named.get(request.model)
        if named is None:
            names = ", ".join(policy.model_names)
            raise ModelNotFound(
                f"the model `{request.model[:100]}` does not exist here; available: {names}", param="model"
            )
    if request.resume:
        return chosen_by_name((continuing_target(request.resume, policy.targets if named is None else named.targets),))
    return named


def _naming_reason(request: Request, named: Route) -> Reason:
    if request.resume:
        return Reason("continued", target=named.targets[0].name)
    return Reason("model_named", detail=request.model)


def _plan(
    route: Route,
    request: Request,
    kinds: list[Modality],
    snapshot: Snapshot,
    bound: tuple[Constraint, ...],
    kept: tuple[Constraint, ...],
    reasons: list[Reason],
) -> tuple[tuple[AttemptPlan, ...], str]:
    """Return the plans, and the name of the target that would come first if it were not down ("" for none)."""
    prefer = request.hints.prefer
    forms = None if len(kinds) == 1 else part_forms(kinds, snapshot, route.fusion, kept=bool(kept))
    if forms is not None and kept and any(kind not in forms.texts for kind in kinds[1:]):
        bound = (*bound, *kept)  # no text stands for some of the parts: nothing of the request may leave
    required = required_abilities(request, kinds)
    allowed = _exclude(route, prefer, required, bound, snapshot.absent, forms, reasons)  # (3)
    if not allowed:
        reasons.append(Reason("no_route", rule=route.name, detail="every target is excluded"))
        return (), ""
    preferred = _prefer(allowed, prefer, reasons)  # (4)
    ordered = _move_down_targets_last(preferred, route.name, snapshot.down, reasons)
    skipped_target = "" if ordered[0] is preferred[0] else preferred[0].name
    if route.handoff is None or bound or prefer == "only_on_device":  # (5)
        plans = tuple([AttemptPlan(target) for target in ordered])
    else:
        plans = plan_handoff(ordered, route.handoff, snapshot.down)
    return plans if forms is None else forms.noted(plans, route.wait_for), skipped_target


def _exclude(
    route: Route,
    prefer: Prefer | None,
    required: tuple[Ability, ...],
    bound: tuple[Constraint, ...],
    absent: frozenset[str],
    forms: PartForms | None,
    reasons: list[Reason],
) -> tuple[Target, ...]:
    """Return the targets of the route that may answer."""
    allowed: list[Target] = []
    only = _ONLY.get(prefer)
    for target in route.targets:
        missing = [ability for ability in required if ability not in target.can]
        if missing and forms is not None:
            missing = forms.unmet(missing, target)
        if bound and target.at != "edge":
            reasons.append(Reason("constraint_excluded", rule=bound[0].name, target=target.name))
        elif only is not None and target.at != only:
            reasons.append(Reason("preference_excluded", rule=prefer or "", target=target.name))
        elif target.name in absent:
            reasons.append(Reason("target_absent", rule=route.name, target=target.name, detail=_ABSENT[target.at]))
        elif missing:
            reasons.append(Reason("target_unable", rule=route.name, target=target.name, detail=", ".join(missing)))
        else:
            allowed.append(target)
    return tuple(allowed)


def _prefer(targets: tuple[Target, ...], prefer: Prefer | None, reasons: list[Reason]) -> tuple[Target, ...]:
    first = _FIRST.get(prefer)
    if first is None:
        return targets
    moved = tuple(sorted(targets, key=lambda target: target.at != first))
    reasons += [
        Reason("preference_ordered", rule=prefer or "", target=target.name)
        for target in moved
        if target.at == first and moved.index(target) < targets.index(target)
    ]
    return moved


def _move_down_targets_last(
    targets: tuple[Target, ...], rule: str, down: frozenset[str], reasons: list[Reason]
) -> tuple[Target, ...]:
    if not down:
        return targets
    reasons += [Reason("target_down", rule=rule, target=target.name) for target in targets if target.name in down]
    return tuple(sorted(targets, key=lambda target: target.name in down))


def _note_uncalibrated(
    policy: Policy, route: Route, snapshot: Snapshot, attempts: tuple[AttemptPlan, ...], reasons: list[Reason]
) -> None:
    """Say which targets lack the calibrated signals that this decision would use."""
    if route.handoff is None and _QUALITY not in policy.route_needs.signals:
        return
    names = dict.fromkeys(plan.target.name for plan in attempts if plan.target.name in snapshot.uncalibrated)
    reasons += [Reason("calibration_set_aside", rule=route.name, target=name) for name in names]


def _binding_constraints(
    constraints: tuple[Constraint, ...], values: SignalValues, reasons: list[Reason]
) -> tuple[Constraint, ...]:
    """Return the constraints that apply. One that cannot be evaluated applies (fail closed). Appends to `reasons`."""
    bound: list[Constraint] = []
    for constraint in constraints:
        result = True if constraint.when is None else constraint.when.evaluate(values)
        if result is False:
            reasons.append(constraint.not_held)
            continue
        if isinstance(result, EvaluationFailure):
            reasons.append(_failure_reason(constraint, result))
            reasons.append(Reason("constraint_held", rule=constraint.name, detail="cannot be evaluated: it binds"))
        else:
            reasons.append(constraint.held)
        bound.append(constraint)
    return tuple(bound)


def _first_match(rules: tuple[_R, ...], values: SignalValues, reasons: list[Reason]) -> _R | None:
    """Return the first rule that holds; one that cannot be evaluated does not hold. Appends to `reasons`."""
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
_CONTINUES: Final = "the rest of another answer"

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
        scope: extra bytes in the key for what the request itself does not contain, such as the targets that the
            policy's names stand for, or the client whose entries are private.
    """
    encoded = _ENCODER.encode((scope, request.hints.prefer, _keyed_fields(request)))
    return blake2b(encoded, digest_size=KEY_BYTES).digest()


def plan_cache(policy: Policy, request: Request, snapshot: Snapshot, estimates: Estimates) -> CachePlan:
    """Apply the policy's cache rules: the first one that holds decides. Without one nothing is cached. Never raises."""
    reasons: list[Reason] = []
    values = policy.cache_needs.read(request, snapshot, estimates)
    private = bool(_binding_constraints(policy.constraints, values, reasons))
    rule = _first_match(policy.cache, values, reasons)
    bypass = _bypass_reason(policy, rule, request)
    if rule is None or rule.exact is None or bypass:
        if rule is not None and rule.exact is not None:
            reasons.append(Reason("cache_refused", rule=rule.name, detail=bypass))
        return CachePlan(rule="" if rule is None else rule.name, bypass=bypass, reasons=tuple(reasons), private=private)
    return CachePlan(exact=rule.exact, semantic=rule.semantic, rule=rule.name, reasons=tuple(reasons), private=private)


def early_bypass(policy: Policy, request: Request) -> str:
    """Return why no cache rule can allow this request whatever its condition is; "" if a rule must be evaluated."""
    if request.resume:
        return _CONTINUES
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
    """Return why a second run may give another answer; "" if it may not."""
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
    """What was derived from one request: its features, and its last plan. The owner keeps it beside the request."""

    features: RequestFeatures | None = None
    policy: Policy | None = None
    snapshot: Snapshot | None = None
    planned: KeyedCachePlan | None = None


class CachePlanner:
    """Plans and keys cache entries.

    A plan is a pure function of policy, request and signals; it is computed once for the same request under the same
    snapshot, or under any snapshot if the policy's cache rules read only the request.

    Args:
        scope: extra cache-key bytes, such as hashes of the device's model files.
    """

    def __init__(self, scope: bytes = b"") -> None:
        self._scope = scope
        self._policy_scope: tuple[Policy | None, bytes] = (None, b"")  # the last policy and its scope

    def plan(self, policy: Policy, request: Request, snapshot: Snapshot, estimates: Estimates) -> KeyedCachePlan:
        """Evaluate the cache rules and compute the key."""
        plan = plan_cache(policy, request, snapshot, estimates)
        return KeyedCachePlan(plan, None if plan.exact is None else self._key(policy, request, plan))

    def plan_memoized(self, policy: Policy, request: Request, snapshot: Snapshot, memo: RequestMemo) -> KeyedCachePlan:
        """Plan without estimates. Reuses the memo if nothing that the policy's cache rules read has changed."""
        planned = memo.planned
        valid = memo.policy is policy and (policy.cache_needs.request_only or memo.snapshot is snapshot)
        if planned is None or not valid:
            planned = memo.planned = self.plan(policy, request, snapshot, Estimates())
            memo.policy, memo.snapshot = policy, snapshot
        return planned

    def semantic_scope(self, policy: Policy, request: Request, plan: CachePlan) -> bytes:
        """Return the key that two requests must share so that one may get the answer to the other's question.

        That is everything of the exact key but the question: the conversation before, tools, formats, limits. Clients
        never share: the client's name is in the scope, also where the exact cache shares.
        """
        client = request.hints.client.encode("utf-8", "replace")
        return self._key(policy, without_question(request), plan) + blake2b(client, digest_size=KEY_BYTES).digest()

    def _key(self, policy: Policy, request: Request, plan: CachePlan) -> bytes:
        if self._policy_scope[0] is not policy:
            targets = _ENCODER.encode((self._scope, policy.targets))
            self._policy_scope = (policy, blake2b(targets, digest_size=16).digest())
        private = b"private:" + request.hints.client.encode("utf-8", "replace") if plan.private else b""
        return fingerprint(request, self._policy_scope[1] + private)


# --- for decision records ---------------------------------------------------------------------------------------------

_NAME_CHARACTERS: Final = 128  # no target and no model of a policy has a longer name


def features_of(request: Request) -> RequestFeatures:
    """Return what routing reads of a request, without its content; `features.request_of` is the way back."""
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
        modalities=tuple(modalities(request)),
        offers_tools=bool(request.tools),
        tools=wants_tools(request),
        json=wants_json(request),
        logprobs=request.logprobs is not None,
        continues=None if not request.resume else _name(split_token(request.resume)[0]),
    )


def _name(value: str) -> str:
    """Cut a name that no policy can contain; one character more than the longest keeps it unknown."""
    return _text(value[: _NAME_CHARACTERS + 1])


def _text(value: str) -> str:
    """Replace lone surrogates, as signals do. Nearly all text is ASCII, and is looked at here."""
    return value if value.isascii() else replace_surrogates(value)


def plan_handoff(
    targets: tuple[Target, ...], handoff: Handoff, down: frozenset[str] = frozenset()
) -> tuple[AttemptPlan, ...]:
    """Plan one attempt per target, in order, with the handoff where it applies.

    1. Only the device's engine reports confidence, so only an edge target hands off.
    2. It hands off only if a later target that is not known to be down can take over.
    3. It then also becomes the last resort, without handoff: if all targets after it fail, an answer of low confidence
       is better than none.

    Args:
        down: names of targets that are known to be down.
    """
    plans: list[AttemptPlan] = []
    last_resort: list[AttemptPlan] = []
    for index, target in enumerate(targets):
        can_take_over = any(later.name not in down for later in targets[index + 1 :])
        if target.at == "edge" and can_take_over:  # (1) (2)
            plans.append(AttemptPlan(target, handoff))
            last_resort.append(AttemptPlan(target))  # (3)
        else:
            plans.append(AttemptPlan(target))
    return tuple(plans + last_resort)


def plan_shadow(shadow: Shadow, request: Request, attempts: tuple[AttemptPlan, ...]) -> Shadow | None:
    """Return `shadow` if both sides can answer and their answers can be compared, else None.

    After an answer the other side is then asked the same, to learn when the device is good enough. Which of these
    requests are sent (a share, within a budget) is the daemon's choice.

    1. The policy lets the device and the cloud answer this request.
    2. The answer is one text: no embedding, no tool calls, one choice, not the rest of another answer.
    3. The prompt is one text, because the signals are estimated from it.
    4. The device answers with its model alone: the signals say nothing about one with an adapter.
    """
    sides = {plan.target.at for plan in attempts}
    one_text = (
        request.kind != "embedding" and request.sequences == 1 and not wants_tools(request) and not request.resume
    )
    adapted = any(plan.target.adapter for plan in attempts)
    return shadow if len(sides) == 2 and one_text and not adapted and modalities(request) == ["text"] else None


def other_target(attempts: tuple[AttemptPlan, ...], answered: Target) -> Target | None:
    """Return the first target on the other side than the one that answered."""
    return next((plan.target for plan in attempts if plan.target.at != answered.at), None)


def without_down(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot in which no target is down. A job has time: it waits for the target that comes first."""
    return msgspec.structs.replace(snapshot, down=frozenset()) if snapshot.down else snapshot


def until_first_cloud(decision: Decision) -> Decision:
    """Return the decision of a job: its attempts up to the first one in the cloud.

    No lesser target answers in its place, and the request is sent to one target of the cloud alone, so that it has one
    effect there.
    """
    for number, plan in enumerate(decision.attempts, start=1):
        if plan.target.at == "cloud":
            return msgspec.structs.replace(decision, attempts=decision.attempts[:number])
    return decision
