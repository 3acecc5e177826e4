"""Where a request is answered: recorded, or expected of a decision by what the record shows about its targets.

A decision lists attempts; which of them answers hangs on what happens then. The record is the evidence:

1. A target that gave way in the record (it failed, and another one answered or none) gives way again.
2. A target that answered, or was not tried, answers.
3. A handoff compares the recorded confidence. If none was measured over as many tokens, the outcome is unknown.
"""

from __future__ import annotations

from typing import Final

import msgspec

from ...types import AttemptPlan, AttemptRecord, Decision, DecisionRecord, Handoff, Location, Target

CONFIDENCE: Final = "confidence"
"""What an outcome hangs on if a handoff cannot be replayed. Not a signal: it is measured after the decision."""


class Place(msgspec.Struct, frozen=True, order=True):
    """Where a request is answered. `at` "": by the cache, or not at all, which `target` says."""

    target: str
    at: Location | str = ""
    model: str = ""

    def __str__(self) -> str:
        return f"{self.target} ({self.at})" if self.at else self.target


CACHE: Final = Place("cache")
NO_ANSWER: Final = Place("no answer")


class Expected(msgspec.Struct, frozen=True):
    """One possible outcome of a request.

    Attributes:
        place: Where it is answered.
        rule: The route that decides; "" if none does.
        usd_per_1k_tokens: Price of the target.
        left: Whether its content goes to the cloud.
        may_leave: Whether the decision has a cloud target at all: it may go there after a failure or a handoff.
    """

    place: Place
    rule: str = ""
    usd_per_1k_tokens: float = 0.0
    left: bool = False
    may_leave: bool = False


def recorded(record: DecisionRecord) -> Expected:
    """Return what happened, by the record."""
    outcome, decision = record.outcome, record.decision
    plans = () if decision is None else decision.attempts
    name = outcome.target
    if outcome.status == "cancelled" and outcome.attempts:
        name = outcome.attempts[-1].target  # the client left while this target worked
    target = next((plan.target for plan in plans if plan.target.name == name), None)
    place, price = NO_ANSWER, 0.0
    if outcome.route == "cache":
        place = CACHE
    elif target is not None:
        place, price = _place(target), target.usd_per_1k_tokens
    return Expected(
        place=place,
        rule="" if decision is None else decision.rule,
        usd_per_1k_tokens=price,
        left=any(attempt.at == "cloud" for attempt in outcome.attempts),
        # Of a hit no decision is recorded: it may have had a target in the cloud.
        may_leave=_may_leave(plans) or outcome.cache == "hit",
    )


def expected(decision: Decision | None, record: DecisionRecord) -> tuple[Expected, ...]:
    """Return the outcome that the record shows for this decision; several if it hangs on a confidence."""
    if decision is None:
        return (Expected(NO_ANSWER),)
    plans, evidence = decision.attempts, _evidence(record)
    may_leave = _may_leave(plans)
    found: list[Expected] = []
    left = False
    for plan in plans:
        left = left or plan.target.at == "cloud"
        shown = evidence.get(_place(plan.target))
        if shown is not None and shown.ended:
            break
        answers = _answers(plan, shown)
        if answers is not False:
            found.append(Expected(_place(plan.target), decision.rule, plan.target.usd_per_1k_tokens, left, may_leave))
        if answers:
            return tuple(found)
    return (*found, Expected(NO_ANSWER, decision.rule, left=left, may_leave=may_leave))


class _Evidence(msgspec.Struct, frozen=True):
    attempt: AttemptRecord
    handoff: Handoff | None
    gave_way: bool  # another target was tried, or none was left
    ended: bool  # the request ended here without an answer: its deadline passed, it was invalid


def _evidence(record: DecisionRecord) -> dict[Place, _Evidence]:
    """Return the record's attempts by place. Of two at one place, the last resort after a handoff is left out."""
    if record.decision is None:
        return {}
    outcome, plans = record.outcome, {}
    for plan in reversed(record.decision.attempts):
        plans[plan.target.name] = plan
    answered = outcome.target if outcome.route in ("edge", "cloud") else ""
    untried = plans.keys() - {attempt.target for attempt in outcome.attempts}
    found: dict[Place, _Evidence] = {}
    for attempt in outcome.attempts:
        known = plans.get(attempt.target)
        if known is not None:
            failed = attempt.state in ("failed", "timed_out") and attempt.target != answered
            ended = failed and attempt is outcome.attempts[-1] and bool(untried)
            found.setdefault(_place(known.target), _Evidence(attempt, known.handoff, failed and not ended, ended))
    return found


def _answers(plan: AttemptPlan, evidence: _Evidence | None) -> bool | None:
    """Return whether the attempt answers; None if that hangs on a confidence that was not measured."""
    handed_off = evidence is not None and evidence.attempt.state == "handed_off"
    if evidence is not None and evidence.gave_way and not handed_off:  # (1)
        return False
    if plan.handoff is None:  # (2)
        return True
    if evidence is None or evidence.handoff is None or _held_back(evidence.handoff) != _held_back(plan.handoff):
        return None
    confidence = evidence.attempt.confidence  # (3); without one a handoff keeps the answer
    return confidence is None or confidence.score >= plan.handoff.below


def _held_back(handoff: Handoff) -> tuple[int, float | None]:
    return handoff.after_tokens, handoff.within_s


def _place(target: Target) -> Place:
    return Place(target.name, target.at, target.model)


def _may_leave(plans: tuple[AttemptPlan, ...]) -> bool:
    return any(plan.target.at == "cloud" for plan in plans)
