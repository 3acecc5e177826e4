"""What the commands print of a fleet and its rollouts, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from router.bundle.rollout import WHOLE

from ..repository.wording import bundle_name, table

_MEMBERS = {
    "commit": "run it",
    "trial": "try it",
    "waiting": "wait to change",
    "quarantine": "rolled it back",
    "silent": "are silent",
    "held": "are held",
    "pinned": "are pinned",
}
"""Words for the states of members; another is a step on the way, by its own name."""
_UNDONE = ("aborted", "reverting", "reverted")


class CohortStatus(msgspec.Struct, frozen=True):
    """The part of `GET /v1/fleet` that is shown of a cohort."""

    name: str
    boxes: int
    recently_seen: int
    running: dict[str, int]
    rollout: str | None = None
    ahead: int = 0


class FleetStatus(msgspec.Struct, frozen=True):
    name: str
    cohorts: tuple[CohortStatus, ...]
    problems: tuple[str, ...] = ()


class RolloutStatus(msgspec.Struct, frozen=True):
    """The part of a rollout that is shown."""

    id: str
    cohort: str
    state: str
    stage: int
    stages: tuple[int, ...]
    share: int
    began: float
    reason: str
    to_bundle: str
    from_bundle: str | None
    author: str = ""


def overview(fleet: FleetStatus, rollouts: Sequence[RolloutStatus]) -> Iterator[str]:
    cohorts = [(one.name, str(one.boxes), str(one.recently_seen), _running(one.running)) for one in fleet.cohorts]
    yield from table(("cohort", "boxes", "seen in 15 min", "running"), cohorts)
    for one in fleet.cohorts:
        if one.ahead:
            yield f"{one.name}: {one.ahead} know more than the control plane: was it restored from a backup?"
    if rollouts:
        yield ""
    rows = [
        (one.id, one.cohort, bundle_name(one.to_bundle), state_text(one), percent(one.share), one.reason)
        for one in rollouts
    ]
    yield from table(("rollout", "cohort", "bundle", "state", "share", "why"), rows)


def _running(boxes: Mapping[str, int]) -> str:
    most_first = sorted(boxes.items(), key=lambda pair: -pair[1])
    return ", ".join(f"{bundle_name(bundle)} on {count}" for bundle, count in most_first)


def rollout_line(rollout: RolloutStatus) -> str:
    reason = f": {rollout.reason}" if rollout.reason else ""
    where = f"{bundle_name(rollout.to_bundle)} {state_text(rollout)}, {percent(rollout.share)}"
    return f"{rollout.id} {rollout.cohort} {where}{reason}"


def state_text(rollout: RolloutStatus) -> str:
    """The state, with the check or stage that it is in or is paused in; after the last stage comes the soak."""
    stages = len(rollout.stages)
    where = f"stage {rollout.stage + 1} of {stages}" if rollout.stage < stages else "soak"
    if rollout.state == "paused":
        return f"{where if rollout.began else 'replay'} paused"
    return where if rollout.state == "stage" else rollout.state


def notes(rollout: RolloutStatus) -> Iterator[str]:
    """Yield what is not obvious about this state."""
    if rollout.state in _UNDONE and rollout.from_bundle is None:
        yield "note: the cohort has no bundle before it; boxes that run it keep it until a rollout of a better one"
    planned = rollout.stages[min(rollout.stage, len(rollout.stages) - 1)]
    if rollout.share > planned:
        yield f"note: {percent(planned)} holds no box that was seen lately, so the share was raised to the first one"


def detail_lines(detail: Mapping[str, Any]) -> Iterator[str]:
    """Yield a rollout, its boxes, its last look, and what happened; `detail`: of `GET /v1/rollouts/ID`."""
    rollout = msgspec.convert(detail, RolloutStatus)
    yield rollout_line(rollout)
    yield from (f"  {note}" for note in notes(rollout))
    members = [f"{boxes} {_MEMBERS.get(state, state)}" for state, boxes in sorted(detail["members"].items())]
    yield f"  boxes in the share: {', '.join(members) or 'none'}"
    yield from (f"  {line}" for line in _last_look(detail["looks"]))
    for event in detail["events"]:
        at = datetime.fromtimestamp(event["at"], UTC)
        yield f"  {at:%Y-%m-%d %H:%M:%S}Z {event['actor']} {event['action']} {event['reason']}".rstrip()


def _last_look(looks: list[dict[str, Any]]) -> Iterator[str]:
    if looks:
        yield f"look {len(looks)}: {looks[-1]['outcome']}"
        yield from (f"  {metric['outcome']:<12}  {metric['reason']}" for metric in looks[-1]["metrics"])


def percent(share: int) -> str:
    return f"{share * 100 / WHOLE:g} %"
