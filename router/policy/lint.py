"""What a policy means: the mistakes that a well-formed file can still have.

An error is something that can never do what it says. A warning is something that is allowed and probably not meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec import UnsetType

from ..documents.reader import KeyLocations, did_you_mean
from ..documents.strict_yaml import Problem
from ..types import AUTO
from .expression import is_constant
from .file import PolicyDoc, RouteDoc, TargetDoc, rules, seconds
from .signals import Expression

Conditions = Mapping[str, Expression]
"""The compiled conditions by path: ``routes[0].when``."""


def check_meaning(doc: PolicyDoc, document: KeyLocations, conditions: Conditions) -> list[Problem]:
    """All errors and warnings; [] for a policy without fault."""
    checks = _Checks(doc, document, conditions)
    return [
        *checks.targets(),
        *checks.uses(),
        *checks.handoffs(),
        *checks.names(),
        *checks.reach(),
        *checks.constraints(),
        *checks.lifetimes(),
        *checks.money(),
    ]


class _Checks:
    def __init__(self, doc: PolicyDoc, document: KeyLocations, conditions: Conditions) -> None:
        self.doc = doc
        self.document = document
        self.conditions = conditions

    def targets(self) -> Iterator[Problem]:
        used = {name for route in self.doc.routes for name in route.use}
        for name, target in self.doc.targets.items():
            path = f"targets.{name}"
            if name == AUTO:
                yield self.error(path, f"`{AUTO}` is the name with which a caller leaves the choice to the policy")
            elif name not in used:
                yield self.warning(path, "no route uses this target: only a caller who names it reaches it")
            if target.model in self.doc.targets and target.model != name:
                yield self.warning(f"{path}.model", f"`{target.model}` is another target's name, which wins")
            yield from self._times(path, target)

    def _times(self, path: str, target: TargetDoc) -> Iterator[Problem]:
        whole, first = seconds(target.timeout), seconds(target.first_token_timeout)
        for key, value in (("timeout", whole), ("first_token_timeout", first)):
            if value == 0.0:
                yield self.error(f"{path}.{key}", "must be more than 0")
        if whole is not None and first is not None and first > whole:
            yield self.error(f"{path}.first_token_timeout", "is longer than `timeout`, so it can never pass first")

    def uses(self) -> Iterator[Problem]:
        for index, route in enumerate(self.doc.routes):
            for at, name in enumerate(route.use):
                path = f"routes[{index}].use[{at}]"
                if name not in self.doc.targets:
                    near = did_you_mean(name, self.doc.targets) or f"; known: {', '.join(self.doc.targets)}"
                    yield self.error(path, f"unknown target `{name}`{near}")
                elif name in route.use[:at]:
                    yield self.error(path, f"`{name}` is already in this list")

    def handoffs(self) -> Iterator[Problem]:
        for index, route in enumerate(self.doc.routes):
            places = self._places(route)
            if isinstance(route.handoff, UnsetType) or "?" in places:
                continue
            path = f"routes[{index}].handoff"
            if "edge" not in places:
                yield self.error(path, "only an edge target tells its confidence, and `use` has none")
            elif places.index("edge") == len(places) - 1:
                name = route.use[places.index("edge")]
                yield self.error(path, f"nobody can take over from `{name}`: it is the last in `use`")

    def names(self) -> Iterator[Problem]:
        for part, listed in rules(self.doc).items():
            seen: set[str] = set()
            for index, rule in enumerate(listed):
                if isinstance(rule.name, UnsetType):
                    continue
                if rule.name in seen:
                    yield self.error(f"{part}[{index}].name", f"the name `{rule.name}` is taken by an earlier rule")
                seen.add(rule.name)

    def reach(self) -> Iterator[Problem]:
        """Rules behind one that always holds, and rules that never hold."""
        for part in ("routes", "cache"):
            always = ""
            for index, rule in enumerate(rules(self.doc)[part]):
                path = f"{part}[{index}]"
                name = path if isinstance(rule.name, UnsetType) else rule.name
                if always:
                    yield self.error(path, f"is never reached: `{always}` before it always holds")
                elif self._answer(path) is False:
                    yield self.error(f"{path}.when", "is always false: the rule never holds")
                if not always and self._answer(path):
                    always = name
            if part == "routes" and not always:
                yield self.warning("routes", "every route has a `when`: where none holds, the answer is an error 503")

    def constraints(self) -> Iterator[Problem]:
        for index, constraint in enumerate(self.doc.constraints):
            answer = self._answer(f"constraints[{index}]")
            if answer is False:
                yield self.error(f"constraints[{index}].when", "is always false: the constraint never binds")
                continue
            for at, route in enumerate(self.doc.routes):
                if set(self._places(route)) == {"cloud"}:
                    bound = "every request" if answer else "a request"
                    yield self.warning(
                        f"routes[{at}].use", f"has no edge target: {bound} bound by `{constraint.name}` fails here"
                    )

    def lifetimes(self) -> Iterator[Problem]:
        for index, rule in enumerate(self.doc.cache):
            if not isinstance(rule.exact, UnsetType) and seconds(rule.exact.ttl) == 0.0:
                yield self.error(f"cache[{index}].exact.ttl", "must be more than 0; without `exact`, nothing is kept")

    def money(self) -> Iterator[Problem]:
        priced = [name for name, target in self.doc.targets.items() if target.usd_per_1k_tokens]
        for name in priced:
            if self.doc.targets[name].at == "edge":
                yield self.warning(f"targets.{name}.usd_per_1k_tokens", "an edge target costs no money per token")
        for path, expression in self.conditions.items():
            if not priced and any(signal.startswith("spend.") for signal in expression.signals):
                yield self.warning(path, "spend.* stays 0: no target has `usd_per_1k_tokens`")

    def _answer(self, path: str) -> bool | None:
        """Of a rule that always or never holds; None if that hangs on signals, or the condition is broken."""
        if path + ".when" not in self.document.places:
            return True
        expression = self.conditions.get(path + ".when")
        return None if expression is None else is_constant(expression)

    def _places(self, route: RouteDoc) -> list[str]:
        """`edge` or `cloud` for each target in `use`; ``?`` for an unknown one."""
        return [self.doc.targets[name].at if name in self.doc.targets else "?" for name in route.use]

    def error(self, path: str, message: str) -> Problem:
        return Problem(self.document.place(path), message)

    def warning(self, path: str, message: str) -> Problem:
        return Problem(self.document.place(path), message, "warning")
