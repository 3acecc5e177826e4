"""The replay of recorded requests under a new policy, and the report of changes. Pure and deterministic.

Each record is decided again from its features and signals (`possible`), the record shows which target then answers
(`expected`), and the outcome is compared with the recorded one, or with that of an old policy. Three rules keep the
report honest about privacy:

1. An outcome that depends on a signal that was not recorded is unknown, never unchanged.
2. A request counts as leaving the device if a cloud target can answer it now and none could before.
3. An unknown outcome counts as leaving if a constraint may not bind, or if the request could not leave before.

The cache is not simulated: a recorded hit stays a hit if the new policy still caches such requests.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import msgspec

from ..decision.features import request_of
from ..documents.strict_yaml import Problem, SourceLocation
from ..errors import PolicyError
from ..policy.compiled import Policy, check_policy, with_adapters
from ..prices import PICO_USD
from ..types import DecisionRecord, Request, Usage
from .possible import CACHE, CONFIDENCE, Expected, Place, PolicyReplay, expected, recorded
from .report import Cause, CostChange, LeavingRequest, Move, ReplayReport, Times, UnknownOutcome

UNKNOWN: Final = "unknown"
_DECIDED: Final = frozenset({"model_not_found", "invalid_value"})  # errors of `decide` itself


def replay(records: Iterable[DecisionRecord], new_policy: Policy, old_policy: Policy | None = None) -> ReplayReport:
    """Return a report of what changes under `new_policy` for records, each once, of one or more devices. `old_policy`:
    to compare with; None: with the recorded outcomes.
    """
    tally = _Tally(new_policy, old_policy)
    for position, record in enumerate(records):
        tally.add(position, record)
    return tally.report()


class DraftReport(msgspec.Struct, frozen=True):
    """A draft that would replace `old`, as name@revision, or "" if that cannot be read; with errors it has neither
    `policy` nor `replay`.
    """

    text: str
    old: str
    problems: tuple[Problem, ...]
    policy: str = ""
    replay: ReplayReport | None = None


def check_draft(
    text: str, old_text: str, records: Iterable[DecisionRecord], adapters: Mapping[str, Sequence[str]]
) -> tuple[Policy | None, Policy | None, DraftReport]:
    """Return a draft as a policy, the one that it would replace (None: it has errors), and what it changes.

    `adapters`: the names of the adapters of the device's models.
    """
    old, _ = _adapted(old_text, adapters)
    policy, problems = _adapted(text, adapters)
    if old is None:
        message = "The policy that it would replace cannot be read, as of an earlier version: it is compared with none."
        problems = (*problems, Problem(SourceLocation("draft"), message, "warning"))
    if policy is None:
        return None, old, DraftReport(text, _label(old), problems)
    return policy, old, DraftReport(text, _label(old), problems, _label(policy), replay(records, policy, old))


def report_draft(
    text: str, old_text: str, records: Iterable[DecisionRecord], adapters: Mapping[str, Sequence[str]]
) -> DraftReport:
    """Return the report alone, which travels between processes."""
    return check_draft(text, old_text, records, adapters)[2]


def _adapted(text: str, adapters: Mapping[str, Sequence[str]]) -> tuple[Policy | None, tuple[Problem, ...]]:
    policy, problems = check_policy(text, "draft")
    try:
        return policy and with_adapters(policy, adapters.get), tuple(problems)
    except PolicyError as error:
        return None, (*problems, Problem(SourceLocation("draft"), error.message))


class Effect(msgspec.Struct, frozen=True):
    """The effect of a policy on a request: lowest and highest value of its possible outcomes. `on_device`: whether it
    is answered without the cloud, 0 or 1; `usd`: its cost in US dollars.
    """

    on_device: tuple[float, float]
    usd: tuple[float, float]


def effect(record: DecisionRecord, policy: PolicyReplay) -> Effect | None:
    """Return the effect of a policy on a recorded request; None if it was refused before a decision."""
    if _is_undecided(record):
        return None
    fact = recorded(record)
    found = _outcomes(policy, record, request_of(record.request)).found
    local = [float(one.place == CACHE or one.place.at == "edge") for one in found]
    costs = [_usd(record, fact, one) for one in found]
    return Effect((min(local), max(local)), (min(costs), max(costs)))


class _Outcomes:
    """The possible outcomes of one request under one policy, and the signals that they depend on."""

    __slots__ = ("constraint", "found", "hangs_on", "place", "rule")

    def __init__(self, found: tuple[Expected, ...], hangs_on: tuple[str, ...] = (), constraint: str = "") -> None:
        first = found[0]
        self.found = found
        self.hangs_on = hangs_on
        self.constraint = constraint
        self.place: Place | None = first.place  # None: not known
        self.rule = first.rule
        if len(found) > 1:
            self.rule = " or ".join(dict.fromkeys(one.rule for one in found if one.rule))
            if any(one.place != first.place for one in found):
                self.place = None


class _Tally:
    def __init__(self, new_policy: Policy, old_policy: Policy | None) -> None:
        self._policy, self._old_policy = new_policy, old_policy
        self._new = PolicyReplay(new_policy)
        self._old = None if old_policy is None else PolicyReplay(old_policy)
        self._requests = self._undecided = 0
        self._leaving: list[LeavingRequest] = []
        self._moves: Counter[tuple[Place | None, Place, str, str]] = Counter()
        self._unknown: Counter[tuple[Place | None, tuple[Place, ...], tuple[str, ...]]] = Counter()
        self._before_usd: list[float] = []
        self._least_usd: list[float] = []
        self._most_usd: list[float] = []
        self._times = Times()

    def add(self, position: int, record: DecisionRecord) -> None:
        fact = recorded(record)
        if self._old is None and _is_undecided(record):
            self._undecided += 1
            return
        self._requests += 1
        request = request_of(record.request)
        before = _Outcomes((fact,)) if self._old is None else _outcomes(self._old, record, request)
        after = _outcomes(self._new, record, request)
        self._count(before, after)
        cause = _cause(before, after)
        if cause is not None:
            self._leaving.append(_leaving(position, record, cause, before, after))
        self._add_cost(record, fact, before, after)
        self._times.add(record, fact.place, before.place, after.place)

    def _count(self, before: _Outcomes, after: _Outcomes) -> None:
        if after.place is None:
            possible = tuple(dict.fromkeys(one.place for one in after.found))
            self._unknown[before.place, possible, after.hangs_on] += 1
        else:
            self._moves[before.place, after.place, before.rule, after.rule] += 1

    def _add_cost(self, record: DecisionRecord, fact: Expected, before: _Outcomes, after: _Outcomes) -> None:
        costs = [_usd(record, fact, one) for one in after.found]
        self._before_usd.append(max([_usd(record, fact, one) for one in before.found]))
        self._least_usd.append(min(costs))
        self._most_usd.append(max(costs))

    def report(self) -> ReplayReport:
        moves = [
            Move(_name(before), _name(after), rule, rule_now, count, before is None or _key(before) != _key(after))
            for (before, after, rule, rule_now), count in self._moves.items()
        ]
        moves.sort(
            key=lambda one: (not one.moved, -one.requests, one.before, one.after, one.rule_before, one.rule_after)
        )
        unknown = [
            UnknownOutcome(_name(before), tuple(sorted(map(str, possible))), hangs_on, count)
            for (before, possible, hangs_on), count in self._unknown.items()
        ]
        unknown.sort(key=lambda one: (-one.requests, one.before, one.possible, one.hangs_on))
        return ReplayReport(
            policy=_label(self._policy),
            old="" if self._old_policy is None else _label(self._old_policy),
            requests=self._requests,
            undecided=self._undecided,
            leaving=tuple(self._leaving),
            unchanged=sum(move.requests for move in moves if not move.moved),
            moves=tuple(moves),
            unknown=tuple(unknown),
            cost=CostChange(
                *(round(math.fsum(each), 6) for each in (self._before_usd, self._least_usd, self._most_usd))
            ),
            latency=self._times.change(),
            targets=self._times.targets(),
        )


def _is_undecided(record: DecisionRecord) -> bool:
    """Return whether the request was refused or abandoned before a decision, so that nothing can be compared."""
    answered = record.decision is not None or record.outcome.route == "cache"
    return not answered and record.outcome.error not in _DECIDED


def _outcomes(policy: PolicyReplay, record: DecisionRecord, request: Request) -> _Outcomes:
    possible = policy.possible(record, request)
    if possible.cached:
        return _Outcomes((Expected(CACHE, may_leave=True),))
    found: list[Expected] = []
    hangs_on = possible.hangs_on
    for decision in possible.decisions:
        outcomes = expected(decision, record)
        found += outcomes
        if len(outcomes) > 1 and CONFIDENCE not in hangs_on:
            hangs_on = (*hangs_on, CONFIDENCE)
    if possible.cached is None:
        found.append(Expected(CACHE, may_leave=True))
    if len(found) == 1:
        return _Outcomes((found[0],))
    return _Outcomes(tuple(dict.fromkeys(found)), hangs_on, possible.constraint)


def _cause(before: _Outcomes, after: _Outcomes) -> Cause | None:
    """Return why the request counts as leaving the device; None if it does not."""
    stayed = not all(one.left for one in before.found)
    if not stayed or (len(after.found) > 1 and set(before.found) == set(after.found)):
        return None
    if all(one.left for one in after.found):
        return "leaves"
    confined = not any(one.may_leave for one in before.found)
    if not (confined or after.constraint) or not any(one.may_leave for one in after.found):
        return None
    return "unknown" if after.place is None or after.constraint else "may_leave"


def _leaving(
    position: int, record: DecisionRecord, cause: Cause, before: _Outcomes, after: _Outcomes
) -> LeavingRequest:
    reasons = () if record.decision is None else record.decision.reasons
    bound_by = [reason.rule for reason in reasons if reason.code == "constraint_held"]
    if record.request.prefer == "only_on_device":
        bound_by.append("only_on_device")
    return LeavingRequest(
        position=position,
        id=record.id,
        created=record.created,
        kind=record.request.kind,
        client=record.request.client,
        tags=record.request.tags,
        cause=cause,
        before=_name(before.place),
        after=" or ".join(dict.fromkeys(str(one.place) for one in after.found)),
        rule=after.rule,
        bound_by=tuple(bound_by),
        hangs_on=after.hangs_on,
    )


def _usd(record: DecisionRecord, fact: Expected, outcome: Expected) -> float:
    """Return the recorded cost if model and price stay the same, else that of its tokens at the new target."""
    recorded_outcome = record.outcome
    if _key(fact.place) == _key(outcome.place) and fact.price == outcome.price:
        return recorded_outcome.usd
    if recorded_outcome.cache == "coalesced":
        return 0.0
    usage = recorded_outcome.usage
    if not usage.prompt_tokens + usage.completion_tokens:
        usage = Usage(completion_tokens=max((attempt.tokens for attempt in recorded_outcome.attempts), default=0))
    return usage.pico_usd(outcome.price) / PICO_USD


def _name(place: Place | None) -> str:
    return UNKNOWN if place is None else str(place)


def _key(place: Place) -> tuple[str, str]:
    """Return a key that is equal for equal places: the model and its location, the cache, or no answer."""
    return (place.at, place.model) if place.at else (place.target, "")


def _label(policy: Policy | None) -> str:
    return "" if policy is None else f"{policy.name}@{policy.revision}"
