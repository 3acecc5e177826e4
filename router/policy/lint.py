"""Semantic checks of a policy: the mistakes that a well-formed file can still contain.

An error is a rule or key that can never have an effect. A warning is one that is allowed but probably not intended.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec
from msgspec import UnsetType

from ..documents.reader import KeyLocations, did_you_mean
from ..documents.strict_yaml import Problem
from ..residency import MAX_TAG, PREFIX, region_tags
from ..types import AUTO
from ..variants.settings import TrialConfig
from .cel_source import Token, macro_signals, measures_text, rewrite, scan, split, unbracketed
from .expression import changed_tag_literals, is_constant
from .file import BestOfDoc, PolicyDoc, RouteDoc, TargetDoc, rules, seconds, used
from .signals import OF_TEXT, TEMPERATURE, Expression, SignalSpec, is_reserved, signal_spec

_CLOSED: Final = ("constraints", "guard")  # rules that apply if their condition cannot be evaluated
_ADAPTED = re.compile(r"[^+]+\+[a-z0-9][a-z0-9._-]{0,63}")
Conditions = Mapping[str, Expression]
"""The compiled conditions by path (``routes[0].when``)."""


def check_meaning(
    doc: PolicyDoc, locations: KeyLocations, conditions: Conditions, readable: frozenset[str] | None = None
) -> list[Problem]:
    """Return all errors and warnings of a policy. `readable`: signals that its devices can read; None if unknown."""
    checks = _Checks(doc, locations, conditions)
    return [
        *checks.targets(),
        *checks.uses(),
        *checks.handoffs(),
        *checks.promises(),
        *checks.weights(),
        *checks.budget(),
        *checks.fusions(),
        *checks.names(),
        *checks.reach(),
        *checks.constraints(),
        *checks.guard(),
        *checks.lifetimes(),
        *checks.money(),
        *checks.shadows(),
        *checks.sessions(),
        *checks.absent_signals(readable),
        *checks.library(),
        *checks.contradictions(),
        *checks.upper_case_tags(),
        *checks.unreadable(readable),
    ]


class _Checks:
    def __init__(self, doc: PolicyDoc, locations: KeyLocations, conditions: Conditions) -> None:
        self.doc = doc
        self.locations = locations
        self.conditions = conditions

    def targets(self) -> Iterator[Problem]:
        named = {name for route in self.doc.routes for name in used(route)}
        for name, target in self.doc.targets.items():
            path = f"targets.{name}"
            if name == AUTO:
                yield self.error(path, f"`{AUTO}` is reserved: a client sends it to let the policy choose")
            elif name not in named:
                yield self.warning(path, "no route uses this target: only a client that names it reaches it")
            if target.model in self.doc.targets and target.model != name:
                yield self.warning(
                    f"{path}.model", f"`{target.model}` is also the name of another target, which takes precedence"
                )
            if target.location == "edge" and "+" in target.model and not _ADAPTED.fullmatch(target.model):
                yield self.error(f"{path}.model", f"`{target.model}`: write MODEL, or MODEL+ADAPTER with one adapter")
            for cloud in target.clouds:
                if is_reserved(cloud):
                    yield self.error(f"{path}.at", f"`{cloud}` is reserved: `cloud.{cloud}` is a signal")
            if len(set(target.clouds)) < len(target.clouds):
                yield self.error(f"{path}.at", "lists a cloud twice")
            yield from self._times(path, target)
            yield from self._variants(path, target)

    def _times(self, path: str, target: TargetDoc) -> Iterator[Problem]:
        whole, first = seconds(target.timeout), seconds(target.first_token_timeout)
        for key, value in (("timeout", whole), ("first_token_timeout", first)):
            if value == 0.0:
                yield self.error(f"{path}.{key}", "must be more than 0")
        if whole is not None and first is not None and first > whole:
            yield self.error(f"{path}.first_token_timeout", "is longer than `timeout`, so it has no effect")

    def _variants(self, path: str, target: TargetDoc) -> Iterator[Problem]:
        seen = {target.model}
        for index, variant in enumerate(target.variants):
            if variant.model in seen:
                where = f"{path}.variants[{index}].model"
                yield self.error(where, f"`{variant.model}` is already the target's own model or another variant")
            seen.add(variant.model)
        if target.trial != TrialConfig() and not target.variants:
            yield self.error(f"{path}.trial", "has no effect without `variants`")

    def uses(self) -> Iterator[Problem]:
        for index, route in enumerate(self.doc.routes):
            key = "use.best_of" if isinstance(route.use, BestOfDoc) else "use"
            for at, name in enumerate(used(route)):
                path = f"routes[{index}].{key}[{at}]"
                if name not in self.doc.targets:
                    near = did_you_mean(name, self.doc.targets) or f"; known: {', '.join(self.doc.targets)}"
                    yield self.error(path, f"unknown target `{name}`{near}")
                elif name in used(route)[:at]:
                    yield self.error(path, f"`{name}` is already in this list")

    def handoffs(self) -> Iterator[Problem]:
        for index, route in enumerate(self.doc.routes):
            sides = self._sides(route)
            if isinstance(route.handoff, UnsetType) or "?" in sides:
                continue
            path = f"routes[{index}].handoff"
            if "edge" not in sides:
                yield self.error(path, "only an edge target reports its confidence, and `use` has none")
            elif sides.index("edge") == len(sides) - 1 and not isinstance(route.use, BestOfDoc):
                name = used(route)[sides.index("edge")]
                yield self.error(path, f"no target can take over from `{name}`: it is the last in `use`")

    def promises(self) -> Iterator[Problem]:
        for index, route in enumerate(self.doc.routes):
            if isinstance(route.promise, UnsetType):
                continue
            path, of = f"routes[{index}].promise", route.promise.of
            if isinstance(route.handoff, UnsetType):
                yield self.error(path, "needs `handoff` in its route: its threshold is what the device moves")
            if isinstance(self.doc.shadow, UnsetType):
                yield self.error(path, "needs `shadow` in the policy, whose budget pays for the labels")
            if of not in used(route) or of not in self.doc.targets or self.doc.targets[of].location != "cloud":
                yield self.error(f"{path}.of", f"`{of}` is not a cloud target of this route's `use`")
            elif "cloud" in self._sides(route)[: used(route).index(of)]:
                yield self.error(f"{path}.of", f"a cloud target precedes `{of}` in `use`, and is compared instead")

    def weights(self) -> Iterator[Problem]:
        for index, route in enumerate(self.doc.routes):
            if not isinstance(route.use, BestOfDoc):
                continue
            weights, path = route.use.weights, f"routes[{index}].use.weights"
            if not (weights.quality or weights.usd or weights.latency):
                yield self.error(path, "are all 0: every target has the same score, so list them without `best_of`")
            known = [self.doc.targets[name] for name in used(route) if name in self.doc.targets]
            if weights.usd and not any(target.price.costs for target in known):
                yield self.warning(f"{path}.usd", "has no effect: no target of the list has a `price`")

    def fusions(self) -> Iterator[Problem]:
        text = next((name for one in self.conditions.values() for name in OF_TEXT if name in one.signals), "")
        for index, route in enumerate(self.doc.routes):
            if route.fusion != "late" and not {"edge", "?"} & set(self._sides(route)):
                yield self.error(
                    f"routes[{index}].fusion",
                    f"`{route.fusion}`: only a model on the device takes soft tokens, and `use` has no edge target",
                )
            if route.wait_for == "first" and text:
                yield self.warning(
                    f"routes[{index}].wait_for",
                    f"has no effect: {text} is that of the text of all parts, so that all are waited for",
                )

    def names(self) -> Iterator[Problem]:
        for part, listed in {**rules(self.doc), "claims": self.doc.claims}.items():
            seen: set[str] = set()
            for index, rule in enumerate(listed):
                if isinstance(rule.name, UnsetType):
                    continue
                if rule.name in seen:
                    yield self.error(f"{part}[{index}].name", f"the name `{rule.name}` is used by an earlier rule")
                seen.add(rule.name)

    def reach(self) -> Iterator[Problem]:
        """Find rules after one that always holds, and rules that never hold."""
        for part in ("routes", "cache"):
            always = ""
            for index, rule in enumerate(rules(self.doc)[part]):
                path = f"{part}[{index}]"
                name = path if isinstance(rule.name, UnsetType) else rule.name
                if always:
                    yield self.error(path, f"is never reached: `{always}` before it always holds")
                elif self._constant(path) is False:
                    yield self.error(f"{path}.when", "is always false: the rule never holds")
                if not always and self._constant(path):
                    always = name
            if part == "routes" and not always:
                yield self.warning("routes", "every route has a `when`: if none holds, the answer is an error 503")

    def constraints(self) -> Iterator[Problem]:
        for index, constraint in enumerate(self.doc.constraints):
            constant = self._constant(f"constraints[{index}]")
            if constant is False:
                yield self.error(f"constraints[{index}].when", "is always false: the constraint never binds")
                continue
            yield from self._regions(index)
            if constraint.keep != "on_device":
                continue
            for at, route in enumerate(self.doc.routes):
                if set(self._sides(route)) == {"cloud"}:
                    bound = "every request" if constant else "a request"
                    yield self.warning(
                        f"routes[{at}].use", f"has no edge target: {bound} bound by `{constraint.name}` fails here"
                    )

    def guard(self) -> Iterator[Problem]:
        for index, rule in enumerate(self.doc.guard.rules):
            path = f"guard.rules[{index}]"
            if self._constant(path) is False:
                yield self.error(f"{path}.when", "is always false: the rule never applies")
            if rule.classes and rule.action != "mask":
                yield self.error(f"{path}.classes", "has no effect without `action: mask`")
            if rule.action == "refuse" and self._constant(path):
                yield self.warning(path, "refuses every request: it has no condition that may not hold")

    def _regions(self, index: int) -> Iterator[Problem]:
        """Find a constraint whose regions have no effect, or that no cloud can satisfy."""
        constraint, path = self.doc.constraints[index], f"constraints[{index}].regions"
        if constraint.keep != "in_region":
            if constraint.regions:
                yield self.error(path, "has no effect without `keep: in_region`")
            return
        if not constraint.regions:
            yield self.error(f"constraints[{index}]", "needs `regions` for `keep: in_region`: no cloud could answer")
        if len("".join(region_tags(constraint.regions))) > MAX_TAG:
            yield self.error(
                path, f"are too long together: at most {MAX_TAG - len(PREFIX)} characters, joined with `+`"
            )
        for at, earlier in enumerate(self.doc.constraints[:index]):
            always = self._constant(f"constraints[{at}]") and self._constant(f"constraints[{index}]")
            if always and earlier.keep == "in_region" and set(earlier.regions).isdisjoint(constraint.regions):
                yield self.error(
                    path, f"has no region in common with `{earlier.name}`, which always binds, too: no cloud can answer"
                )

    def lifetimes(self) -> Iterator[Problem]:
        for index, rule in enumerate(self.doc.cache):
            if not isinstance(rule.exact, UnsetType) and seconds(rule.exact.ttl) == 0.0:
                yield self.error(f"cache[{index}].exact.ttl", "must be more than 0; without `exact`, nothing is cached")
            if isinstance(rule.semantic, UnsetType):
                continue
            path, ttl_s = f"cache[{index}].semantic", seconds(rule.semantic.ttl) or 0.0
            if isinstance(rule.exact, UnsetType):
                yield self.error(path, "needs `exact` in the same rule: it shares the answers that `exact` stores")
            elif ttl_s == 0.0:
                yield self.error(f"{path}.ttl", "must be more than 0; leave `semantic` out to turn it off")
            elif ttl_s > (seconds(rule.exact.ttl) or 0.0):
                yield self.error(f"{path}.ttl", "is longer than `exact.ttl`: no answer is used for so long")
            if rule.allow_sampled:
                yield self.warning(path, "shares sampled answers between different questions (`allow_sampled`)")

    def money(self) -> Iterator[Problem]:
        priced = [name for name, target in self.doc.targets.items() if target.price.costs]
        for name in priced:
            if self.doc.targets[name].location == "edge":
                yield self.warning(f"targets.{name}.price", "an edge target has no price per token")
        for name, target in self.doc.targets.items():
            if target.price.problem:
                yield self.error(f"targets.{name}.price", target.price.problem)
        for path, expression in self.conditions.items():
            if not priced and any(signal.startswith("spend.") for signal in expression.signals):
                yield self.warning(path, "spend.* stays 0: no target has a `price`")

    def shadows(self) -> Iterator[Problem]:
        if isinstance(self.doc.shadow, UnsetType):
            return
        if not any({"edge", "cloud"} <= set(self._sides(route)) for route in self.doc.routes):
            yield self.error("shadow", "no route's `use` has an edge target and a cloud target: none can be compared")
        always = [
            rule.name
            for at, rule in enumerate(self.doc.constraints)
            if rule.keep in ("on_device", "in_region") and self._constant(f"constraints[{at}]")
        ]
        if always:
            yield self.error(
                "shadow", f"`{always[0]}` binds every request to the device or to regions: no shadow request is sent"
            )
        free = [
            name for name, target in self.doc.targets.items() if target.location == "cloud" and not target.price.costs
        ]
        if free:
            yield self.warning("shadow", f"`usd_per_day` bounds nothing where `{free[0]}` answers: it has no `price`")

    def sessions(self) -> Iterator[Problem]:
        session, path = self.doc.session, "session.switch_cost"
        if isinstance(session, UnsetType) or session.switch_cost == "none":
            return
        compared = [route.use.weights for route in self.doc.routes if isinstance(route.use, BestOfDoc)]
        if not compared:
            yield self.error(path, "has no effect without a route with `best_of`: only such a route compares prices")
        elif session.pin == "conversation":
            yield self.error(path, "has no effect with `pin: conversation`, which leaves no target for its price")
        elif not any(weights.usd for weights in compared):
            yield self.warning(path, "has no effect: `weights.usd` is 0 in every `best_of`")

    def budget(self) -> Iterator[Problem]:
        budget, routes = self.doc.budget, self.doc.routes
        if isinstance(budget, UnsetType):
            return
        weighed = any(isinstance(route.use, BestOfDoc) for route in routes)
        paces = budget.battery or budget.heat
        if not (budget.usd_per_day or paces):
            yield self.error("budget", "bounds nothing: set `usd_per_day`, `battery` or `heat`")
        elif budget.usd_per_day and not any(target.price.costs for target in self.doc.targets.values()):
            yield self.error("budget", "has no effect: no target has a `price`")
        elif budget.usd_per_day and not weighed:
            yield self.warning("budget", "only stops: without a route with `best_of` no answer is weighed by its price")
        if budget.battery and budget.battery.since == budget.battery.until:
            yield self.error("budget.battery.until", "is also the time of `since`: no hours are between them")
        if paces and not weighed and not any(route.handoff for route in routes):
            yield self.warning("budget", "only stops: nothing takes the device's work without `best_of` or `handoff`")

    def contradictions(self) -> Iterator[Problem]:
        """Find rules whose comparisons exclude each other, or lie outside a signal's range."""
        for path, expression in self.conditions.items():
            if expression.signals and (reason := contradiction(expression.source)):
                effect = "the constraint never binds" if path.startswith(_CLOSED) else "the rule never holds"
                yield self.warning(path, f"{effect}: {reason}")

    def upper_case_tags(self) -> Iterator[Problem]:
        for path, expression in self.conditions.items():
            for written, compared in changed_tag_literals(expression.source):
                yield self.warning(path, f"tags are compared in lower case: {written} means {compared}, write that")

    def unreadable(self, readable: frozenset[str] | None) -> Iterator[Problem]:
        """Find device signals that none of a known set of devices can read."""
        for path, expression in self.conditions.items() if readable is not None else ():
            for name in sorted(expression.signals - (readable or frozenset())):
                if name.partition(".")[0] not in ("device", "edge", "cloud"):
                    continue  # signals of the request, the time and the spending are readable anywhere
                effect = ""
                if name in expression.needed:
                    effect = ": it always binds" if path.startswith(_CLOSED) else ": the rule never holds"
                yield self.warning(path, f"no device can read {name}{effect}")

    def absent_signals(self, readable: frozenset[str] | None) -> Iterator[Problem]:
        """Find rules that do not hold without a signal, except constraints, which then apply, and rules with `has`."""
        for path, expression in self.conditions.items():
            for name in sorted(expression.needed - expression.presences):
                if readable is not None and name.startswith(("device.", "edge.", "cloud.")):
                    continue  # known to be readable, or reported as unreadable
                if not path.startswith(_CLOSED) and (lack := self._lack(name)):
                    yield self.warning(
                        path,
                        f"does not hold where {name} is absent ({lack}); write `!has({name}) || …` if it should, "
                        f"`has({name}) && …` if not",
                    )

    def library(self) -> Iterator[Problem]:
        """Find conditions in which the CEL library deviates from the language definition."""
        for path, expression in self.conditions.items():
            tokens, _, _ = rewrite(scan(expression.source))
            for name in sorted(macro_signals(tokens) - expression.presences):
                if lack := self._lack(name):
                    yield self.warning(
                        path,
                        f"fails where {name} is absent ({lack}), also where another element would decide: take it out "
                        f"of the list's condition, or write `has({name}) && …` before it",
                    )
            if measures_text(tokens):
                yield self.warning(path, "size() of a text counts the bytes of its UTF-8, not characters: é counts 2")

    def _lack(self, name: str) -> str:
        """Return why a signal is likely to be absent; "" if it is usually present."""
        spec = signal_spec(name)
        if spec.optional:
            return spec.absent
        side = "edge" if name == "request.prompt_tokens" else name.partition(".")[0]
        present = {target.location for target in self.doc.targets.values()}
        return f"no target is `at: {side}`" if side in ("edge", "cloud") and side not in present else ""

    def _constant(self, path: str) -> bool | None:
        """Return whether a rule always or never holds; None if that depends on signals, or the condition is invalid."""
        if path + ".when" not in self.locations.by_path:
            return True
        expression = self.conditions.get(path + ".when")
        return None if expression is None else is_constant(expression)

    def _sides(self, route: RouteDoc) -> list[str]:
        """Return `edge` or `cloud` for each target in `use`; ``?`` for an unknown one."""
        return [self.doc.targets[name].location if name in self.doc.targets else "?" for name in used(route)]

    def error(self, path: str, message: str) -> Problem:
        return Problem(self.locations.find(path), message)

    def warning(self, path: str, message: str) -> Problem:
        return Problem(self.locations.find(path), message, "warning")


_RANGE: Final = re.compile(r"(\d+)\.\.(\d+)")
_NOT_NEGATIVE: Final = frozenset({"tokens", "ms", "MB", "W", "tokens/s", "USD", "requests", "s", "pixels", "values"})
_RANGES: Final[Mapping[str, tuple[float, float]]] = {"request.n": (1.0, math.inf), TEMPERATURE: (0.0, 2.0)}
_MIRRORED: Final = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "=="}


class _Comparison(msgspec.Struct, frozen=True):
    signal: SignalSpec
    sign: str
    value: float | str | bool
    written: str


def contradiction(source: str) -> str:
    """Return why a valid condition can never hold (bounds outside a signal's range, or bounds that exclude each other);
    "" if it may hold. Only certain contradictions are reported: comparisons of a signal with a literal, joined by `&&`
    and `||`.
    """
    tokens, _, _ = rewrite(scan(source))
    return _never(tokens, source)


def _never(tokens: list[Token], source: str) -> str:
    tokens = unbracketed(tokens)
    if split(tokens, {"?", ":"}):
        return ""
    if alternatives := split(tokens, {"||"}):
        reasons = [_never(part, source) for part in alternatives]
        return "; ".join(reasons) if all(reasons) else ""
    parts = list(_conjuncts(tokens))
    for part in parts:
        if split(part, {"||"}) and (reason := _never(part, source)):
            return reason
    return _excluded([found for part in parts if (found := _comparison(part, source)) is not None])


def _conjuncts(tokens: list[Token]) -> Iterator[list[Token]]:
    tokens = unbracketed(tokens)
    pieces = [] if split(tokens, {"?", ":"}) or split(tokens, {"||"}) else split(tokens, {"&&"})
    if not pieces:
        yield tokens
    for piece in pieces:
        yield from _conjuncts(piece)


def _comparison(tokens: list[Token], source: str) -> _Comparison | None:
    """Return the comparison of a signal with a literal; None for anything else."""
    written = source[tokens[0].offset : tokens[-1].end] if tokens else ""
    negated = len(tokens) == 2 and tokens[0].text == "!"
    if (len(tokens) == 1 or negated) and (spec := tokens[-1].signal) is not None:
        known = "has " if tokens[-1].presence else ""
        if spec.type == "bool" or known:
            return _Comparison(spec, f"{known}is", not negated, written)
    if len(tokens) < 3 or any(token.presence for token in tokens):
        return None
    first, last = tokens[0].signal, tokens[-1].signal
    if first is not None:
        spec, sign, literal = first, tokens[1].text, tokens[2:]
    elif last is not None:
        spec, sign, literal = last, _MIRRORED.get(tokens[-2].text, ""), tokens[:-2]
    else:
        return None
    value = _literal(literal)
    return None if value is None or sign not in _MIRRORED else _Comparison(spec, sign, value, written)


def _literal(tokens: list[Token]) -> float | str | None:
    text = "".join(token.text for token in tokens)
    if len(tokens) == 1 and tokens[0].kind == "string" and text[0] in "\"'" and "\\" not in text:
        return text[1:-1]
    try:
        return float(text) if tokens[-1].kind == "number" and len(tokens) <= 2 else None
    except ValueError:
        return None


def _excluded(comparisons: list[_Comparison]) -> str:
    """Return which comparisons contradict each other or the range of their signal; "" if all can hold."""
    by_signal: dict[str, list[_Comparison]] = {}
    for one in comparisons:
        by_signal.setdefault(one.signal.name, []).append(one)
    return next((reason for found in by_signal.values() if (reason := _conflict(found))), "")


def _conflict(found: list[_Comparison]) -> str:
    spec = found[0].signal
    fixed = [one for one in found if one.sign in ("is", "==") and not isinstance(one.value, float)]
    for one in fixed:
        if one.value != fixed[0].value:
            return f"`{fixed[0].written}` and `{one.written}` exclude each other"
    absent = [one for one in found if one.sign == "has is" and one.value is False]
    needed = [one for one in found if one.sign != "has is"]
    if absent and needed:
        return f"`{needed[0].written}` needs the signal that `{absent[0].written}` requires to be absent"
    low, high = signal_range(spec)
    bounds = [(one, *_interval(one)) for one in found if isinstance(one.value, float)]
    for one, least, most in bounds:
        if max(low, least) > min(high, most):
            return f"`{one.written}`: {spec.name} is {_shown(low, high)}"
    for index, (one, least, most) in enumerate(bounds):
        for other, other_least, other_most in bounds[:index]:
            if max(other_least, least) > min(other_most, most):
                return f"`{other.written}` and `{one.written}` exclude each other"
    return ""


def _interval(comparison: _Comparison) -> tuple[float, float]:
    """Return the least and the greatest value for which a comparison with a number holds."""
    value, sign = float(comparison.value), comparison.sign
    above, below = math.nextafter(value, math.inf), math.nextafter(value, -math.inf)
    if comparison.signal.type == "int" and math.isfinite(value):
        above, below = math.floor(value) + 1, math.ceil(value) - 1
    least = {">": above, ">=": value, "==": value}.get(sign, -math.inf)
    return least, {"<": below, "<=": value, "==": value}.get(sign, math.inf)


def signal_range(spec: SignalSpec) -> tuple[float, float]:
    """Return the least and the greatest value of a signal with a number; infinite where nothing bounds it."""
    match = _RANGE.fullmatch(spec.unit)
    if match is not None:
        return float(match[1]), float(match[2])
    return _RANGES.get(spec.name, (0.0 if spec.unit in _NOT_NEGATIVE else -math.inf, math.inf))


def _shown(low: float, high: float) -> str:
    return f"at least {low:g}" if math.isinf(high) else f"{low:g} to {high:g}"
