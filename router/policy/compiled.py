"""A checked, compiled and frozen policy, made from the text of a file, for `decide`.

`check_policy` reports every problem with its location; `parse_policy` raises on the first error. Both are pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import msgspec
from msgspec import UnsetType

from ..documents.reader import KeyLocations, read_struct
from ..documents.strict_yaml import Problem
from ..errors import PolicyError
from ..guard.classes import GUARD_CLASSES, GuardClass
from ..guard.facts import DEFAULT_SETTINGS, GuardSettings
from ..prices import FREE
from ..types import (
    AUTO,
    Decision,
    ExactCache,
    Fusion,
    Handoff,
    Overflow,
    Promise,
    Reason,
    ReasonCode,
    SemanticCache,
    Shadow,
    Target,
    WaitFor,
    Weights,
)
from ..variants.trials import TrialPlace
from .cel_source import ExpressionError
from .expression import compile_expression
from .file import (
    BatteryDoc,
    BestOfDoc,
    BudgetDoc,
    CacheDoc,
    GuardDoc,
    GuardRuleDoc,
    HeatDoc,
    PolicyDoc,
    RouteDoc,
    SessionDoc,
    ShadowDoc,
    TargetDoc,
    rules,
    seconds,
    used,
)
from .lint import Conditions, check_meaning
from .outcomes import Claim, compile_claim
from .signals import AUDIO_S, GUARD_SIGNALS, OPENAI_TEMPERATURE, Expression, RequiredSignals

NAME = "policy.yaml"
_CLAIMS = "claims["

ModelTemperature = Callable[[str], float | None]
"""A function that returns the temperature that a model on the device, MODEL or MODEL+ADAPTER, uses by default; None if
unknown."""


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """The common part of constraints, routes and cache rules: a name, a condition (None: always), and its reasons."""

    HELD: ClassVar[ReasonCode] = "rule_held"
    NOT_HELD: ClassVar[ReasonCode] = "rule_not_held"

    name: str
    when: Expression | None
    held: Reason = field(init=False)  # created once, because every decision needs them
    not_held: Reason = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "held", Reason(self.HELD, rule=self.name))
        object.__setattr__(self, "not_held", Reason(self.NOT_HELD, rule=self.name))


@dataclass(frozen=True, slots=True, eq=False)
class Constraint(Rule):
    HELD: ClassVar[ReasonCode] = "constraint_held"

    keep: Literal["on_device", "parts_on_device", "in_region"]
    regions: frozenset[str] = frozenset()  # of `in_region`


@dataclass(frozen=True, slots=True, eq=False)
class GuardRule(Rule):
    HELD: ClassVar[ReasonCode] = "guard_held"
    NOT_HELD: ClassVar[ReasonCode] = "guard_not_held"

    action: Literal["refuse", "mask", "audit"]
    classes: tuple[GuardClass, ...] = ()  # of `mask`

    def __post_init__(self) -> None:
        Rule.__post_init__(self)
        object.__setattr__(self, "held", Reason(self.HELD, rule=self.name, detail=self.action))


@dataclass(frozen=True, slots=True, eq=False)
class Route(Rule):
    targets: tuple[Target, ...]
    handoff: Handoff | None
    fusion: Fusion
    wait_for: WaitFor
    best_of: Weights | None = None  # None: the targets are tried in their order
    promise: Promise | None = None


@dataclass(frozen=True, slots=True, eq=False)
class CacheRule(Rule):
    HELD: ClassVar[ReasonCode] = "cache_rule_held"
    NOT_HELD: ClassVar[ReasonCode] = "cache_rule_not_held"

    exact: ExactCache | None  # None: matching requests are not cached
    semantic: SemanticCache | None
    allow_sampled: bool
    allow_tools: bool


@dataclass(frozen=True, slots=True)
class Limits:
    concurrent: int = 16
    queue: int = 64
    per_client_rps: float | None = None  # None: no limit


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """A compiled policy. `needs` names every signal that it uses; no other signal need be computed."""

    name: str
    revision: str  # first 12 hex digits of the content's SHA-256; comments and layout do not change it
    targets: tuple[Target, ...]
    constraints: tuple[Constraint, ...]  # constraints that keep a request on the device
    part_constraints: tuple[Constraint, ...]  # constraints that keep its audio, images and files there
    region_constraints: tuple[Constraint, ...]  # constraints that keep a request in regions
    routes: tuple[Route, ...]
    cache: tuple[CacheRule, ...]
    limits: Limits
    shadow: Shadow | None
    default_temperature: float  # `request.temperature` if the client sets none: the highest of the targets
    own_temperature: frozenset[str]  # names of the edge targets that declare none: their models' own is used
    session: SessionDoc | None = None  # None: each request is decided alone
    adapted: tuple[Target, ...] = ()  # edge targets with an adapter of their model, for clients that name one
    guard: tuple[GuardRule, ...] = ()  # rules about personal data and keys
    guard_settings: GuardSettings = DEFAULT_SETTINGS
    places: Mapping[str, TrialPlace] = field(default_factory=dict)  # the targets with variants
    overflow: Overflow = "refuse"
    budget_usd: float | None = None  # a local day; None: no limit
    battery: BatteryDoc | None = None  # None: its charge is not paced
    heat: HeatDoc | None = None  # likewise
    base: Policy | None = None  # the policy without variants, of one made by `with_variants`
    claims: tuple[Claim, ...] = ()  # of its owner; nothing reads them where requests are decided
    paces_energy: bool = field(init=False)
    paced: bool = field(init=False)  # by any budget
    constraint_needs: RequiredSignals = field(init=False)  # of `decide` with a named model: constraints only
    route_needs: RequiredSignals = field(init=False)  # of `decide` with model `auto`: constraints and routes
    cache_needs: RequiredSignals = field(init=False)  # of `plan_cache`: constraints and cache rules
    offered: tuple[Target, ...] = field(init=False)  # the targets that a client may name
    compared: tuple[Target, ...] = field(init=False)  # the targets that `best_of` orders, each once
    target_names: frozenset[str] = field(init=False)
    priced: frozenset[str] = field(init=False)  # the on-demand signals that prices of targets need
    reads_only_features: bool = field(init=False)  # whether `decide` reads no signal but those of `RequestFeatures`
    decisions: dict[object, Decision] = field(init=False, default_factory=dict)  # of `decide_memoized`
    named: Mapping[str, Route] = field(init=False)  # the targets of each name that a client may send as `model`

    def __post_init__(self) -> None:
        bound = (*self.constraints, *self.part_constraints, *self.region_constraints, *self.guard)
        for name, read in (("constraint", bound), ("route", (*bound, *self.routes)), ("cache", (*bound, *self.cache))):
            conditions = [rule.when for rule in read if rule.when is not None]
            object.__setattr__(self, f"{name}_needs", RequiredSignals(conditions, self.default_temperature))
        object.__setattr__(self, "offered", self.targets + self.adapted)
        ordered = (route for route in self.routes if route.best_of is not None)
        compared = dict.fromkeys(target for route in ordered for target in route.targets)
        object.__setattr__(self, "compared", tuple(compared))
        alone = self.route_needs.request_only and not self.compared and self.shadow is None and self.session is None
        object.__setattr__(self, "paces_energy", self.battery is not None or self.heat is not None)
        object.__setattr__(self, "paced", self.budget_usd is not None or self.paces_energy)
        object.__setattr__(self, "reads_only_features", alone and not self.paced)
        hears = any(target.price.audio_second for target in self.targets)
        object.__setattr__(self, "priced", frozenset((AUDIO_S,) if hears else ()))
        object.__setattr__(self, "target_names", frozenset(target.name for target in self.targets))
        object.__setattr__(self, "named", _named_routes(self.targets, self.adapted))

    @property
    def model_names(self) -> tuple[str, ...]:
        """The values that a client may send as `model`: auto, and the names of the targets."""
        return (AUTO, *(target.name for target in self.offered))

    @property
    def edge_models(self) -> tuple[str, ...]:
        """The device's models that may answer, each once: those of the edge targets, and of their variants."""
        edge = [target for target in self.targets if target.at == "edge"]
        places = (self.places[target.name] for target in edge if target.name in self.places)
        variants = (variant.model.partition("+")[0] for place in places for variant in place.variants)
        return tuple(dict.fromkeys([*(target.model for target in edge), *variants]))

    @property
    def reads_texts(self) -> bool:
        """Whether a condition names a signal of the guard's detectors."""
        return not GUARD_SIGNALS.isdisjoint(self.needs)

    @property
    def needs(self) -> frozenset[str]:
        return self.route_needs.signals | self.cache_needs.signals

    @property
    def model_temperatures(self) -> dict[str, float | None]:
        """Default temperatures of device models whose targets declare none; None if unknown, when 1.0 is assumed."""
        return {target.served: target.temperature for target in self.targets if target.name in self.own_temperature}


def _named_routes(targets: tuple[Target, ...], adapted: tuple[Target, ...]) -> dict[str, Route]:
    """Return a route for each name: the target of that name, else all targets that serve the model of that name."""
    named: dict[str, tuple[Target, ...]] = {}
    for group in (adapted, targets):
        served: dict[str, tuple[Target, ...]] = {}
        for target in group:
            served[target.served] = (*served.get(target.served, ()), target)
        named |= served
    named |= {target.name: (target,) for target in targets + adapted}
    placed = {name: in_each_cloud(found) for name, found in named.items()}
    placed |= {one.full_name: (one,) for target in targets for one in target.in_each_cloud}
    return {name: chosen_by_name(found) for name, found in placed.items()}


def chosen_by_name(targets: tuple[Target, ...]) -> Route:
    """Return the route for a request that names its targets and bypasses the policy's routes."""
    return Route("", when=None, targets=targets, handoff=None, fusion="late", wait_for="all")


def in_each_cloud(targets: Sequence[Target]) -> tuple[Target, ...]:
    """Return each target once for each of its clouds, in order."""
    return tuple([one for target in targets for one in target.in_each_cloud])


def parse_policy(text: str, file: str = NAME, model_temperature: ModelTemperature = lambda _: None) -> Policy:
    """Compile a policy.

    Args:
        file: Its name in messages.
        model_temperature: The temperature of an edge target that declares none.

    Raises:
        PolicyError: The policy has errors. The message has the first error with file, line, column and key, and the
            number of further errors.
    """
    policy, problems = check_policy(text, file, model_temperature)
    if policy is not None:
        return policy
    first, *rest = [problem for problem in problems if problem.severity == "error"]
    more = f" (and {len(rest)} more)" if rest else ""
    raise PolicyError(first.message + more, where=str(first.location))


def with_model_temperatures(policy: Policy, model_temperature: ModelTemperature) -> Policy:
    """Return the policy as compiled on a device whose models have these temperatures."""

    def with_own(target: Target) -> Target:
        if target.name not in policy.own_temperature:
            return target
        return msgspec.structs.replace(target, temperature=model_temperature(target.served))

    changed = _with_targets(policy, with_own)
    return replace(changed, default_temperature=_default_temperature(changed.targets))


def with_clouds(policy: Policy, clouds: Sequence[str]) -> Policy:
    """Return the policy on a device with these clouds: a target `at: cloud` is in the first one."""
    if not clouds:
        return policy

    def in_first(target: Target) -> Target:
        is_open = target.at == "cloud" and not target.cloud
        return msgspec.structs.replace(target, cloud=clouds[0]) if is_open else target

    return _with_targets(policy, in_first)


def _with_targets(policy: Policy, change: Callable[[Target], Target]) -> Policy:
    routes = tuple(replace(route, targets=tuple(map(change, route.targets))) for route in policy.routes)
    return replace(policy, targets=tuple(map(change, policy.targets)), routes=routes)


def with_variants(policy: Policy, chosen: Mapping[str, str]) -> Policy:
    """Return the policy for requests that variants answer. `chosen`: the variant's model, by the name of the target."""

    return replace(_with_targets(policy, lambda one: as_variant(one, chosen.get(one.name, ""))), base=policy)


def as_variant(target: Target, variant: str) -> Target:
    """Return the target with a variant's model in the place of its own; "": with its own."""
    if not variant:
        return target
    model, _, adapter = variant.partition("+") if target.at == "edge" else (variant, "", "")
    return msgspec.structs.replace(target, model=model, adapter=adapter, variant=variant)


def check_policy(
    text: str,
    file: str = NAME,
    model_temperature: ModelTemperature = lambda _: None,
    readable: frozenset[str] | None = None,
) -> tuple[Policy | None, tuple[Problem, ...]]:
    """Return the policy (None if a problem is an error) and all problems in file order. Raises nothing.

    Args:
        file: Its name in messages.
        model_temperature: The temperature of an edge target that declares none.
        readable: Signals that the policy's devices can read; None if unknown.
    """
    doc, locations, problems = read_struct(text, file, PolicyDoc)
    if doc is None:
        return None, problems
    found = list(problems)
    conditions = _compile(doc, locations, found)
    of_rules = {path: one for path, one in conditions.items() if not path.startswith(_CLAIMS)}
    found += check_meaning(doc, locations, of_rules, readable)
    found.sort(key=lambda problem: (problem.location.line, problem.location.column))
    broken = any(problem.severity == "error" for problem in found)
    return None if broken else _build(doc, conditions, model_temperature), tuple(found)


def _compile(doc: PolicyDoc, locations: KeyLocations, problems: list[Problem]) -> Conditions:
    """Compile every `when`, by its path. Invalid conditions are reported and left out."""
    sources: dict[str, str] = {}
    for part, listed in rules(doc).items():
        for index, rule in enumerate(listed):
            if not isinstance(rule.when, UnsetType):
                sources[f"{part}[{index}].when"] = rule.when
    for index, claim in enumerate(doc.claims):
        sources[f"claims[{index}].holds"] = claim.holds
        if not isinstance(claim.when, UnsetType):
            sources[f"claims[{index}].when"] = claim.when
    compiled: dict[str, Expression] = {}
    for path, source in sources.items():
        try:
            compiled[path] = compile_claim(source) if path.startswith(_CLAIMS) else compile_expression(source)
        except ExpressionError as error:
            scalar = locations.scalars[path]
            location = scalar.location
            if error.offset is not None and scalar.offset is not None:
                location = location.shifted(scalar.offset + error.offset)
            problems.append(Problem(location, error.message))
    return compiled


def _build(doc: PolicyDoc, conditions: Conditions, model_temperature: ModelTemperature) -> Policy:
    targets = {name: _target(name, target, model_temperature) for name, target in doc.targets.items()}
    constraints = tuple(
        Constraint(rule.name, conditions.get(f"constraints[{index}].when"), rule.keep, frozenset(rule.regions))
        for index, rule in enumerate(doc.constraints)
    )
    routes = tuple(
        _route(rule, conditions.get(f"routes[{index}].when"), targets) for index, rule in enumerate(doc.routes)
    )
    cache = tuple(
        _cache_rule(rule, index, conditions.get(f"cache[{index}].when")) for index, rule in enumerate(doc.cache)
    )
    budget = doc.budget or BudgetDoc()
    return Policy(
        name=doc.name,
        revision=hashlib.sha256(msgspec.json.encode(doc)).hexdigest()[:12],
        targets=tuple(targets.values()),
        constraints=tuple(one for one in constraints if one.keep == "on_device"),
        part_constraints=tuple(one for one in constraints if one.keep == "parts_on_device"),
        region_constraints=tuple(one for one in constraints if one.keep == "in_region"),
        routes=routes,
        cache=cache,
        limits=Limits(doc.limits.concurrent, doc.limits.queue, doc.limits.per_client_rps or None),
        shadow=_shadow(doc.shadow),
        session=doc.session or None,
        default_temperature=_default_temperature(tuple(targets.values())),
        own_temperature=frozenset(
            name for name, t in doc.targets.items() if t.location == "edge" and isinstance(t.temperature, UnsetType)
        ),
        overflow=doc.context.overflow,
        budget_usd=budget.usd_per_day or None,
        battery=budget.battery or None,
        heat=budget.heat or None,
        guard=tuple(
            guard_rule(rule, conditions.get(f"guard.rules[{index}].when")) for index, rule in enumerate(doc.guard.rules)
        ),
        guard_settings=guard_settings(doc.guard),
        claims=tuple(
            Claim(claim.name, conditions.get(f"claims[{index}].when"), conditions[f"claims[{index}].holds"])
            for index, claim in enumerate(doc.claims)
        ),
        places={name: TrialPlace(t.model, t.variants, t.trial) for name, t in doc.targets.items() if t.variants},
    )


def guard_rule(doc: GuardRuleDoc, when: Expression | None) -> GuardRule:
    classes = doc.classes or GUARD_CLASSES
    return GuardRule(doc.name, when, doc.action, tuple(sorted(set(classes))) if doc.action == "mask" else ())


def guard_settings(doc: GuardDoc) -> GuardSettings:
    """Return the settings of the guard's detectors."""
    return GuardSettings(doc.on_failure, seconds(doc.timeout) or 0.0, doc.phone_regions)


def _default_temperature(targets: tuple[Target, ...]) -> float:
    """Return the highest temperature of the targets that generate text, since any of them may answer."""
    temperatures = [
        OPENAI_TEMPERATURE if target.temperature is None else target.temperature
        for target in targets
        if not {"chat", "completion"}.isdisjoint(target.can)
    ]
    return max(temperatures, default=OPENAI_TEMPERATURE)


def _target(name: str, doc: TargetDoc, model_temperature: ModelTemperature) -> Target:
    model, _, adapter = doc.model.partition("+") if doc.location == "edge" else (doc.model, "", "")
    if not isinstance(doc.temperature, UnsetType):
        temperature: float | None = doc.temperature
    else:
        temperature = model_temperature(doc.model) if doc.location == "edge" else None
    clouds = doc.clouds
    target = Target(
        name=name,
        at=doc.location,
        model=model,
        timeout_s=seconds(doc.timeout),
        first_token_timeout_s=seconds(doc.first_token_timeout),
        price=doc.price if doc.price.costs else FREE,
        temperature=temperature,
        adapter=adapter,
        cloud=clouds[0] if clouds else "",
        clouds=clouds if len(clouds) > 1 else (),
    )
    return target if isinstance(doc.can, UnsetType) else msgspec.structs.replace(target, can=doc.can)


def _route(doc: RouteDoc, when: Expression | None, targets: dict[str, Target]) -> Route:
    listed = in_each_cloud([targets[name] for name in used(doc)])
    best_of = None
    if isinstance(doc.use, BestOfDoc):
        best_of = Weights(doc.use.weights.quality, doc.use.weights.usd, doc.use.weights.latency)
    handoff = None
    if not isinstance(doc.handoff, UnsetType):
        handoff = Handoff(doc.handoff.after_tokens, doc.handoff.below, seconds(doc.handoff.within))
    promise = None
    if not isinstance(doc.promise, UnsetType):
        settings = msgspec.structs.asdict(doc.promise)
        promise = Promise(only_where_measured=settings.pop("applies") == "only_where_measured", **settings)
    return Route(doc.name, when, listed, handoff, doc.fusion, doc.wait_for, best_of, promise)


def _shadow(doc: ShadowDoc | UnsetType) -> Shadow | None:
    return None if isinstance(doc, UnsetType) else Shadow(doc.share, doc.usd_per_day, doc.max_drift, doc.refit)


def _cache_rule(doc: CacheDoc, index: int, when: Expression | None) -> CacheRule:
    exact = None
    if not isinstance(doc.exact, UnsetType):
        ttl_s = seconds(doc.exact.ttl) or 0.0
        exact = ExactCache(ttl_s=ttl_s, stale_if_error_s=seconds(doc.exact.stale_if_error) or 0.0)
    name = f"cache[{index}]" if isinstance(doc.name, UnsetType) else doc.name
    semantic = None
    if not isinstance(doc.semantic, UnsetType):
        semantic = SemanticCache(ttl_s=seconds(doc.semantic.ttl) or 0.0, max_error=doc.semantic.max_error)
    return CacheRule(name, when, exact, semantic, doc.allow_sampled, doc.allow_tools)


ModelAdapters = Callable[[str], Sequence[str] | None]
"""A function that returns a device model's adapters by its name; None for no such model, as the engine reports."""


def with_adapters(
    policy: Policy, model_adapters: ModelAdapters, model_temperature: ModelTemperature = lambda _: None
) -> Policy:
    """Return the policy with a target for each LoRA adapter of its edge targets' models.

    Clients name it as `MODEL+ADAPTER`, or `TARGET+ADAPTER`. Only the device knows which adapters its models have.

    Args:
        model_adapters: The adapters of the device, or of the bundle that it will run.
        model_temperature: The temperature of an edge target that declares none.

    Raises:
        PolicyError: An edge target names an adapter that its model does not have.
    """
    adapted = []
    for target in policy.targets:
        known = model_adapters(target.model) if target.at == "edge" else None
        if known is None:
            continue
        if not target.adapter:
            own = target.name in policy.own_temperature
            adapted += [_with_adapter(target, adapter, model_temperature if own else None) for adapter in known]
        elif target.adapter not in known:
            names = ", ".join(known) or "none"
            raise PolicyError(
                f"{target.model} has no adapter `{target.adapter}`. Available: {names}.",
                where=f"targets.{target.name}.model",
            )
    return replace(policy, adapted=tuple(adapted))


def _with_adapter(target: Target, adapter: str, own: ModelTemperature | None) -> Target:
    adapted = msgspec.structs.replace(target, name=f"{target.name}+{adapter}", adapter=adapter)
    return adapted if own is None else msgspec.structs.replace(adapted, temperature=own(adapted.served))
