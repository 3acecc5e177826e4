"""Decisions of a policy as formulas: `decide` and `plan_cache` for all requests, devices and sessions at once.

A decision follows from a few routes: those of the policy, the targets that a client can name, and what a session makes
of them. `decide` itself lists these (`named_route`, `pinned_route`); here each gets a formula of when it applies, and
its targets formulas of the steps (1) to (5) of `decide`. A variant of a target has its place, its cloud and its
abilities, so that what holds for the target holds for the variant, except for shadow requests: an adapter has none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple, TypeVar

import z3

from causeway_server.router.decision.decide import named_route
from causeway_server.router.decision.sessions import counts_prefix, is_pinned, pinned_route
from causeway_server.router.errors import ModelNotFound
from causeway_server.router.policy.compiled import Policy, Route, Rule
from causeway_server.router.policy.signals import TEMPERATURE, signal_spec
from causeway_server.router.prices import FREE
from causeway_server.router.residency import PREFIX, regions_of
from causeway_server.router.types import AUTO, Fusion, Request, Session, Target

from .conditions import Conditions, OutcomeFact, tokens_of
from .facts import DOUBLE, FALSE, NEAREST, PARTS, TRUE, Element, Facts, Formula, Text

NEW: Final = Session()
GONE: Final = Session("~", "", "~")


_Result = TypeVar("_Result")


def _once(make: Callable[..., _Result]) -> Callable[..., _Result]:
    """Return a method that makes each formula once for an outcome."""

    def once(self: Outcome, *given: object) -> _Result:
        found = self.made.get((make, given))
        if found is None:
            found = self.made[make, given] = make(self, *given)
        return found  # type: ignore[return-value]

    return once


class World:
    """The facts of one proof, with the models and sessions of its policies. `policies`: those that are compared."""

    def __init__(self, policies: Sequence[Policy]) -> None:
        regions = {region for policy in policies for one in policy.region_constraints for region in one.regions}
        expressions = [one for policy in policies for one in expressions_of(policy)]
        self.facts = Facts([tokens_of(source) for source in dict.fromkeys(expressions)], regions)
        self.models = (AUTO, *dict.fromkeys(name for policy in policies for name in policy.named if name != AUTO))
        self.sessions = (NEW, GONE, *_sessions(policies))
        names = tuple(f"{one.target}\0{one.cloud}\0{one.model}" for one in self.sessions)
        self.model = self.facts.choice("request.model", self.models)
        self.session = self.facts.choice("session.place", names)
        is_new, _ = self.session.options[0]
        self.facts.rules.append(z3.Not(z3.And(is_new, self.facts.flag("session.tool_result"))))


class _Scenario(NamedTuple):
    """A list of targets, and when it is tried. `chosen`: by the policy, so that a shadow may follow; `pinned`: the
    target that the session holds to its model.
    """

    guard: Formula
    route: Route | None
    chosen: bool
    session: Session
    pinned: str = ""

    @property
    def key(self) -> object:
        """The key of scenarios with the same attempts."""
        route = self.route
        assert route is not None
        left = self.session.target if route.best_of is not None else ""
        promised = "" if route.promise is None else route.name
        return route.targets, route.handoff, route.best_of, route.fusion, self.chosen, left, promised, self.pinned


class Outcome:
    """The formulas of one policy in a world; `facts` are those of `outcome.*`."""

    def __init__(self, world: World, policy: Policy) -> None:
        self._world, self._policy, self._facts = world, policy, world.facts
        self._conditions = Conditions(world.facts, policy.default_temperature)
        self._in_session = self._facts.flag("session") if policy.session is not None else FALSE
        self.error: Formula = FALSE
        self.routes: dict[str, Formula] = {}
        self.made: dict[object, object] = {}
        self._bind()
        self.rules: dict[str, Formula] = {}
        self._tried: dict[Target, list[Formula]] = defaultdict(list)
        self._sums: dict[str, list[Formula]] = defaultdict(list)
        self._first: dict[str, list[Formula]] = defaultdict(list)
        merged: dict[object, _Scenario] = {}
        for one in self._scenarios():
            if one.route is not None:
                self.rules[one.route.name] = z3.Or(self.rules.get(one.route.name, FALSE), one.guard)
                known = merged.get(one.key)
                merged[one.key] = one if known is None else one._replace(guard=z3.Or(known.guard, one.guard))
        for scenario in merged.values():
            self._plan(scenario)
        self.facts = self._outcome()

    # --- (1) ---------------------------------------------------------------------------------------------------------

    def _bind(self) -> None:
        policy, facts = self._policy, self._facts
        self.private = self._any(policy.constraints)
        self.bound = z3.Or(self.private, z3.And(self._in_session, facts.flag("session.on_device")))
        self._parts = {kind: facts.part(kind) for kind in PARTS}
        has_parts = z3.Or(*self._parts.values())
        masks = [rule for rule in policy.guard if rule.action == "mask"]
        kept = self._any(policy.part_constraints)
        if policy.guard_settings.on_failure == "hit":
            kept = z3.Or(kept, self._any(masks))
        self.kept = z3.And(has_parts, kept)
        self.mask = {
            kind: self._any([one for one in masks if kind in one.classes]) for one in masks for kind in one.classes
        }
        self._refuses = self._any([rule for rule in policy.guard if rule.action == "refuse"])
        bindings = [(self._binds(one), one.regions) for one in policy.region_constraints]
        in_region = [tag for tag in facts.tags if tag.startswith(PREFIX)]
        bindings += [(facts.flag(f"tag:{tag}"), regions_of((tag,)) or frozenset()) for tag in in_region]
        free = [
            (facts.bound_by_slot, "slot_region"),
            (z3.And(self._in_session, facts.flag("session.bound")), "session.region"),
        ]
        self.in_regions = z3.Or(*[when for when, _ in bindings], *[when for when, _ in free])
        self.permitted = {
            region: z3.And(
                *[z3.Implies(when, z3.BoolVal(region in allowed)) for when, allowed in bindings],
                *[z3.Implies(when, facts.flag(f"{name}:{region}")) for when, name in free],
            )
            for region in facts.regions
        }

    def _binds(self, rule: Rule) -> Formula:
        return self._conditions.truth(rule.when).binds

    def _any(self, rules: Iterable[Rule]) -> Formula:
        return z3.Or(FALSE, *[self._binds(rule) for rule in rules])

    def region(self, cloud: str) -> Text:
        """Return the region of a cloud; "" for none. `cloud`: "" is the device's first."""
        return self._facts.choice(f"region:{cloud}", ("", *self._facts.regions))

    # --- (2) ---------------------------------------------------------------------------------------------------------

    def _scenarios(self) -> Iterable[_Scenario]:
        policy, world = self._policy, self._world
        named: dict[tuple[Target, ...], tuple[Formula, Route]] = {}
        plain, refused = FALSE, FALSE
        for guard, model in world.model.options:
            try:
                route = named_route(policy, Request(kind="chat", model=model))
            except ModelNotFound:
                refused = z3.Or(refused, guard)
                continue
            if route is None:
                plain = z3.Or(plain, guard)
            else:
                known = named.get(route.targets)
                named[route.targets] = (guard if known is None else z3.Or(known[0], guard), route)
        self.error = refused
        base: list[tuple[Formula, Route | None, bool]] = [(guard, route, False) for guard, route in named.values()]
        before = plain
        for route in policy.routes:
            holds = self._conditions.truth(route.when).holds
            self.routes[route.name] = z3.And(before, holds)
            base.append((self.routes[route.name], route, True))
            before = z3.And(before, z3.Not(holds))
        base.append((before, None, True))
        for guard, found, chosen in base:
            yield _Scenario(z3.And(guard, z3.Not(self._in_session)), found, chosen, NEW)
            if policy.session is not None:
                yield from self._in_sessions(z3.And(guard, self._in_session), found, chosen)

    def _in_sessions(self, guard: Formula, route: Route | None, chosen: bool) -> Iterable[_Scenario]:
        brings = self._facts.flag("session.tool_result")
        for (is_place, _), session in zip(self._world.session.options, self._world.sessions, strict=True):
            for tool_result in (False, True) if session.target else (False,):
                state = Session(session.target, session.cloud, session.model, tool_result=tool_result)
                found, _ = pinned_route(self._policy, state, route, None if chosen else route, [])
                applies = brings if tool_result else z3.Not(brings)
                held = is_pinned(self._policy, state) and found is not None and found.targets
                pinned = next((one.name for one in held or () if self._is_held(one, state)), "")
                yield _Scenario(z3.And(guard, is_place, applies), found, chosen and not tool_result, state, pinned)

    # --- (3) to (5) --------------------------------------------------------------------------------------------------

    def _plan(self, scenario: _Scenario) -> None:
        route = scenario.route
        assert route is not None
        _, bound = self._read(route.fusion)
        targets = route.targets
        if not targets:
            return
        guard = z3.And(scenario.guard, z3.Not(self._refuses))
        may = [z3.And(guard, self._allowed(one, route.fusion)) for one in targets]
        before, shadow = self._order(scenario, route, may), FALSE
        if self._policy.shadow is not None and scenario.chosen:
            shadow = self._shadow(targets, may, scenario.pinned)
            self._sums["shadow"].append(shadow)
        unmeasured = FALSE
        if route.promise is not None and not route.promise.only_where_measured:
            unmeasured = z3.Not(z3.And(shadow, self._facts.flag(f"promises:{route.name}")))
            for a, b in before:
                cloud_first = self._sooner(targets[a], targets[b], z3.BoolVal(targets[a].at == "cloud"), False)
                if targets[a].at != targets[b].at:
                    before[a, b] = z3.If(unmeasured, cloud_first, before[a, b])
        for at, target in enumerate(targets):
            self._tried[target].append(may[at])
            later = [z3.And(may[other], before[at, other]) for other in range(len(targets)) if other != at]
            sooner = [z3.And(may[other], before[other, at]) for other in range(len(targets)) if other != at]
            self._first[target.name].append(z3.And(may[at], *map(z3.Not, sooner)))
            if target.at == "cloud":
                self._sums["parts_leave"].append(z3.And(may[at], self._raw(target, route.fusion)))
            elif route.handoff is not None:
                others = [other for other in range(len(targets)) if other != at]
                up = [z3.And(one, z3.Not(self._down(targets[n].key))) for one, n in zip(later, others, strict=True)]
                free = z3.And(z3.Not(bound), z3.Not(self._prefers("only_on_device")))
                self._sums["handoff"].append(z3.And(may[at], free, z3.Not(unmeasured), z3.Or(FALSE, *up)))

    @_once
    def _read(self, fusion: Fusion) -> tuple[dict[str, Formula], Formula]:
        """Return which parts reach targets as text, and whether the request is bound, as its parts may not be read."""
        read = {kind: self._facts.flag(f"encoders:{kind}") if fusion != "early" else FALSE for kind in PARTS}
        unread = z3.Or(*[z3.And(self._parts[kind], z3.Not(read[kind])) for kind in PARTS])
        return read, z3.Or(self.bound, z3.And(self.kept, unread))

    def _raw(self, target: Target, fusion: Fusion) -> Formula:
        """Return whether a target would get parts as they are."""
        read, _ = self._read(fusion)
        as_text = {kind: z3.And(read[kind], self.kept if kind in target.can else TRUE) for kind in PARTS}
        return z3.Or(*[z3.And(self._parts[kind], z3.Not(as_text[kind])) for kind in PARTS])

    def _down(self, name: str) -> Formula:
        return self._facts.flag(f"down:{name}")

    @_once
    def _prefers(self, prefer: str) -> Formula:
        found = self._facts.text(signal_spec("request.prefer"))
        return next(condition for condition, text in found.options if text == prefer)

    @_once
    def _flag(self, name: str) -> Formula:
        return self._facts.boolean(signal_spec(name))[0]

    @_once
    def _allowed(self, target: Target, fusion: Fusion) -> Formula:
        """Return whether a target may answer; (3) of `decide`."""
        facts, away, (read, bound) = self._facts, target.at == "cloud", self._read(fusion)
        barred = [facts.flag(f"absent:{target.key if target.clouds else target.name}")]
        barred.append(self._prefers("only_on_device" if away else "only_cloud"))
        if away:
            inside = [z3.And(is_in, self.permitted[name]) for is_in, name in self.region(target.cloud).options if name]
            barred += [bound, z3.And(self.in_regions, z3.Not(z3.Or(*inside)))]
        needs: list[tuple[str, Formula]] = [(kind, facts.is_kind(kind)) for kind in ("chat", "completion", "embedding")]
        needs += [("tools", self._flag("request.tools")), ("json", self._flag("request.json"))]
        needs += [("logprobs", facts.flag("logprobs")), *self._parts.items()]
        for ability, needed in needs:
            if ability in read and ability not in target.can:
                soft = facts.flag(f"projectors:{target.model}:{ability}")
                found = z3.Or(read[ability], soft if not away and fusion != "late" else FALSE)
                barred.append(z3.And(needed, z3.Not(found)))
            elif ability not in target.can:
                barred.append(needed)
        return z3.Not(z3.Or(*barred))

    def _order(self, scenario: _Scenario, route: Route, may: list[Formula]) -> dict[tuple[int, int], Formula]:
        """Return for each two targets whether the first one is tried before the second; (4) of `decide`."""
        targets = route.targets
        ranked = self._ranked(scenario, route, may) if route.best_of is not None else {}
        found = {}
        for a in range(len(targets)):
            for b in range(a + 1, len(targets)):
                found[a, b] = self._sooner(targets[a], targets[b], ranked.get((a, b), TRUE))
                found[b, a] = z3.Not(found[a, b])
        return found

    @_once
    def _sooner(self, first: Target, second: Target, listed: Formula, hinted: bool = True) -> Formula:
        if hinted and first.at != second.at:
            prefer = [self._prefers(one) for one in ("prefer_cloud", "prefer_on_device")]
            favoured, other = prefer if first.at == "cloud" else prefer[::-1]
            listed = z3.And(z3.Or(listed, favoured), z3.Not(other))
        down = [z3.Or(self._down(one.key), self._down(one.name)) for one in (first, second)]
        return z3.If(down[0] == down[1], listed, down[1])

    def _ranked(self, scenario: _Scenario, route: Route, may: list[Formula]) -> dict[tuple[int, int], Formula]:
        """Return the order by score, as `candidates.ranked` calculates it; a price is a fact of its own."""
        facts, weights, session = self._facts, route.best_of, scenario.session
        assert weights is not None
        counts = counts_prefix(self._policy)
        left = z3.Or(FALSE, *[ok for ok, one in zip(may, route.targets, strict=True) if one.name == session.target])
        fastest, measured = z3.FPVal(0.0, DOUBLE), FALSE
        latency, quality, unknown = [], [], []
        for ok, one in zip(may, route.targets, strict=True):
            name = f"{one.at}:{one.served}"
            known, value = facts.flag(f"latency:{name}?"), facts.double(f"latency:{name}")
            latency.append((known, value))
            fastest = z3.If(z3.And(ok, known, z3.Or(z3.Not(measured), value < fastest)), value, fastest)
            measured = z3.Or(measured, z3.And(ok, known))
            has_quality = facts.flag(f"quality:{name}?")
            unknown.append(z3.And(ok, z3.Not(has_quality)))
            quality.append(z3.If(has_quality, facts.double(f"quality:{name}", 0.0, 1.0), z3.FPVal(0.0, DOUBLE)))
        scores = []
        for one, (known, value), good in zip(route.targets, latency, quality, strict=True):
            usd = facts.double(f"usd:{one.name}") if counts or one.price is not FREE else z3.FPVal(0.0, DOUBLE)
            if counts:
                usd = z3.If(left, facts.double(f"usd:{one.name}:left"), usd)
            terms = (weights.quality, good), (weights.usd, usd), (weights.latency, z3.If(known, value, fastest))
            first, second, third = (z3.fpMul(NEAREST, z3.FPVal(weight, DOUBLE), term) for weight, term in terms)
            scores.append(z3.fpSub(NEAREST, z3.fpSub(NEAREST, first, second), third))
        stays = z3.Or(*unknown) if weights.quality else FALSE
        size = len(route.targets)
        return {(a, b): z3.Or(stays, scores[a] >= scores[b]) for a in range(size) for b in range(a + 1, size)}

    def _shadow(self, targets: Sequence[Target], may: Sequence[Formula], pinned: str) -> Formula:
        """Return whether a shadow request may follow; `plan_shadow`."""
        facts = self._facts
        sides = [
            z3.Or(FALSE, *[ok for ok, one in zip(may, targets, strict=True) if one.at == at])
            for at in ("edge", "cloud")
        ]
        barred = [self.bound, self.kept, self.in_regions, *self.mask.values(), *self._parts.values()]
        barred += [facts.is_kind("embedding"), self._flag("request.tools")]
        one_answer = z3.And(facts.number(signal_spec("request.n"), 0.0).value == 1, facts.integer("prompts", 0, 8) <= 1)
        each = zip(may, targets, strict=True)
        adapted = [z3.And(ok, self._adapted(one, is_pinned=one.name == pinned)) for ok, one in each]
        return z3.And(*sides, one_answer, z3.Not(z3.Or(*barred, *adapted)))

    def _is_held(self, target: Target, session: Session) -> bool:
        return (target.name, target.served) == (session.target, session.model) and self._other(target) is not None

    def _adapted(self, target: Target, *, is_pinned: bool) -> Formula:
        """Return whether an adapter answers: that of the target, or of a variant."""
        if is_pinned or (other := self._other(target)) is None:
            return z3.BoolVal(bool(target.adapter))
        answers = self._facts.flag(f"variants:{target.name}:{other}")
        return z3.Not(answers) if target.adapter else answers

    def _other(self, target: Target) -> str | None:
        """Return the variant that has an adapter where its target has none, or none where it has one."""
        place = self._policy.places.get(target.name)
        variants = () if target.at != "edge" or place is None else place.variants
        return next((one.model for one in variants if ("+" in one.model) != bool(target.adapter)), None)

    # --- the outcome -------------------------------------------------------------------------------------------------

    def _outcome(self) -> dict[str, OutcomeFact]:
        used = [(target, z3.Or(*tried)) for target, tried in self._tried.items()]
        away = [(one, tried) for one, tried in used if one.at == "cloud"]
        names = dict.fromkeys(one.name for one, _ in used)
        cached, refused = self._cached(), z3.And(self._refuses, z3.Not(self.error))
        first = [(z3.Or(*conditions), name) for name, conditions in self._first.items()]
        none = z3.Not(z3.Or(FALSE, *[tried for _, tried in used]))
        rules = [(condition, name) for name, condition in self.rules.items() if name]
        unruled = z3.Not(z3.Or(FALSE, *[condition for condition, _ in rules]))
        regions = {
            region: z3.Or(
                FALSE,
                *[
                    z3.And(tried, is_in)
                    for one, tried in away
                    for is_in, name in self.region(one.cloud).options
                    if name == region
                ],
            )
            for region in ("", *self._facts.regions)
        }
        return {
            "outcome.leaves": z3.Or(FALSE, *[tried for _, tried in away]),
            "outcome.parts_leave": z3.Or(FALSE, *self._sums["parts_leave"]),
            "outcome.edge": z3.Or(FALSE, *[tried for one, tried in used if one.at == "edge"]),
            "outcome.targets": [
                Element("", name, z3.Or(*[t for one, t in used if one.name == name])) for name in names
            ],
            "outcome.first": Text("outcome.first", ((none, ""), *first), FALSE),
            "outcome.regions": [Element("", region, present) for region, present in regions.items()],
            "outcome.route": Text("outcome.route", ((unruled, ""), *rules), FALSE),
            "outcome.handoff": z3.Or(FALSE, *self._sums["handoff"]),
            "outcome.shadow": z3.Or(FALSE, *self._sums["shadow"]),
            "outcome.cached": cached,
            "outcome.shared": z3.And(cached, z3.Not(z3.Or(self.private, self.bound))),
            "outcome.refused": refused,
            "outcome.mask": [Element("", kind, z3.And(held, z3.Not(self.error))) for kind, held in self.mask.items()],
        }

    def _cached(self) -> Formula:
        """Return whether the cache is used; `plan_cache`."""
        facts, policy = self._facts, self._policy
        n = facts.number(signal_spec("request.n"), 0.0).value
        temperature = facts.number(signal_spec(TEMPERATURE), policy.default_temperature).value
        hot = z3.Not(z3.fpEQ(temperature, z3.FPVal(0.0, DOUBLE)))
        sampled = z3.And(z3.Not(facts.is_kind("embedding")), z3.Or(hot, n > 1))
        found, before = FALSE, TRUE
        self.cache_rules: dict[str, Formula] = {}
        for rule in policy.cache:
            holds = self._conditions.truth(rule.when).holds
            reached = self.cache_rules[rule.name] = z3.And(before, holds)
            before = z3.And(before, z3.Not(holds))
            if rule.exact is not None:
                barred = [] if rule.allow_sampled else [sampled]
                barred += [] if rule.allow_tools else [facts.flag("offers_tools")]
                found = z3.Or(found, z3.And(reached, z3.Not(z3.Or(FALSE, *barred))))
        return z3.And(found, z3.Not(self._refuses), z3.Not(self.error))


def _each_target(policy: Policy) -> Iterable[Target]:
    return [one for target in policy.offered for one in target.in_each_cloud]


def expressions_of(policy: Policy) -> Iterable[str]:
    """Yield the source of each condition of a policy, those of its claims included."""
    rules: tuple[Rule, ...] = (*policy.constraints, *policy.part_constraints, *policy.region_constraints)
    for rule in (*rules, *policy.guard, *policy.routes, *policy.cache):
        yield from () if rule.when is None else (rule.when.source,)
    for claim in policy.claims:
        yield from (one.source for one in (claim.when, claim.holds) if one is not None)


def _sessions(policies: Sequence[Policy]) -> Iterable[Session]:
    """Return the states of a session, as far as they differ in the target of its last turn."""
    found: dict[tuple[str, str, str], Session] = {}
    for policy in policies:
        if policy.session is None:
            continue
        for target in _each_target(policy):
            place = policy.places.get(target.name)
            for model in (target.served, *(() if place is None else [one.model for one in place.variants])):
                found[target.name, target.cloud, model] = Session(target.name, target.cloud, model)
    return found.values()
