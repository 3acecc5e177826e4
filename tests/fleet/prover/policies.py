"""Policies drawn from a seed: targets, rules and conditions of each form that the file allows."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from causeway_server.router.policy.compiled import Policy, check_policy
from causeway_server.router.policy.signals import SIGNALS

_NUMBERS = sorted(name for name, spec in SIGNALS.items() if spec.type in ("int", "double"))
_FLAGS = sorted(name for name, spec in SIGNALS.items() if spec.type == "bool")
_TAGS = ("private", "vip", "team-a", "team-b", "in-region:eu")
_CLIENTS = ("kiosk-1", "kiosk-2", "admin")
ABILITIES = ("chat", "completion", "embedding", "tools", "json", "logprobs", "image", "audio", "file")


class Author:
    """Writes policies."""

    def __init__(self, rng: random.Random, depth: int = 2) -> None:
        self._rng = rng
        self._depth = depth  # of the conditions of routes

    def flip(self, odds: float = 0.5) -> bool:
        return self._rng.random() < odds

    def number(self, name: str) -> str:
        rng, kind = self._rng, SIGNALS[name].type
        if kind == "int":
            return str(rng.choice((0, 1, 5, 8, 48, 100, 800)))
        return repr(rng.choice((0.0, 0.25, 0.5, 0.9, 1.0, 5.0, 85.0, 300.5)))

    def comparison(self) -> str:
        rng = self._rng
        name, sign = rng.choice(_NUMBERS), rng.choice(("<", "<=", ">", ">=", "==", "!="))
        left, kind = name, SIGNALS[name].type
        if self.flip(0.25):
            left = f"{left} {rng.choice('+-*/%' if kind == 'int' else '+-*/')} {self.number(name)}"
        if self.flip(0.1):
            other = rng.choice([one for one in _NUMBERS if SIGNALS[one].type == kind])
            left = f"{left} {rng.choice('+-')} {other}"
        if self.flip(0.1):
            left = f"{'double' if kind == 'int' else 'int'}({left})"
            kind = "double" if kind == "int" else "int"
            return f"{left} {sign} {'0.5' if kind == 'double' else '3'}"
        return f"{left} {sign} {self.number(name)}"

    def atom(self) -> str:
        rng = self._rng
        tag, client = rng.choice(_TAGS), rng.choice(_CLIENTS)
        forms = (
            self.comparison,
            self.comparison,
            self.comparison,
            lambda: rng.choice(("", "!")) + rng.choice(_FLAGS),
            lambda: f"{rng.choice(_FLAGS)} == {rng.choice(('true', 'false'))}",
            lambda: f"has({rng.choice(sorted(SIGNALS))})",
            lambda: f"'{tag}' in request.tags",
            lambda: f"'{tag}' in request.tags",
            lambda: f"request.tags.exists(t, t.{rng.choice(('startsWith', 'endsWith', 'contains'))}('{tag[:4]}'))",
            lambda: f"request.tags.all(t, t != '{tag}' || {self.comparison()})",
            lambda: f"size(request.tags) {rng.choice(('>', '<'))} {rng.choice((0, 1, 2))}",
            lambda: f"request.client {rng.choice(('==', '!=', '<'))} '{client}'",
            lambda: f"request.client.startsWith('{client[:5]}')",
            lambda: f"request.client.matches('^{client[:3]}[a-z]*-[0-9]+$')",
            lambda: f"request.client in ['{client}', 'other']",
            lambda: f"request.kind == '{rng.choice(('chat', 'completion', 'embedding'))}'",
            lambda: f"request.prefer == '{rng.choice(('prefer_cloud', 'only_cloud', ''))}'",
            lambda: f"cloud.breaker {rng.choice(('==', '!='))} 'open'",
            lambda: "cloud.eu.reachable && cloud.eu.rtt_ms < 300.0",
            lambda: f"'{rng.choice(('image', 'audio'))}' in request.modalities",
            lambda: f"'{rng.choice(('email', 'phone'))}' in pii.classes",
            lambda: f"now.hour in [{rng.randrange(24)}, {rng.randrange(24)}]",
            lambda: "request.language == 'de'",
        )
        return rng.choice(forms)()

    def condition(self, depth: int | None = None) -> str:
        rng, depth = self._rng, self._depth if depth is None else depth
        if depth == 0 or self.flip(0.35):
            return self.atom()
        left, right = self.condition(depth - 1), self.condition(depth - 1)
        if self.flip(0.1):
            return f"({left}) ? ({right}) : ({self.condition(depth - 1)})"
        form = f"({left}) {rng.choice(('&&', '||'))} ({right})"
        return f"!({form})" if self.flip(0.15) else form

    def targets(self) -> dict[str, dict[str, object]]:
        rng = self._rng
        places: list[object] = ["edge", "cloud"]
        places += rng.sample(["edge", "cloud", "cloud:eu", "cloud:us", ["cloud:eu", "cloud:us"]], rng.randrange(3))
        found: dict[str, dict[str, object]] = {}
        for at, place in enumerate(places):
            one: dict[str, object] = {
                "at": place,
                "model": f"m{at}" + ("+ad" if place == "edge" and self.flip(0.15) else ""),
            }
            if self.flip(0.3):
                one["can"] = sorted({"chat", *rng.sample(ABILITIES, rng.randrange(4, 9))})
            if self.flip(0.5):
                one["temperature"] = rng.choice((0.0, 0.5))
            if place != "edge" and self.flip(0.5):
                one["price"] = {"input": rng.choice((10, 70)), "output": 50}
            if self.flip(0.1):
                one["variants"] = [{"model": f"v{at}", "share": 0.1}]
            found[f"t{at}"] = one
        return found

    def policy(self) -> dict[str, object]:
        rng, targets = self._rng, self.targets()
        document: dict[str, object] = {"version": 1, "name": "drawn", "targets": targets}
        document["constraints"] = [self.constraint(at) for at in range(rng.choice((0, 1, 1, 2, 3)))]
        document["routes"] = [
            self.route(at, targets, last=at == count) for count in [rng.randrange(4)] for at in range(count + 1)
        ]
        if self.flip(0.3):
            rules = [
                {"name": f"g{at}", "action": rng.choice(("refuse", "mask", "audit")), "when": self.condition(1)}
                for at in (0, 1)
            ]
            document["guard"] = {"rules": rules, "on_failure": rng.choice(("hit", "clean"))}
        document["cache"] = [self.cache(at) for at in range(rng.randrange(3))]
        if self.flip(0.4):
            document["shadow"] = {"share": 0.5}
            self.promise(document["routes"], targets)
        if self.flip(0.5):
            document["session"] = {
                "pin": rng.choice(("tool_loop", "conversation")),
                "mode": rng.choice(("require", "prefer")),
            }
            if any(isinstance(route["use"], dict) for route in document["routes"]) and self.flip():  # type: ignore[attr-defined]
                document["session"] = {"switch_cost": "prefix"}
        return document

    def promise(self, routes: object, targets: dict[str, dict[str, object]]) -> None:
        """Give routes with a handoff and a cloud target a promise."""
        assert isinstance(routes, list)
        for route in routes:
            use = route["use"]["best_of"] if isinstance(route["use"], dict) else route["use"]
            clouds = [name for name in use if targets[name]["at"] != "edge"]
            if "handoff" in route and clouds and self.flip():
                applies = "always" if self.flip(0.7) else "only_where_measured"
                route["promise"] = {"of": clouds[0], "keep": 0.9, "applies": applies}

    def constraint(self, at: int) -> dict[str, object]:
        keep = self._rng.choice(("on_device", "on_device", "parts_on_device", "in_region"))
        one: dict[str, object] = {"name": f"c{at}", "keep": keep}
        if keep == "in_region":
            one["regions"] = self._rng.sample(("eu", "ch", "us"), self._rng.choice((1, 2)))
        return one | ({"when": self.condition(1)} if self.flip(0.85) else {})

    def route(self, at: int, targets: dict[str, dict[str, object]], *, last: bool) -> dict[str, object]:
        rng = self._rng
        use = rng.sample(sorted(targets), rng.randrange(1, len(targets) + 1))
        one: dict[str, object] = {"name": f"r{at}", "use": use}
        if len(use) > 1 and self.flip(0.3):
            weights = {"quality": rng.choice((0, 1, 1)), "usd": rng.choice((0, 100)), "latency": rng.choice((1, 0.5))}
            one["use"] = {"best_of": use, "weights": weights}
        edge = [name for name in use if targets[name]["at"] == "edge"]
        if edge and len(use) > 1 and self.flip():
            one["handoff"] = {"after_tokens": 8, "below": 0.5}
        if edge and self.flip(0.3):
            one["fusion"] = rng.choice(("early", "hybrid", "late"))
        return one if last and self.flip(0.8) else one | {"when": self.condition()}

    def cache(self, at: int) -> dict[str, object]:
        one: dict[str, object] = {"name": f"k{at}", "when": self.condition(1)}
        if self.flip(0.8):
            one |= {"exact": {"ttl": "30s"}, "allow_sampled": self.flip(0.3), "allow_tools": self.flip(0.3)}
        return one


def drawn(seed: int, depth: int = 2) -> Iterator[tuple[str, Policy]]:
    """Yield valid policies without end, with their texts. `depth`: of the conditions of routes."""
    author = Author(random.Random(seed), depth)
    while True:
        text = json.dumps(author.policy(), indent=1)
        policy, _ = check_policy(text)
        if policy is not None:
            yield text, policy
