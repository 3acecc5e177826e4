"""Decision records as a device would write them: decided by `decide`, with an outcome that the test chooses."""

from __future__ import annotations

import msgspec

from causeway_server.router.decision.decide import decide, features_of
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.policy.signals import ON_DEMAND, TargetAvailability
from causeway_server.router.prices import PICO_USD
from causeway_server.router.types import (
    AUTO,
    AttemptRecord,
    CloudSignals,
    Confidence,
    Decision,
    DecisionRecord,
    DeviceSetup,
    EdgeSignals,
    Estimates,
    Message,
    Outcome,
    Prefer,
    Request,
    RoutingHints,
    Sampling,
    Snapshot,
    SpendSignals,
    Usage,
)

DEVICE = Snapshot(
    edge=EdgeSignals(queue=0, tokens_per_s=40.0, loaded=True),
    cloud=CloudSignals(reachable=True, rtt_ms=30.0, breaker="closed"),
    spend=SpendSignals(0.0, 0.0, 0.0),
    setup=DeviceSetup(engine=True, cloud=True),
)

NOTHING_COUNTED = Estimates()


def ask(
    *, tags: tuple[str, ...] = (), model: str = AUTO, prefer: Prefer | None = None, temperature: float | None = 0.5
) -> Request:
    return Request(
        kind="chat",
        model=model,
        messages=(Message("user", "switch the light on"),),
        sampling=Sampling(temperature=temperature),
        hints=RoutingHints(prefer=prefer, tags=tags, client="till"),
    )


def on_device(snapshot: Snapshot, policy: Policy) -> Snapshot:
    """The snapshot that a device under this policy takes of these signals."""
    setup = snapshot.setup or DeviceSetup(engine=True, cloud=True)
    setup = msgspec.structs.replace(setup, temperatures=policy.model_temperatures)
    availability = TargetAvailability(policy.targets, setup)
    down = availability.down(snapshot.edge, snapshot.cloud, snapshot.clouds)
    return msgspec.structs.replace(snapshot, setup=setup, down=down, absent=availability.absent)


def record_of(
    policy: Policy,
    request: Request | None = None,
    snapshot: Snapshot = DEVICE,
    estimates: Estimates = NOTHING_COUNTED,
    *,
    number: int = 0,
    record_all: bool = False,
    total_ms: float = 100.0,
    confidence: float | None = None,
    fails: tuple[str, ...] = (),
) -> DecisionRecord:
    """The record of a request that a device under `policy` answered.

    Args:
        confidence: of the first attempt, which hands off if its plan says so.
        fails: names of targets that fail.
    """
    request = request or ask()
    taken = on_device(snapshot, policy)
    needs = policy.route_needs if request.model == AUTO else policy.constraint_needs
    unrecorded = () if record_all else tuple(name for name in ON_DEMAND if name not in needs.signals)
    known = Estimates(
        None if ON_DEMAND[0] in unrecorded else estimates.prompt_tokens,
        None if ON_DEMAND[1] in unrecorded else estimates.quality,
    )
    decision = decide(policy, request, taken, known)
    return DecisionRecord(
        id=f"d{number}",
        created=1_000_000.0 + number,
        request=features_of(request),
        estimates=known,
        unrecorded=unrecorded,
        snapshot=taken,
        decision=decision,
        outcome=_outcome(decision, total_ms, confidence, fails),
    )


def _outcome(decision: Decision, total_ms: float, confidence: float | None, fails: tuple[str, ...]) -> Outcome:
    measured = None if confidence is None else Confidence(8, confidence, -0.1, 0.5, 0.4)
    attempts: list[AttemptRecord] = []
    for plan in decision.attempts:
        target = plan.target
        if target.name in fails:
            attempts.append(AttemptRecord(target.name, target.at, "failed", 0.0, error="cloud_failed"))
        elif plan.handoff is not None and measured is not None and measured.score < plan.handoff.below:
            attempts.append(
                AttemptRecord(target.name, target.at, "handed_off", 0.0, confidence=measured, error="low_confidence")
            )
        else:
            shown = measured if plan.handoff is not None else None
            attempts.append(AttemptRecord(target.name, target.at, "done", 0.0, 10.0, total_ms, 50, shown))
            usage = Usage(prompt_tokens=50, completion_tokens=50)
            usd = Usage(completion_tokens=100).pico_usd(target.price) / PICO_USD
            return Outcome(
                "ok", 200, target.at, target.name, target.model, decision.rule, attempts=tuple(attempts), usd=usd,
                ttft_ms=10.0, total_ms=total_ms, usage=usage, finish_reason="stop",
            )  # fmt: skip
    return Outcome("error", 503, "none", attempts=tuple(attempts), error="no_route", total_ms=1.0)
