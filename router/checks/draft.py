"""Tries a draft of a policy on one request, without a box: its text, and the signals that the author gives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

import msgspec

from ..decision.decide import decide, plan_cache
from ..documents.reader import did_you_mean
from ..errors import ConfigError
from ..policy.compiled import Policy
from ..policy.signals import SIGNALS, SignalType
from ..types import NowSignals
from .cases import CaseRequest, CaseSnapshot, estimates_of
from .explanation import RouteExplanation

CHARACTERS_PER_TOKEN: Final = 4  # of English text; the box counts with its model's tokenizer
_OTHERS: Mapping[str, SignalType] = {
    # What a case can say beyond the signals.
    "request.model": "string",
    "request.image": "bool",
    "request.logprobs": "bool",
    "down": "list",
}
_SETTABLE: Mapping[str, SignalType] = {
    f"{group}.{field.name}": SIGNALS[f"{group}.{field.name}"].type
    for group, example in [("request", CaseRequest()), *msgspec.structs.asdict(CaseSnapshot()).items()]
    if isinstance(example, msgspec.Struct)
    for field in msgspec.structs.fields(example)
    if f"{group}.{field.name}" in SIGNALS
} | dict(_OTHERS)


def try_draft(policy: Policy, text: str, settings: Iterable[str], now: NowSignals) -> RouteExplanation:
    """Decide a request of this text under `policy`.

    Args:
        text: the prompt; without `request.prompt_tokens` its length gives an estimate of the token count.
        settings: ``device.temperature_c=90``, ``request.tags=private,a`` or ``down=large``; later ones win. A signal
            that is not set, or set to nothing, is absent.
        now: the local time, which `now.*` settings replace.

    Raises:
        ConfigError: a setting has no such key, or no such value.
        ModelNotFound: `request.model` is no target's name.
    """
    request_fields: dict[str, object] = {"prompt_tokens": max(1, round(len(text) / CHARACTERS_PER_TOKEN))}
    groups: dict[str, dict[str, object]] = {"request": request_fields, "now": msgspec.structs.asdict(now)}
    down: object = ()
    for setting in settings:
        key, value = _read(setting)
        group, _, name = key.partition(".")
        if key == "down":
            down = value or ()
        elif value is None:
            groups.get(group, {}).pop(name, None)
        else:
            groups.setdefault(group, {})[name] = value
    request = msgspec.convert(groups.pop("request"), CaseRequest)
    case = msgspec.convert({**groups, "down": down}, CaseSnapshot)
    estimates = estimates_of(request, case)
    question, snapshot = request.build(), case.build()
    return RouteExplanation(
        cache=plan_cache(policy, question, snapshot, estimates),
        decision=decide(policy, question, snapshot, estimates),
        estimates=estimates,
        snapshot=snapshot,
        draft=True,
    )


def _read(setting: str) -> tuple[str, object]:
    """Return key and value; None for no value: the signal is absent. Raises ConfigError."""
    key, separator, text = (part.strip() for part in setting.partition("="))
    where = f"--set {setting[:100]}"
    if not separator:
        raise ConfigError("write KEY=VALUE, such as device.temperature_c=90", where=where)
    kind = _SETTABLE.get(key)
    if kind is None:
        near = did_you_mean(key, _SETTABLE) or f"; known: {', '.join(_SETTABLE)}"
        raise ConfigError(f"unknown signal `{key[:64]}`{near}", where=where)
    if not text:
        return key, None
    read, expected = _READERS[kind]
    try:
        value = read(text)
    except (ValueError, KeyError):
        raise ConfigError(f"must be {expected}, not {text[:64]!r}", where=where) from None
    known = SIGNALS[key].values if key in SIGNALS else ()
    if known and isinstance(value, str) and value not in known:
        raise ConfigError(f"must be one of {', '.join(filter(None, known))}, not {text[:64]!r}", where=where)
    return key, value


def _items(text: str) -> list[str]:
    return [item for part in text.strip("[]").split(",") if (item := part.strip().strip("'\""))]


_READERS: Mapping[SignalType, tuple[Callable[[str], object], str]] = {
    "int": (int, "a whole number"),
    "double": (float, "a number"),
    "bool": ({"true": True, "false": False}.__getitem__, "true or false"),
    "string": (str, "text"),
    "list": (_items, "a list: a,b"),
}
