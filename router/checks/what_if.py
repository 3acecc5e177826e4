"""Decisions of a recorded request under the active policy, with changed signals. Pure.

The decision is made twice, with the recorded signals and with the changed ones, so that a difference is due to the
changes and not to a policy that was replaced since the record was made. An on-demand signal that was not computed is
not absent: all decisions that are possible are returned, with the signals that they depend on (`possible`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

import msgspec

from ..decision.features import request_of
from ..errors import InvalidRequest
from ..policy.compiled import Policy
from ..policy.signals import (
    ESTIMATED,
    GUARD_SIGNALS,
    OF_EACH_CLOUD,
    SIGNALS,
    SignalType,
    Value,
    find_signal,
    signal_spec,
)
from ..types import CloudSignals, Decision, DecisionRecord
from .possible import PolicyReplay

_MAX_TEXT = 256  # characters of a text that is set


class RecordedSignal(msgspec.Struct, frozen=True):
    """A signal of a record."""

    name: str
    type: SignalType
    unit: str
    meaning: str
    values: tuple[str, ...]  # all possible values, if they are known
    value: Value | tuple[str, ...] | None  # the recorded value; None: absent, or not computed
    unrecorded: bool  # whether the signal was not computed, so that its value is unknown rather than absent
    named: bool  # whether a rule of the policy names it


class Redecided(msgspec.Struct, frozen=True):
    """The policy's decision for the request. `decisions`: the possible ones, if a signal is unknown; None: refused."""

    decisions: tuple[Decision | None, ...]
    hangs_on: tuple[str, ...]  # the unknown signals that the decision depends on
    cached: bool | None  # whether the cache may answer, or keep the answer; None if unknown


class WhatIf(msgspec.Struct, frozen=True):
    """A recorded request, decided twice by `policy@revision`: as recorded, and with the changes."""

    id: str
    policy: str
    revision: str
    signals: tuple[RecordedSignal, ...]
    as_recorded: Redecided
    changed: Redecided


def what_if(policy: Policy, record: DecisionRecord, changes: Mapping[str, object]) -> WhatIf:
    """Decide `record` under `policy`, once with its own signals and once with `changes`, of which None makes a signal
    absent. Raises InvalidRequest for an unknown signal, or a value that it cannot have.
    """
    named = policy.route_needs.signals | policy.constraint_needs.signals | policy.cache_needs.signals
    return WhatIf(
        id=record.id,
        policy=policy.name,
        revision=policy.revision,
        signals=tuple(_signal(record, name, named) for name in _names(record, named)),
        as_recorded=_decide(policy, record),
        changed=_decide(policy, _change(record, changes)),
    )


def _names(record: DecisionRecord, named: frozenset[str]) -> Iterator[str]:
    """Yield every signal, and those of each cloud if the record has several or the policy names them."""
    yield from SIGNALS
    of_clouds = dict.fromkeys(sorted(named - SIGNALS.keys()))
    if len(record.snapshot.clouds) > 1:
        of_clouds |= dict.fromkeys(
            f"cloud.{cloud}.{name}" for cloud in record.snapshot.clouds for name in OF_EACH_CLOUD
        )
    yield from of_clouds


def _signal(record: DecisionRecord, name: str, named: frozenset[str]) -> RecordedSignal:
    spec = signal_spec(name)
    return RecordedSignal(
        name=name,
        type=spec.type,
        unit=spec.unit,
        meaning=spec.meaning,
        values=spec.values,
        value=_recorded(record, name),
        unrecorded=name in record.unrecorded or (name in GUARD_SIGNALS and _recorded(record, name) is None),
        named=name in named,
    )


def _recorded(record: DecisionRecord, name: str) -> Value | tuple[str, ...] | None:
    group, _, field = name.partition(".")
    if name in ESTIMATED or name not in SIGNALS:
        value = signal_spec(name).read(request_of(record.request), record.snapshot, record.estimates)
    else:
        value = getattr(record.request if group == "request" else getattr(record.snapshot, group), field)
    if value is None and name == "request.prefer":
        return ""
    # JSON has no NaN and no infinity.
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _change(record: DecisionRecord, changes: Mapping[str, object]) -> DecisionRecord:
    """Return the name and the checked value of a change. Raises InvalidRequest."""
    replace = msgspec.structs.replace
    request: dict[str, object] = {}
    estimates: dict[str, object] = {}
    groups: dict[str, dict[str, object]] = {}
    clouds = record.snapshot.clouds
    for name, given in changes.items():
        value = _checked(name, given)
        group, _, field = name.partition(".")
        if "." in field:
            cloud, _, field = field.partition(".")
            clouds = {**clouds, cloud: replace(clouds.get(cloud, CloudSignals()), **{field: value})}
            continue
        if group == "cloud" and clouds:
            first = next(iter(clouds))
            clouds = {**clouds, first: replace(clouds[first], **{field: value})}
        if name in ESTIMATED:
            estimates[ESTIMATED[name]] = value
        elif group == "request":
            request |= _features(field, value, name)
        else:
            groups.setdefault(group, {})[field] = value
    snapshot = msgspec.structs.replace(record.snapshot, clouds=clouds)
    if clouds:
        groups["cloud"] = msgspec.structs.asdict(next(iter(clouds.values())))
    return replace(
        record,
        request=replace(record.request, **request),
        estimates=replace(record.estimates, **estimates),
        snapshot=replace(snapshot, **{name: replace(getattr(snapshot, name), **new) for name, new in groups.items()}),
        unrecorded=tuple(name for name in record.unrecorded if name not in changes),
    )


def _features(field: str, value: object, name: str) -> dict[str, object]:
    if field == "prefer":
        return {"prefer": value or None}
    if field == "tools":
        return {"tools": bool(value), "offers_tools": bool(value)}
    if value is None and not SIGNALS[name].optional and field != "temperature":
        raise InvalidRequest(f"`{name}` cannot be absent.", param=name)
    return {field: value}


_TYPES: Final[Mapping[SignalType, tuple[object, str]]] = {
    "int": (int, "a whole number"),
    "double": (float, "a number"),
    "bool": (bool, "true or false"),
    "string": (str, "text"),
    "list": (tuple[str, ...], "a list of texts"),
}


def _checked(name: str, value: object) -> object:
    """Return the value in the signal's type; None for an absent one. Raises InvalidRequest."""
    spec = find_signal(name)
    if spec is None:
        raise InvalidRequest(f"Signal {name[:64]!r} not found.", param=name[:64])
    if value is None:
        return None
    kind, expected = _TYPES[spec.type]
    try:
        converted: object = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise InvalidRequest(f"`{name}` must be {expected}.", param=name) from None
    texts = converted if isinstance(converted, tuple) else (converted,) if isinstance(converted, str) else ()
    if spec.values and any(text not in spec.values for text in texts):
        raise InvalidRequest(f"`{name}` must be one of {', '.join(filter(None, spec.values))}", param=name)
    if any(len(text) > _MAX_TEXT for text in texts):
        raise InvalidRequest(f"`{name}` is longer than {_MAX_TEXT} characters.", param=name)
    return converted


def _decide(policy: Policy, record: DecisionRecord) -> Redecided:
    replay, request, replace = PolicyReplay(policy), request_of(record.request), msgspec.structs.replace
    # `possible` looks into the cache only for a hit, and decides only requests that the cache does not answer.
    missed = replay.possible(replace(record, outcome=replace(record.outcome, cache="miss")), request)
    hit = replay.possible(replace(record, outcome=replace(record.outcome, cache="hit")), request)
    return Redecided(missed.decisions, missed.hangs_on, hit.cached)
