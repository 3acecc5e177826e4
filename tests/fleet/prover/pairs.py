"""Requests, devices and sessions drawn from a seed, and their values for the variables of a world."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from causeway_server.fleet.prover.facts import PARTS, Text
from causeway_server.fleet.prover.outcome import World
from causeway_server.router.decision.candidates import expected_tokens, expected_usd
from causeway_server.router.decision.sessions import counts_prefix
from causeway_server.router.policy.cel_library import cel
from causeway_server.router.policy.cel_source import scan
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.policy.signals import (
    ESTIMATED,
    Expression,
    RequiredSignals,
    SignalSpec,
    find_signal,
    modalities,
    signal_spec,
)
from causeway_server.router.prices import PICO_USD
from causeway_server.router.residency import PREFIX, narrowed
from causeway_server.router.types import (
    AudioPart,
    Candidate,
    CloudSignals,
    DeviceSetup,
    DeviceSignals,
    EdgeSignals,
    Estimates,
    FilePart,
    ImagePart,
    Kind,
    Message,
    NowSignals,
    Part,
    PromiseSignals,
    Request,
    ResponseFormat,
    RoutingHints,
    Sampling,
    Session,
    Snapshot,
    SpendSignals,
    Tool,
    ToolChoice,
)

_PARTS: dict[str, Part] = {"image": ImagePart("u"), "audio": AudioPart("", "wav"), "file": FilePart("{}")}
_UNKNOWN = Candidate("edge", "")
Facts = tuple[Request, Snapshot, Estimates]
Value = bool | int | float
_T = TypeVar("_T")
_KINDS: tuple[Kind, ...] = ("chat", "chat", "chat", "completion", "embedding")


class Draw:
    """Draws for one policy: numbers and texts near those that its conditions name.

    Args:
        sources: Its conditions.
    """

    def __init__(self, rng: random.Random, world: World, sources: Sequence[str]) -> None:
        self._rng, self._world = rng, world
        tokens = [token for source in sources for token in scan(source)]
        literals = [cel.compile(one.text).execute(cel.Context({})) for one in tokens if one.kind == "number"]
        self._numbers = [float(one) for one in literals] or [1.0]
        self._tags = [tag for tag in world.facts.tags if len(tag) < 40]
        self._clouds = sorted({name.partition(":")[2] for name in world.facts.variables if name.startswith("region:")})

    def maybe(self, value: _T, odds: float = 0.75) -> _T | None:
        return value if self._rng.random() < odds else None

    def _flip(self, odds: float = 0.5) -> bool:
        return self._rng.random() < odds

    def real(self, least: float = 0.0, most: float = 1e9) -> float:
        rng = self._rng
        value = rng.choice(self._numbers) + rng.choice((0.0, 0.0, 0.25, -0.25, 1.0, -1.0, 40.0, -7.5))
        return min(max(value, least), most)

    def whole(self, least: int = 0, most: int = 2**40) -> int:
        return int(self.real(least, most))

    def text(self) -> str:
        return self._rng.choice([*self._world.facts.texts, "none of these", ""])

    def pair(self) -> Facts:
        """Return a request, a snapshot and estimates."""
        rng, flip = self._rng, self._flip
        kind = rng.choice(_KINDS)
        parts = tuple(_PARTS[one] for one in PARTS if kind == "chat" and flip(0.2))
        plain = [*self._tags, *["unknown", "other"] * 4, PREFIX + "mars", PREFIX + "elsewhere+mars"]
        tags = tuple(rng.sample(plain, rng.choice((0, 0, 0, 1, 2))))
        request = Request(
            kind=kind,
            model="auto" if flip(0.7) else rng.choice(self._world.models),
            messages=(Message("user", parts or "x"),) if kind == "chat" else (),
            prompts=() if kind == "chat" else ("x",) * rng.choice((1, 1, 2)),
            max_tokens=self.maybe(self.whole(1), 0.5),
            sampling=Sampling(temperature=self.maybe(rng.choice((0.0, 0.5, 1.0, self.real(0.0, 2.0))), 0.6)),
            n=rng.choice((1, 1, 1, 2, 5)),
            stream=flip(),
            tools=(Tool("t"),) if flip(0.3) else (),
            tool_choice=ToolChoice(rng.choice(("auto", "none"))),
            response_format=rng.choice((None, None, ResponseFormat("json_object"), ResponseFormat())),
            logprobs=0 if flip(0.1) else None,
            hints=RoutingHints(
                prefer=rng.choice(
                    (None, None, None, "prefer_on_device", "only_on_device", "prefer_cloud", "only_cloud")
                ),
                tags=tags,
                client=self.text(),
                deadline_ms=self.maybe(self.whole(), 0.4),
            ),
        )
        return request, self._snapshot(), self._estimates(request)

    def _cloud(self) -> CloudSignals:
        rng = self._rng
        return CloudSignals(
            reachable=rng.choice((True, False, None)),
            rtt_ms=self.maybe(self.real()),
            breaker=rng.choice(("closed", "half_open", "open", None)),
            tier=self.maybe(self.text()),
            feedback=self.maybe(self.real(0.0, 1.0)),
        )

    def _snapshot(self) -> Snapshot:
        rng, variables = self._rng, self._world.facts.variables
        regions = {c or "first": rng.choice(self._world.facts.regions) for c in self._clouds if rng.random() < 0.6}
        models = sorted({name.split(":")[1] for name in variables if name.startswith("projectors:")})
        setup = DeviceSetup(
            engine=True,
            cloud=True,
            encoders=tuple(one for one in PARTS if rng.random() < 0.4),
            projectors={model: tuple(one for one in PARTS if rng.random() < 0.4) for model in models},
            clouds=("first", *[c for c in self._clouds if c]),
            regions=regions,
        )
        named = [name.partition(":") for name in variables]
        return Snapshot(
            DeviceSignals(
                temperature_c=self.maybe(self.real()),
                throttled=rng.choice((True, False, None)),
                memory_free_mb=self.maybe(self.real()),
                cpu=self.maybe(self.real(0.0, 1.0)),
                power_w=self.maybe(self.real()),
                battery=self.maybe(self.real(0.0, 1.0)),
            ),
            EdgeSignals(
                queue=self.maybe(self.whole()),
                tokens_per_s=self.maybe(self.real()),
                loaded=rng.choice((True, False, None)),
                feedback=self.maybe(self.real(0.0, 1.0)),
            ),
            self._cloud(),
            SpendSignals(self.maybe(self.real()), self.maybe(self.real()), self.maybe(self.real())),
            NowSignals(
                self.maybe(self.whole(0, 23)),
                self.maybe(self.whole(1, 7)),
                self.maybe(self.whole(0, 59)),
                self.maybe(self.whole()),
            ),
            down=frozenset(key for kind, _, key in named if kind == "down" and rng.random() < 0.2),
            absent=frozenset(key for kind, _, key in named if kind == "absent" and rng.random() < 0.1),
            setup=setup if rng.random() < 0.7 else None,
            clouds={c: self._cloud() for c in (*self._clouds, "eu", "us") if c and rng.random() < 0.8},
            promises={key: PromiseSignals(0.5) for kind, _, key in named if kind == "promises" and rng.random() < 0.5},
        )

    def _estimates(self, request: Request) -> Estimates:
        rng = self._rng
        found = [
            name.split(":") for name in self._world.facts.variables if name.startswith("latency:") and name[-1] != "?"
        ]
        candidates = tuple(
            Candidate(
                "edge" if at == "edge" else "cloud",
                model,
                self.maybe(rng.randrange(9) / 8, 0.9),
                self.maybe(rng.randrange(500)),
                self.maybe(rng.randrange(32) / 8),
            )
            for _, at, model in found
            if rng.random() < 0.9
        )
        session = None
        if rng.random() < 0.7:
            place = rng.choice(self._world.sessions)
            session = msgspec.structs.replace(
                place,
                warm={
                    one.target: rng.randrange(1000) for one in self._world.sessions if one.target and rng.random() < 0.5
                },
                on_device=rng.random() < 0.05,
                regions=rng.choice((*[None] * 12, (), ("mars",), (rng.choice(self._world.facts.regions),))),
                tool_result=bool(place.target) and rng.random() < 0.5,
            )
        pii = tuple(sorted(rng.sample(("email", "phone", "iban"), rng.choice((0, 0, 1, 2)))))
        return Estimates(
            prompt_tokens=self.maybe(self.whole()),
            quality=self.maybe(self.real(0.0, 1.0)),
            image_pixels=self.maybe(self.whole()),
            images_text=rng.choice((True, False, None)),
            audio_s=self.maybe(self.real()),
            language=self.maybe(self.text()),
            audio_speech=rng.choice((True, False, None)),
            candidates=candidates,
            session=session,
            pii_classes=pii,
            pii_count=len(pii),
            key_count=rng.choice((0, 0, 1)),
        )


class Valuation:
    """The values of a world's variables for requests under a policy. `variants`: those that answer, by target."""

    def __init__(self, world: World, policy: Policy, variants: Mapping[str, str] = {}) -> None:
        self._world, self._policy, self._variants = world, policy, variants
        facts = world.facts
        self._slots = [slot.name for slot in facts.slots]
        self._texts = {name for name in facts.choices if find_signal(name) is not None}
        self._getters = {name: getter for name in facts.variables if (getter := self._getter(name)) is not None}
        self._atoms = [(name, one, cel.compile(one.source.removesuffix("!"))) for name, one in facts.atoms.items()]
        self._free = [(name, *_expression(source, policy.default_temperature)) for name, source in facts.opaque.items()]

    def values(self, pair: Facts) -> dict[str, Value]:
        """Return the value of each variable. Raises OverflowError: it has more unknown tags than there are slots."""
        request, _, estimates = pair
        facts, session = self._world.facts, estimates.session
        values: dict[str, Value] = {name: getter(pair) for name, getter in self._getters.items()}
        tags, unknown = set(request.hints.tags), [tag for tag in request.hints.tags if tag not in facts.tags]
        if len(unknown) > len(self._slots):
            raise OverflowError
        values |= {f"tag:{tag}": tag in tags for tag in facts.tags}
        values |= {slot: at < len(unknown) for at, slot in enumerate(self._slots)}
        bound = narrowed(*[frozenset(tag[len(PREFIX) :].split("+")) for tag in unknown if tag.startswith(PREFIX)])
        values |= {f"slot_region:{one}": bound is not None and one in bound for one in facts.regions}
        place = session if session is not None else Session()
        kept = place.regions
        values |= {f"session.region:{one}": kept is not None and one in kept for one in facts.regions}
        kinds = modalities(request)
        places = [(one.target, one.cloud, one.model) for one in self._world.sessions]
        values |= {
            "request.model": self._world.models.index(request.model),
            "session.place": places.index((place.target, place.cloud, place.model)),
            "session": session is not None,
            "session.on_device": place.on_device,
            "session.bound": kept is not None,
            "session.tool_result": place.tool_result,
            "tags.bound": bound is not None,
            "tags.more": len(unknown),
            "temperature_set": request.sampling.temperature is not None,
            "request.temperature": float(request.sampling.temperature or 0.0),
            "offers_tools": bool(request.tools),
            "logprobs": request.logprobs is not None,
            "prompts": len(request.prompts),
            **{f"part.{one}": one in kinds for one in PARTS},
        }
        texts = {name: signal_spec(name).read(*pair) for name in self._texts}
        texts |= {slot: unknown[at] for at, slot in enumerate(self._slots[: len(unknown)])}
        for name, atom, program in self._atoms:
            result = _of_text(program, atom.word, texts.get(atom.owner))
            values[name] = result is None if name.endswith("!") else result is True
        for name, needs, expression in self._free:
            found = expression.evaluate(needs.read(*pair))
            values |= {name: found is True, f"{name}!": not isinstance(found, bool)}
        return values

    def _getter(self, name: str) -> Callable[[Facts], Value] | None:
        head, _, rest = name.partition(":")
        spec = find_signal(name.removesuffix("?"))
        if spec is not None and spec.type != "list" and name != "request.temperature":
            return _of_signal(spec, self._world.facts.choices.get(name), asks_presence=name.endswith("?"))
        if head in ("down", "absent", "promises"):
            return lambda pair: rest in getattr(pair[1], head)
        if head == "encoders":
            return lambda pair: pair[1].setup is not None and rest in pair[1].setup.encoders
        if head == "projectors":
            model, _, kind = rest.rpartition(":")
            return lambda pair: pair[1].setup is not None and kind in pair[1].setup.projectors.get(model, ())
        if head == "variants":  # of which one has an adapter, or none, as the one in the name
            target, _, model = rest.partition(":")
            chosen = self._variants.get(target)
            return lambda _: chosen is not None and ("+" in chosen) == ("+" in model)
        if head == "region":
            regions = ("", *self._world.facts.regions)
            return lambda pair: regions.index(pair[1].setup.regions.get(rest or "first", "") if pair[1].setup else "")
        if head == "pii.classes":
            return lambda pair: rest in (pair[2].pii_classes or ())
        if head in ("quality", "latency", "usd"):
            return lambda pair: _estimate(head, rest, self._policy, pair)
        return None


def _of_signal(spec: SignalSpec, choice: Text | None, *, asks_presence: bool) -> Callable[[Facts], Value]:
    options = () if choice is None else tuple(text for _, text in choice.options)

    def value(pair: Facts) -> Value:
        found: Any = getattr(pair[2], ESTIMATED[spec.name]) if spec.name in ESTIMATED else spec.read(*pair)
        if asks_presence:
            return found is not None
        if choice is not None:
            return options.index(found) if found in options else len(options)
        if spec.type == "int":
            return (found or 0) & (2**64 - 1)
        return (
            (0.0 if spec.type == "double" else False)
            if found is None
            else bool(found)
            if spec.type == "bool"
            else float(found)
        )

    return value


def _of_text(program: cel.Program, word: str, text: object) -> bool | None:
    try:
        return text is not None and program.execute(cel.Context({word: text})) is True
    except Exception:  # undocumented ones of the binding
        return None


def _expression(source: str, temperature: float) -> tuple[RequiredSignals, Expression]:
    flat = {token.text for token in scan(source) if token.kind == "name"}
    known = frozenset(name.removesuffix("__known").replace("__", ".") for name in flat if name.endswith("__known"))
    named = frozenset(name.removesuffix("__known").replace("__", ".") for name in flat if "__" in name)
    expression = Expression(source, cel.compile(source), named, known)
    return RequiredSignals([expression], temperature), expression


def _estimate(head: str, rest: str, policy: Policy, pair: Facts) -> Value:
    request, _, estimates = pair
    known = {(str(one.at), one.model): one for one in estimates.candidates or ()}
    if head != "usd":
        at, _, model = rest.removesuffix("?").partition(":")
        one = known.get((at, model), _UNKNOWN)
        value = one.quality if head == "quality" else one.latency_s
        return value is not None if rest.endswith("?") else float(value or 0.0)
    name, _, left = rest.partition(":")
    target = next(one for one in policy.targets if one.name == name)
    session = estimates.session if estimates.session is not None and counts_prefix(policy) else Session()
    one = known.get((target.at, target.served), _UNKNOWN)
    usd = expected_usd(target, expected_tokens(request, one), estimates, session.warm.get(name, 0))
    last = next((one for one in policy.targets if one.name == session.target), None)
    if left and last is not None:
        lost = 0 if name == session.target else session.warm.get(session.target, 0)
        usd += lost * last.price.rates[0] / PICO_USD
    return usd
