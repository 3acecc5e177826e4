"""New decisions of a recorded request, and inference from the record which target would answer. If a rule names a
signal that was not recorded, every possible decision is returned. A signal that was not recorded is not absent: the
device would have computed it for a policy that names it. A rule whose condition depends on such a signal may therefore
hold or not, and each case is decided by `decide` itself, under the policy with a constant for that rule's condition:

1. Constraints: a constraint that is known to bind applies. Otherwise the undecided constraints all bind, or none does.
2. Routes: each route that may hold, up to the first one that certainly holds.
3. Cache rules: the same as for routes.
4. Routes with `best_of`, if the record lacks the estimates of a target: each of their targets may be the first.

A decision lists attempts; `expected` infers from the record which of them would answer.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypeVar

import msgspec

from ..decision.decide import decide, plan_cache
from ..errors import InvalidRequest, ModelNotFound
from ..policy.compiled import CacheRule, Policy, Route, Rule, with_clouds, with_model_temperatures
from ..policy.signals import (
    ESTIMATED,
    GUARD_SIGNALS,
    TEMPERATURE,
    EvaluationFailure,
    Reader,
    RequiredSignals,
    SignalValues,
    TargetAvailability,
    Value,
    signal_spec,
    temperature_of,
)
from ..prices import FREE, Price
from ..types import (
    AUTO,
    AttemptPlan,
    AttemptRecord,
    Decision,
    DecisionRecord,
    DeviceSetup,
    Handoff,
    Location,
    Request,
    Snapshot,
    Target,
)

CONFIDENCE: Final = "confidence"
"""The name of the value on which an unreplayable handoff depends; no signal, as it is measured after the decision."""
ESTIMATES: Final = "estimates"
"""The name of the value that a decision depends on if a target of `best_of` has no recorded estimates."""


class Place(msgspec.Struct, frozen=True, order=True):
    """The place of a request's answer. If `at` is "", `target` says whether the cache answers, or nothing."""

    target: str
    at: Location | str = ""
    model: str = ""
    cloud: str = ""  # of a target in several clouds

    def __str__(self) -> str:
        cloud = f" {self.cloud}" if self.cloud else ""
        return f"{self.target} ({self.at}{cloud})" if self.at else self.target


CACHE: Final = Place("cache")
NO_ANSWER: Final = Place("no answer")


class Expected(msgspec.Struct, frozen=True):
    """A possible outcome of a request. `may_leave`: the decision has a cloud target for a failure or a handoff."""

    place: Place  # the place where it is answered
    rule: str = ""  # the route that decides; "" if none does
    price: Price = FREE
    left: bool = False  # whether the request's content goes to the cloud
    may_leave: bool = False


def recorded(record: DecisionRecord) -> Expected:
    """Return the recorded outcome of a request."""
    outcome, decision = record.outcome, record.decision
    plans = () if decision is None else decision.attempts
    name = outcome.target
    if outcome.status == "cancelled" and outcome.attempts:
        name = outcome.attempts[-1].target  # the client left while this target worked
    cloud = outcome.attempts[-1].cloud if outcome.attempts else ""
    same = [plan.target for plan in plans if plan.target.name == name]
    target = next((one for one in same if one.cloud == cloud), same[0] if same else None)
    place, price = NO_ANSWER, FREE
    if outcome.route == "cache":
        place = CACHE
    elif target is not None:
        place, price = _place(target), target.price
    return Expected(
        place=place,
        rule="" if decision is None else decision.rule,
        price=price,
        left=any(attempt.at == "cloud" for attempt in outcome.attempts),
        # For a hit no decision is recorded: the request may have had a target in the cloud.
        may_leave=_may_leave(plans) or outcome.cache == "hit",
    )


def expected(decision: Decision | None, record: DecisionRecord) -> tuple[Expected, ...]:
    """Return the outcome that the record implies for this decision; several if it depends on a confidence.

    1. A target that was passed over in the record (it failed, and another one answered or none) is passed over again.
    2. A target that answered, or was not tried, answers.
    3. A handoff compares the recorded confidence. If none was measured over as many tokens, the outcome is unknown.
    """
    if decision is None:
        return (Expected(NO_ANSWER),)
    plans, evidence = decision.attempts, _evidence(record)
    may_leave = _may_leave(plans)
    found: list[Expected] = []
    left = False
    for plan in plans:
        left = left or plan.target.at == "cloud"
        shown = evidence.get(_place(plan.target))
        if shown is not None and shown.ended:
            break
        answers = _answers(plan, shown)
        if answers is not False:
            found.append(Expected(_place(plan.target), decision.rule, plan.target.price, left, may_leave))
        if answers:
            return tuple(found)
    return (*found, Expected(NO_ANSWER, decision.rule, left=left, may_leave=may_leave))


class _Evidence(msgspec.Struct, frozen=True):
    attempt: AttemptRecord
    handoff: Handoff | None
    gave_way: bool  # whether another target was tried, or none was left
    ended: bool  # whether the request ended here without an answer, because its deadline passed or it was invalid


def _evidence(record: DecisionRecord) -> dict[Place, _Evidence]:
    """Return the record's attempts by place, without the last resort after a handoff if two have one place."""
    if record.decision is None:
        return {}
    outcome, plans = record.outcome, {}
    for plan in reversed(record.decision.attempts):
        plans[plan.target.name, plan.target.cloud] = plan
    answered = outcome.target if outcome.route in ("edge", "cloud") else ""
    untried = plans.keys() - {(attempt.target, attempt.cloud) for attempt in outcome.attempts}
    found: dict[Place, _Evidence] = {}
    for attempt in outcome.attempts:
        known = plans.get((attempt.target, attempt.cloud))
        if known is not None:
            is_last = attempt is outcome.attempts[-1]
            failed = attempt.state in ("failed", "timed_out") and not (is_last and attempt.target == answered)
            ended = failed and is_last and bool(untried)
            found.setdefault(_place(known.target), _Evidence(attempt, known.handoff, failed and not ended, ended))
    return found


def _answers(plan: AttemptPlan, evidence: _Evidence | None) -> bool | None:
    """Return whether the attempt answers; None if that depends on a confidence that was not measured."""
    handed_off = evidence is not None and evidence.attempt.state == "handed_off"
    if evidence is not None and evidence.gave_way and not handed_off:  # (1)
        return False
    if plan.handoff is None:  # (2)
        return True
    if evidence is None or evidence.handoff is None or _held_back(evidence.handoff) != _held_back(plan.handoff):
        return None
    confidence = evidence.attempt.confidence  # (3); without one a handoff keeps the answer
    return confidence is None or confidence.score >= plan.handoff.below


def _held_back(handoff: Handoff) -> tuple[int, float | None]:
    return handoff.after_tokens, handoff.within_s


def _place(target: Target) -> Place:
    return Place(target.name, target.at, target.model, target.cloud if target.clouds else "")


def _may_leave(plans: tuple[AttemptPlan, ...]) -> bool:
    return any(plan.target.at == "cloud" for plan in plans)


_R = TypeVar("_R", bound=Rule)
_NONE: frozenset[str] = frozenset()
_ALL_PRESENT: Final = DeviceSetup(engine=True, cloud=True)


class Possible(msgspec.Struct, frozen=True):
    """The possible decisions of a request, each once. None: the request is refused (no such model)."""

    decisions: tuple[Decision | None, ...]
    hangs_on: tuple[str, ...] = ()  # signals that were not recorded; () if there is only one decision
    constraint: str = ""  # constraints that may or may not bind
    cached: bool | None = False  # whether the cache may answer (only for records of hits); None if unknown


class PolicyReplay:
    """Replays records under one policy. Each variant with replaced rules, or for another device, is compiled once."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._by_device: dict[tuple[object, ...], Policy] = {}
        self._cases: dict[tuple[Policy, tuple[str, ...], bool, str | None], Policy] = {}
        self._availability: dict[tuple[bool, bool, tuple[str, ...]], TargetAvailability] = {}
        self._orders: dict[Policy, tuple[Policy, ...]] = {}

    def possible(self, record: DecisionRecord, request: Request) -> Possible:
        """Return the possible decisions of the recorded request. `request`: the request rebuilt from its features."""
        policy, unrecorded = self._for_device(record, request)
        recorded = {(one.at, one.model) for one in record.estimates.candidates or ()}
        if all((target.at, target.served) in recorded for target in policy.compared):
            return self._possible(policy, unrecorded, record, request)
        if policy not in self._orders:
            self._orders[policy] = _in_each_order(policy)
        first, *others = [self._possible(one, unrecorded, record, request) for one in self._orders[policy]]
        by_plan = {repr(_plan_of(one)): one for result in (first, *others) for one in result.decisions}
        if len(by_plan) <= len(first.decisions):
            return first
        hangs_on = tuple(sorted({*first.hangs_on, ESTIMATES}))
        return Possible(tuple(by_plan.values()), hangs_on, first.constraint, first.cached)

    def _possible(
        self, policy: Policy, unrecorded: frozenset[str], record: DecisionRecord, request: Request
    ) -> Possible:
        snapshot = self._snapshot(record.snapshot)
        cached: bool | None = False
        if record.outcome.cache == "hit":
            cached = self._cached(policy, record, request, snapshot, unrecorded)
            if cached:
                return Possible((), cached=True)
        needs = policy.route_needs if request.model == AUTO else policy.constraint_needs
        unknown = unrecorded & needs.signals
        of_cache = unrecorded & policy.cache_needs.signals if cached is None else _NONE
        if not unknown:
            return Possible((_decide(policy, request, snapshot, record),), tuple(sorted(of_cache)), cached=cached)
        values = _known_values(policy, needs, unknown, request, snapshot, record)
        undecided = _undecided_constraints(policy, values, unknown)
        routes: list[Route | None] = [None]
        if request.model == AUTO:
            routes = _may_hold(policy.routes, values, unknown)
        found: list[Decision | None] = []
        for binds in (True, False) if undecided else (True,):
            for route in routes:
                case = self._case(policy, undecided, binds, route, len(routes) > 1)
                decision = _decide(case, request, snapshot, record)
                if not any(_plan_of(one) == _plan_of(decision) for one in found):
                    found.append(decision)
        if len(found) == 1:
            return Possible(tuple(found), tuple(sorted(of_cache)), cached=cached)
        return Possible(tuple(found), tuple(sorted(unknown | of_cache)), ", ".join(undecided), cached)

    def _for_device(self, record: DecisionRecord, request: Request) -> tuple[Policy, frozenset[str]]:
        """Return the policy as the record's device compiles it, and the signals that are unknown there."""
        policy, unrecorded = self._policy, frozenset(record.unrecorded)
        estimates = record.estimates
        unrecorded |= {name for name in GUARD_SIGNALS if getattr(estimates, ESTIMATED[name]) is None}
        setup = record.snapshot.setup or _ALL_PRESENT
        models, known = policy.model_temperatures, setup.temperatures
        is_known = models.keys() <= known.keys()
        if not is_known and request.kind != "embedding" and request.sampling.temperature is None:
            unrecorded |= {TEMPERATURE}
        key = (setup.clouds, *[known[model] for model in models if is_known])
        if key not in self._by_device:
            differs = is_known and key[1:] != tuple(models.values())
            compiled = with_model_temperatures(policy, known.__getitem__) if differs else policy
            self._by_device[key] = with_clouds(compiled, setup.clouds)
        return self._by_device[key], unrecorded

    def _snapshot(self, recorded: Snapshot) -> Snapshot:
        """Return the snapshot for the targets of this policy; the recorded policy's targets had other names."""
        setup = recorded.setup or _ALL_PRESENT
        key = (setup.engine, setup.cloud, setup.clouds)
        availability = self._availability.get(key)
        if availability is None:
            availability = self._availability[key] = TargetAvailability(self._policy.targets, setup)
        down = availability.down(recorded.edge, recorded.cloud, recorded.clouds)
        return msgspec.structs.replace(recorded, down=down, absent=availability.absent, uncalibrated=_NONE)

    def _case(
        self, policy: Policy, undecided: tuple[str, ...], binds: bool, route: Route | None, chosen: bool
    ) -> Policy:
        """Return the policy in which undecided constraints bind or do not, and `route` holds (if it is `chosen`)."""
        name = ("" if route is None else route.name) if chosen else None
        key = (policy, undecided, binds, name)
        case = self._cases.get(key)
        if case is None:

            def bound(rules: tuple[_R, ...]) -> tuple[_R, ...]:
                known = [one for one in rules if binds or one.name not in undecided]
                return tuple([replace(one, when=None) if one.name in undecided else one for one in known])

            case = replace(
                policy,
                constraints=bound(policy.constraints),
                region_constraints=bound(policy.region_constraints),
                guard=bound(policy.guard),
            )
            if chosen:
                case = replace(case, routes=() if route is None else (replace(route, when=None),))
            self._cases[key] = case
        return case

    def _cached(
        self, policy: Policy, record: DecisionRecord, request: Request, snapshot: Snapshot, unrecorded: frozenset[str]
    ) -> bool | None:
        unknown = unrecorded & policy.cache_needs.signals
        if not unknown:
            return plan_cache(policy, request, snapshot, record.estimates).exact is not None
        values = _known_values(policy, policy.cache_needs, unknown, request, snapshot, record)
        results = set()
        for rule in _may_hold(policy.cache, values, unknown):
            rules: tuple[CacheRule, ...] = () if rule is None else (replace(rule, when=None),)
            plan = plan_cache(replace(policy, cache=rules), request, snapshot, record.estimates)
            results.add(plan.exact is not None)
        return results.pop() if len(results) == 1 else None


def _decide(policy: Policy, request: Request, snapshot: Snapshot, record: DecisionRecord) -> Decision | None:
    try:
        return decide(policy, request, snapshot, record.estimates)
    except (ModelNotFound, InvalidRequest):
        return None


def _in_each_order(policy: Policy) -> tuple[Policy, ...]:
    """Return the policy once for each target of its longest `best_of`, with another target first each time."""
    longest = max(len(route.targets) for route in policy.routes if route.best_of is not None)

    def turned(route: Route, by: int) -> Route:
        if route.best_of is None:
            return route
        by %= len(route.targets)
        return replace(route, targets=route.targets[by:] + route.targets[:by], best_of=None)

    return tuple(replace(policy, routes=tuple(turned(route, by) for route in policy.routes)) for by in range(longest))


def _plan_of(decision: Decision | None) -> object:
    """Return the key that distinguishes possible decisions; their reasons are left out because they always differ."""
    return decision and (decision.rule, [(plan.target.key, plan.handoff) for plan in decision.attempts])


def _known_values(
    policy: Policy,
    needs: RequiredSignals,
    unknown: frozenset[str],
    request: Request,
    snapshot: Snapshot,
    record: DecisionRecord,
) -> SignalValues:
    """Return the signals without the unknown ones, neither their values nor their presence."""
    values: dict[str, Value] = {}
    for name, variable, presence, read in _readers(needs.signals - unknown):
        value = read(request, snapshot, record.estimates)
        if name == TEMPERATURE:
            value = temperature_of(request, policy.default_temperature)
        if value is not None:
            values[variable] = value
        values[presence] = value is not None
    return SignalValues(values)


@functools.cache
def _readers(names: frozenset[str]) -> tuple[tuple[str, str, str, Reader], ...]:
    specs = [signal_spec(name) for name in sorted(names)]
    return tuple((spec.name, spec.variable, spec.presence_variable, spec.read) for spec in specs)


def _holds(rule: Rule, values: SignalValues, unknown: frozenset[str], *, on_failure: bool) -> bool | None:
    """Return whether the rule holds; None if that depends on an unknown signal."""
    if rule.when is None:
        return True
    result = rule.when.evaluate(values)
    if not isinstance(result, EvaluationFailure):
        return result
    return on_failure if unknown.isdisjoint(rule.when.signals) else None


def _undecided_constraints(policy: Policy, values: SignalValues, unknown: frozenset[str]) -> tuple[str, ...]:
    found = {
        rule: _holds(rule, values, unknown, on_failure=True)
        for rule in (*policy.constraints, *policy.region_constraints, *policy.guard)
    }
    if any(found[rule] for rule in policy.constraints):
        return ()  # bound to the device in any case
    return tuple(rule.name for rule, result in found.items() if result is None)


def _may_hold(rules: Sequence[_R], values: SignalValues, unknown: frozenset[str]) -> list[_R | None]:
    """Return the rules that may be the first to hold; a last entry None means that perhaps no rule holds."""
    found: list[_R | None] = []
    for rule in rules:
        result = _holds(rule, values, unknown, on_failure=False)
        if result is not False:
            found.append(rule)
        if result is True:
            return found
    return [*found, None]
