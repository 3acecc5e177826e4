"""For any policy and request: replaying a record under the policy that made it gives the recorded decision."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.router.checks.possible import PolicyReplay
from causeway_server.router.checks.replay import replay
from causeway_server.router.decision.decide import decide
from causeway_server.router.decision.features import request_of
from causeway_server.router.policy.compiled import parse_policy
from causeway_server.router.types import (
    AUTO,
    CloudSignals,
    Decision,
    DecisionRecord,
    DeviceSetup,
    DeviceSignals,
    EdgeSignals,
    Estimates,
    NowSignals,
    Prefer,
    Request,
    Snapshot,
    SpendSignals,
)

from .recorded import ask, on_device, record_of

pytestmark = pytest.mark.slow

CONDITIONS = (
    '"private" in request.tags',
    "request.prompt_tokens < 48",
    "request.prompt_tokens < 48 || device.temperature_c > 80.0",
    "edge.quality > 0.5 && cloud.reachable",
    "has(edge.quality) && edge.quality > 0.5",
    "!has(device.battery) || device.battery < 0.2",
    "request.temperature == 0.0",
    "request.n > 1 || request.stream",
    "edge.queue > 2",
    "spend.usd_today >= 1.0",
    "now.hour >= 22 || now.hour < 6",
    'request.prefer == "prefer_cloud"',
    "request.deadline_ms < 1000",
    "1 / request.n > 5",
)
TARGETS = ("small", "tiny", "large", "medium")
PREFERENCES: tuple[Prefer | None, ...] = (None, "only_on_device", "prefer_on_device", "prefer_cloud", "only_cloud")


@st.composite
def policy_texts(draw: st.DrawFn) -> str:
    lines = ["version: 1", "name: any", "targets:"]
    for name, at in zip(TARGETS, ("edge", "edge", "cloud", "cloud"), strict=True):
        temperature = draw(st.sampled_from(["", ", temperature: 0", ", temperature: 0.7"]))
        lines.append(f"  {name}: {{at: {at}, model: m-{name}{temperature}}}")
    constraints = draw(st.lists(st.sampled_from(CONDITIONS), max_size=2, unique=True))
    if constraints:
        lines.append("constraints:")
    for number, condition in enumerate(constraints):
        lines.append(f"  - {{name: c{number}, keep: on_device, when: '{condition}'}}")
    lines.append("routes:")
    conditions = draw(st.lists(st.sampled_from(CONDITIONS), max_size=4, unique=True))
    for number, condition in enumerate(conditions):
        lines.append(f"  - {{name: r{number}, use: [{_use(draw)}], when: '{condition}'{_handoff(draw)}}}")
    lines.append(f"  - {{name: last, use: [{_use(draw)}]}}")
    return "\n".join(lines) + "\n"


def _use(draw: st.DrawFn) -> str:
    names = draw(st.permutations(TARGETS))
    between = [name for name in names if name not in ("small", "large")]
    return ", ".join(["small", *between[: draw(st.integers(0, 2))], "large"])


def _handoff(draw: st.DrawFn) -> str:
    return draw(st.sampled_from(["", ", handoff: {after_tokens: 8, below: 0.5}"]))


@st.composite
def requests(draw: st.DrawFn) -> Request:
    request = ask(
        tags=draw(st.sampled_from([(), ("private",), ("a", "b")])),
        model=draw(st.sampled_from([AUTO, AUTO, "small", "m-large"])),
        prefer=draw(st.sampled_from(PREFERENCES)),
        temperature=draw(st.sampled_from([None, 0.0, 0.9])),
    )
    return msgspec.structs.replace(request, n=draw(st.integers(1, 3)), stream=draw(st.booleans()))


def _maybe(values: st.SearchStrategy[float]) -> st.SearchStrategy[float | None]:
    return st.one_of(st.none(), values)


snapshots = st.builds(
    Snapshot,
    device=st.builds(DeviceSignals, temperature_c=_maybe(st.floats(0, 100)), battery=_maybe(st.floats(0, 1))),
    edge=st.builds(EdgeSignals, queue=st.integers(0, 5), loaded=st.booleans()),
    cloud=st.builds(
        CloudSignals,
        reachable=st.sampled_from([None, True, False]),
        breaker=st.sampled_from(["closed", "open"]),
        unavailable_models=st.sampled_from([(), ("m-large",)]),
    ),
    spend=st.builds(SpendSignals, st.floats(0, 5), st.floats(0, 5), st.floats(0, 5)),
    now=st.builds(NowSignals, hour=st.integers(0, 23), weekday=st.just(1), minute=st.just(0), unix=st.just(1)),
    setup=st.builds(DeviceSetup, engine=st.booleans(), cloud=st.booleans()),
)
estimates = st.builds(Estimates, _maybe(st.floats(0, 100)).map(lambda one: None if one is None else int(one)),
                      _maybe(st.floats(0, 1)))  # fmt: skip


@given(
    policy_texts(), requests(), snapshots, estimates, st.booleans(), st.floats(0, 1), st.sampled_from([(), ("small",)])
)
def test_the_recorded_decision_comes_again(
    text: str,
    request: Request,
    snapshot: Snapshot,
    counted: Estimates,
    record_all: bool,
    confidence: float,
    fails: tuple[str, ...],
) -> None:
    """The device knows its models' temperatures, the replay has only the file; the record travels as JSON."""
    on_device = parse_policy(text, model_temperature=lambda _: 0.3)
    record = record_of(on_device, request, snapshot, counted, record_all=record_all, confidence=confidence, fails=fails)
    travelled = msgspec.json.decode(msgspec.json.encode(record), type=DecisionRecord)
    elsewhere = parse_policy(text)
    possible = PolicyReplay(elsewhere).possible(travelled, request_of(travelled.request))
    assert possible.decisions == (record.decision,)
    assert (possible.hangs_on, possible.constraint) == ((), "")
    report = replay([travelled], elsewhere)
    assert (report.unchanged, report.leaving, report.unknown) == (1, (), ())
    assert report.cost.before_usd == report.cost.after_least_usd == report.cost.after_most_usd


@given(policy_texts(), policy_texts(), requests(), snapshots, estimates)
def test_unrecorded_signals_never_rule_out_what_the_device_would_do(
    old: str, new: str, request: Request, snapshot: Snapshot, counted: Estimates
) -> None:
    """What the device decides, which knows every signal, is among what is possible by a record without some."""
    old_policy, new_policy = (parse_policy(text, model_temperature=lambda _: 0.3) for text in (old, new))
    truth = decide(new_policy, request, on_device(snapshot, new_policy), counted)
    record = record_of(old_policy, request, snapshot, counted)
    elsewhere = parse_policy(new)
    possible = PolicyReplay(elsewhere).possible(record, request_of(record.request))
    assert _plan(truth) in [_plan(one) for one in possible.decisions if one is not None]
    wholly = record_of(old_policy, request, snapshot, counted, record_all=True)
    if replay([wholly], elsewhere).leaving:
        report = replay([record], elsewhere)
        assert report.leaving or report.unknown, "what leaves with every signal is at least unknown without"


def _plan(decision: Decision) -> tuple[str, list[tuple[str, object]]]:
    return decision.rule, [(plan.target.name, plan.handoff) for plan in decision.attempts]
