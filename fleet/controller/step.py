"""A step of a rollout, as a pure function from the rollout and the observations to the next state.

The observations are the reports of a cohort's devices, divided into canary and control.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from causeway_server.router.bundle.manifest import RolloutPlan, position

from ..rollout.rollout import RUNNING, Rollout, apply, expire, look, look_due
from ..rollout.settings import MINUTES_OF_DAY, MaintenanceWindow, RolloutEvent, RolloutSettings, RolloutState, is_silent
from ..rollout.verdict import Observations, Verdict
from ..store.devices import Device
from ..store.rollouts import METADATA_ROLLBACK, ReportedPlan
from ..store.tables import COUNTERS, LATENCY_COLUMNS
from ..store.telemetry import Counts
from .checks import Check

S, E = RolloutState, RolloutEvent
CHECKED = (S.LINT, S.REPLAY)
UNPUBLISHED = (S.DRAFT, *CHECKED)


class RolloutObservations(msgspec.Struct, frozen=True):
    """The observations for a step of a rollout."""

    devices: tuple[Device, ...] = ()  # all devices of the cohort
    counts: Counts = {}  # requests since the previous look
    windows: tuple[MaintenanceWindow, ...] = ()  # the cohort's maintenance windows


def positions_of(salt: str, devices: Iterable[Device], since: float) -> list[int]:
    """Return the positions of the participating devices that have reported since `since`."""
    return [position(salt, device.id) for device in devices if not device.left_out and device.last_seen >= since]


def observe(rollout: Rollout, situation: RolloutObservations, now: float) -> tuple[Observations, Observations]:
    """Return the observations of canary and control. Devices that were reachable at the stage's start take part.

    1. A member that runs the bundle, or went silent, is in the canary. Its requests under the bundle count if it has
       run it since the previous look; a device that has just changed was observed for a shorter time than the control.
    2. A member that rolled the bundle back counts as rolled back.
    3. Any other member is pending, if its maintenance window is open.
    4. A device outside the share is in the control, unless it runs the bundle; its requests under other bundles count.
    """
    silence_s = rollout.settings.silence_s
    reachable = [
        device for device in situation.devices if not device.left_out and device.last_seen >= rollout.began - silence_s
    ]
    canary: list[Device] = []
    control: list[Device] = []
    rolled_back = pending = 0
    for device in reachable:
        silent = is_silent(device.last_seen, rollout.began, now, silence_s)
        if position(rollout.salt, device.id) >= rollout.share:
            if device.running != rollout.to_bundle:
                control.append(device)  # (4)
        elif rollout.to_bundle in device.quarantined:
            rolled_back += 1  # (2)
        elif silent or device.running == rollout.to_bundle:
            canary.append(device)  # (1)
        elif _window_is_open(device, situation.windows, now):
            pending += 1  # (3)
    canary_counts, others = _sums(situation.counts, rollout.to_bundle)
    canary_counts = {
        device.id: canary_counts[device.id]
        for device in canary
        if device.running_since <= rollout.looked and device.id in canary_counts
    }
    return (
        _observations(canary, canary_counts, rollout, now, rolled_back, pending),
        _observations(control, others, rollout, now),
    )


def still_to_revert(rollout: Rollout, devices: Iterable[Device], now: float) -> int:
    """Return how many reachable devices run an aborted bundle; 0 if there is none to return to."""
    if rollout.from_bundle is None:
        return 0
    return sum(
        device.running == rollout.to_bundle
        and not device.left_out
        and now - device.last_seen <= rollout.settings.silence_s
        for device in devices
    )


def ahead_count(reports: Iterable[ReportedPlan], known: frozenset[str]) -> int:
    """Return how many devices of a cohort know newer plans or metadata than the store, as after a restored backup.

    1. They follow a plan of a rollout that the store does not know.
    2. They refuse the published metadata as older than what they verified before.
    3. A single device cannot stop a fleet: the number must be at least two and at least a twentieth of the devices.

    `known`: ids of the store's rollouts, and ids and `METADATA_ROLLBACK` that an operator has acknowledged.
    """
    reports = list(reports)
    total = sum(report.devices for report in reports)
    ahead = sum(
        report.devices
        for report in reports
        if (report.rollout and report.rollout not in known) or (report.refuses and METADATA_ROLLBACK not in known)
    )
    return ahead if ahead >= max(2, total / 20) else 0  # (3)


def _window_is_open(device: Device, windows: Sequence[MaintenanceWindow], now: float) -> bool:
    """Return whether a window is open now by the device's own clock, extrapolated from its last report."""
    if not windows:
        return True
    days, minute = divmod(device.minute + int((now - device.last_seen) // 60), MINUTES_OF_DAY)
    weekday = (device.weekday - 1 + days) % 7 + 1
    return any(window.is_open(weekday, minute) for window in windows)


def _sums(counts: Counts, bundle: str) -> tuple[dict[str, NDArray[np.int64]], dict[str, NDArray[np.int64]]]:
    """Return the counters by device: those under this bundle, and the sum of all others."""
    own: dict[str, NDArray[np.int64]] = {}
    others: dict[str, NDArray[np.int64]] = {}
    for (device, under), values in counts.items():
        side, added = own if under == bundle else others, np.asarray(values, dtype=np.int64)
        side[device] = side[device] + added if device in side else added
    return own, others


def _observations(
    devices: Sequence[Device],
    counts: Mapping[str, NDArray[np.int64]],
    rollout: Rollout,
    now: float,
    rolled_back: int = 0,
    pending: int = 0,
) -> Observations:
    nothing = np.zeros(len(COUNTERS), dtype=np.int64)
    rows = np.array([counts.get(device.id, nothing) for device in devices], dtype=np.int64).reshape(
        len(devices), len(COUNTERS)
    )
    silence_s = rollout.settings.silence_s
    return Observations(
        requests=rows[:, 0],
        events={"errors": rows[:, 1], "degraded": rows[:, 2]},
        latency=rows[:, -len(LATENCY_COLUMNS) :],
        silent=np.array(
            [is_silent(device.last_seen, rollout.began, now, silence_s) for device in devices], dtype=np.bool_
        ),
        rolled_back=rolled_back,
        pending=pending,
    )


class Step(msgspec.Struct, frozen=True):
    """The rollout after a step. `verdict`: the verdict of the look, if there was one."""

    rollout: Rollout
    verdict: Verdict | None = None


def checked(rollout: Rollout, check: Check, devices: RolloutObservations, now: float) -> Rollout:
    """Return the rollout after LINT or REPLAY: in the next state, rejected with the first problems, or paused."""
    problems, found = check.problems, {"notes": check.notes or rollout.notes, "predictions": check.predictions}
    rollout = msgspec.structs.replace(rollout, **found)
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        return apply(rollout, E.CHECK_FAILED, now, reason="; ".join(problems[:3]) + more)
    if check.unproven:
        return apply(rollout, E.PAUSE, now, reason=check.unproven)
    positions = positions_of(rollout.salt, devices.devices, now - rollout.settings.silence_s)
    return apply(rollout, E.CHECK_PASSED, now, positions=positions)


def needs_devices(rollout: Rollout, now: float) -> bool:
    """Return whether `step` needs the devices' reports now."""
    return look_due(rollout, now) or (rollout.state is S.REVERTING and rollout.has_begun)


def step(rollout: Rollout, situation: RolloutObservations, published: RolloutPlan | None, now: float) -> Step:
    """Return the rollout after its next step.

    1. Its published plan is ahead of the store, which was therefore restored from a backup: see `caught_up`.
    2. A look is due: the rollout follows its verdict.
    3. The stage's or the soak's time is over: PAUSED.
    4. ABORTED, and published as aborted or never published: REVERTING.
    5. REVERTING, and no reachable device runs the bundle: REVERTED.
    6. Otherwise unchanged.

    `situation`: needed if `needs_devices`. `now`: Unix seconds.
    """
    ahead = caught_up(rollout, published, now)
    if ahead is not rollout:
        return Step(ahead)  # (1)
    if look_due(rollout, now):
        canary, control = observe(rollout, situation, now)
        positions = positions_of(rollout.salt, situation.devices, now - rollout.settings.silence_s)
        return Step(*look(rollout, canary, control, now, positions))  # (2)
    if rollout.state in (S.STAGE, S.SOAK):
        return Step(expire(rollout, now))  # (3)
    if rollout.state is S.ABORTED and (not rollout.has_begun or _is_published(rollout, published)):
        return Step(apply(rollout, E.REVERT, now, reason=rollout.reason))  # (4)
    if rollout.state is S.REVERTING and not still_to_revert(rollout, situation.devices, now):
        return Step(apply(rollout, E.ALL_REVERTED, now, reason=rollout.reason))  # (5)
    return Step(rollout)  # (6)


def caught_up(rollout: Rollout, published: RolloutPlan | None, now: float) -> Rollout:
    """Return the rollout in the state that its published plan shows.

    A decision is stored before its effect, so a store behind the published plans was restored from a backup.

    1. Published with a share of 0, but running in the store: the rollout had been aborted.
    2. Published with a larger share: the share is adopted, with the stage that fits it, and the rollout is paused.
    """
    if published is None or published.rollout != rollout.id or rollout.state not in (*UNPUBLISHED, *RUNNING, S.DONE):
        return rollout
    if published.share == 0:
        return apply(rollout, E.ABORT, now, reason="aborted before the store was restored from a backup")  # (1)
    if published.share <= rollout.share:
        return rollout
    shares = [stage.share for stage in rollout.settings.stages]
    stage = sum(share < published.share for share in shares)
    reason = "the store was restored from a backup, and the devices are ahead of it: resume to continue from here"
    return msgspec.structs.replace(  # (2)
        rollout,
        state=S.PAUSED,
        paused_in=S.STAGE,
        stage=min(stage, len(shares) - 1),
        share=published.share,
        began=now,
        entered=now,
        looks=0,
        looked=now,
        reason=reason,
    )


def paused_behind(rollout: Rollout, devices: int, now: float) -> Rollout:
    """Return the rollout, paused if it runs, because devices are ahead of the store."""
    if rollout.state not in (S.STAGE, S.SOAK):
        return rollout
    return apply(
        rollout,
        E.PAUSE,
        now,
        reason=f"{devices} devices are ahead of the control plane. Was it restored from a backup?",
    )


def adopted(plan: RolloutPlan, settings: RolloutSettings, now: float) -> Rollout:
    """Return the rollout of a published plan that the store lost, because it was restored from an older backup."""
    known = Rollout(plan.rollout, plan.cohort, plan.to_bundle, plan.from_bundle, plan.salt, settings, began=now)
    return caught_up(apply(known, E.SUBMIT, now), plan, now)


def _is_published(rollout: Rollout, published: RolloutPlan | None) -> bool:
    return published is not None and published.rollout == rollout.id and published.share == rollout.share
