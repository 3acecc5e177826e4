"""A counterexample as a policy test case: a request, a device and a session from a model of z3, with few values."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Final, TypeVar

import msgspec
import z3

from causeway_server.router.checks.cases import CaseRequest, CaseSession, CaseSnapshot
from causeway_server.router.policy.lint import signal_range
from causeway_server.router.policy.signals import TEMPERATURE, find_signal
from causeway_server.router.residency import PREFIX

from .facts import PARTS, Formula, Text
from .outcome import World
from .texts import Impossible, realised

Setting = tuple[CaseRequest, CaseSnapshot, CaseSession | None]
_FLAGS: Final = ("logprobs", "image", "audio", "file")
_MOST_TAGS: Final = 100
_NUMBERS: Final = (0, 1, 2, 10, 100, 1000, 10_000, 1_000_000, 10**9)
FIRST: Final = "first"
"""The name of a device's first cloud, where a policy does not name it."""


class Excluded(Exception):
    """The model has a text that does not exist. `rule` excludes it, and others for the same reason."""

    def __init__(self, rule: Formula) -> None:
        super().__init__()
        self.rule = rule


class Witness:
    """Reads a model of z3. Raises Excluded, or LookupError if a text cannot be found."""

    def __init__(self, world: World, model: z3.ModelRef) -> None:
        self._world, self._model = world, model
        self._facts = world.facts

    def setting(self) -> Setting:
        """Return the request, the device and the session."""
        request, snapshot, session = self._request(), self._snapshot(), self._session()
        return (
            msgspec.convert(request, CaseRequest),
            msgspec.convert(snapshot, CaseSnapshot),
            None if session is None else msgspec.convert(session, CaseSession),
        )

    def is_true(self, name: str) -> bool:
        found = self._facts.variables.get(name)
        return found is not None and z3.is_true(self._model.eval(found, model_completion=True))

    def number(self, name: str) -> int | float:
        found = self._model.eval(self._facts.variables[name], model_completion=True)
        if isinstance(found, z3.BitVecNumRef):
            return int(found.as_signed_long())
        bits = z3.simplify(z3.fpToIEEEBV(found)).as_long()
        return float(struct.unpack("<d", bits.to_bytes(8, "little"))[0])

    def text(self, text: Text) -> str:
        for condition, option in text.options:
            if z3.is_true(self._model.eval(condition, model_completion=True)):
                return option
        return self._unknown(text.name)

    def _unknown(self, owner: str, but: Collection[str] = ()) -> str:
        """Return a text outside the pool. `but`: not one of these."""
        facts = self._facts
        tests = {one: self.is_true(name) for name, one in facts.atoms.items() if one.owner == owner}
        try:
            return realised(tests, {*but, *(facts.texts if owner in facts.choices else facts.tags)})
        except Impossible as impossible:
            if but:
                self._unknown(owner)  # there is none at all, or
                raise LookupError from None  # no second one
            names = {one: name for name, one in facts.atoms.items()}
            same = [facts.flag(names[one]) == tests[one] for one in impossible.conflict]
            raise Excluded(z3.Not(z3.And(self._is_used(owner), *same))) from None

    def _is_used(self, owner: str) -> Formula:
        slots = {slot.name: slot.present for slot in self._facts.slots}
        return slots[owner] if owner in slots else self._facts.choices[owner].other

    # --- the parts of a case -----------------------------------------------------------------------------------------

    def _signals(self) -> Iterator[tuple[str, object]]:
        """Yield the values of signals by name."""
        facts = self._facts
        for name in dict.fromkeys(name.removesuffix("?") for name in facts.variables):
            spec, is_missing = find_signal(name), f"{name}?" in facts.variables and not self.is_true(f"{name}?")
            if spec is None or name == TEMPERATURE or is_missing:
                continue
            if spec.type == "bool":
                yield name, self.is_true(name)
            elif spec.type == "string":
                yield name, self.text(facts.text(spec))
            elif spec.type != "list":
                least = max(0.0, signal_range(spec)[0])
                yield (
                    name,
                    self.number(name) if name in facts.variables else int(least) if spec.type == "int" else least,
                )

    def _request(self) -> dict[str, object]:
        world = self._world
        found: dict[str, object] = {}
        for name, value in self._signals():
            group, _, field = name.rpartition(".")
            if group == "request":
                found[field] = value
        found["prefer"] = found.get("prefer") or None
        found["model"] = self.text(world.model)
        if self.is_true("temperature_set"):
            found["temperature"] = self.number(TEMPERATURE)
        wants = bool(found.pop("tools", False))
        found["tools"] = wants or self.is_true("offers_tools")
        found["tool_choice"] = "auto" if wants or not found["tools"] else "none"
        found |= {name: self.is_true(f"part.{name}" if name in PARTS else name) for name in _FLAGS}
        if "prompts" in self._facts.variables:
            found["prompts"] = self.number("prompts") if found.get("kind", "chat") != "chat" else 0
        found["tags"] = self._tags()
        return found

    def _tags(self) -> list[str]:
        facts = self._facts
        tags = [tag for tag in facts.tags if self.is_true(f"tag:{tag}")]
        used = [slot.name for slot in facts.slots if self.is_true(slot.name)]
        more = self.number("tags.more") if "tags.more" in facts.variables else len(used)
        if more > _MOST_TAGS:
            raise LookupError
        unknown: list[str] = []
        for at in range(int(more)):
            unknown.append(self._unknown(used[min(at, len(used) - 1)], unknown))
        tags += unknown
        if self.is_true("tags.bound"):
            allowed = [region for region in facts.regions if self.is_true(f"slot_region:{region}")]
            tags.append(PREFIX + "+".join(allowed or ["nowhere"]))
        return tags

    def _snapshot(self) -> dict[str, object]:
        facts = self._facts
        groups: dict[str, dict[str, object]] = {}
        clouds: dict[str, dict[str, object]] = {}
        for name, value in self._signals():
            group, _, field = name.rpartition(".")
            if group.startswith("cloud."):
                clouds.setdefault(group.partition(".")[2], {})[field] = value
            elif group != "request":
                groups.setdefault(group, {})[field] = value
        regions = {
            name.partition(":")[2]: self.text(one) for name, one in facts.choices.items() if name[:7] == "region:"
        }
        if "" in regions:
            clouds = {FIRST: {}, **clouds}
        classes = self._flags("pii.classes:")
        if classes:
            groups.setdefault("pii", {})["classes"] = classes
        models: dict[str, list[str]] = {}
        for name in self._flags("projectors:"):
            model, _, kind = name.rpartition(":")
            models.setdefault(model, []).append(kind)
        return {
            **groups,
            "clouds": clouds,
            "regions": {cloud or FIRST: region for cloud, region in regions.items() if region},
            "down": self._flags("down:"),
            "promises": dict.fromkeys(self._flags("promises:"), 0.5),
            "encoders": self._flags("encoders:"),
            "projectors": models,
            "variants": dict(name.split(":", 1) for name in self._flags("variants:")),
            "candidates": list(self._candidates()) or None,
        }

    def _flags(self, prefix: str) -> list[str]:
        """Return the names that follow a prefix in the names of variables, where the variable is true."""
        return [
            name.removeprefix(prefix)
            for name in self._facts.variables
            if name.startswith(prefix) and self.is_true(name)
        ]

    def _candidates(self) -> Iterator[dict[str, object]]:
        for name in self._facts.variables:
            head, _, rest = name.partition(":")
            if head == "latency" and not name.endswith("?"):
                at, _, model = rest.partition(":")
                one: dict[str, object] = {"at": at, "model": model}
                if self.is_true(f"{name}?"):
                    one["latency_s"] = self.number(name)
                if self.is_true(f"quality:{rest}?"):
                    one["quality"] = self.number(f"quality:{rest}")
                yield one

    def _session(self) -> dict[str, object] | None:
        if not self.is_true("session"):
            return None
        world, facts = self._world, self._facts
        target, cloud, model = self.text(world.session).split("\0")
        regions = None
        if self.is_true("session.bound"):
            regions = [one for one in facts.regions if self.is_true(f"session.region:{one}")]
        flags = {name: self.is_true(f"session.{name}") for name in ("on_device", "tool_result")}
        return {"target": target, "cloud": cloud, "model": model, "regions": regions, **flags}


def shrunk(setting: Setting, fails: Callable[[Setting], bool]) -> Setting:
    """Return a setting for which it still fails, with as few and as plain values as a single pass finds."""
    request, snapshot, session = setting
    if session is not None and fails((request, snapshot, None)):
        session = None
    request = _smaller(request, lambda one: fails((one, snapshot, session)))
    return request, _smaller(snapshot, lambda one: fails((request, one, session))), session


_S = TypeVar("_S", bound=msgspec.Struct)


def _smaller(struct: _S, fails: Callable[[_S], bool]) -> _S:
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        for plainer in _plainer(value, field):
            if plainer == value:
                break  # it is as plain as it can be
            tried = msgspec.structs.replace(struct, **{field.name: plainer})
            if field.name != "now" and fails(tried):
                struct = tried
                break
        else:
            if isinstance(value, msgspec.Struct):
                inside = _smaller(value, partial(_fails_within, struct, field.name, fails))
                struct = msgspec.structs.replace(struct, **{field.name: inside})
    return struct


def _fails_within(struct: _S, name: str, fails: Callable[[_S], bool], inside: msgspec.Struct) -> bool:
    return fails(msgspec.structs.replace(struct, **{name: inside}))


def _plainer(value: object, field: msgspec.structs.FieldInfo) -> Iterator[object]:
    yield field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    if isinstance(value, tuple):
        yield from (value[:at] + value[at + 1 :] for at in range(len(value)))
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield from (type(value)(number) for number in _NUMBERS)
