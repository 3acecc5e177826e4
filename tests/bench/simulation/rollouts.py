"""One simulated rollout: the real life, looks and verdict of `fleet.rollout`, on simulated devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from causeway_server.fleet.rollout.rollout import Rollout, apply, look, next_look
from causeway_server.fleet.rollout.settings import RolloutEvent, RolloutSettings, RolloutStage, RolloutState
from causeway_server.fleet.rollout.verdict import Observations
from causeway_server.router.bundle.manifest import WHOLE

from .devices import Effect, SimulatedDevices, draw_devices, draw_weather, observe
from .polls import PollModel, revert_times, told_times

S, E = RolloutState, RolloutEvent
MOST_LOOKS = 100  # a stage has about ten
_SETTINGS = RolloutSettings(tuple(RolloutStage(WHOLE * percent // 100) for percent in (1, 5, 25, 50, 100)))


@dataclass(frozen=True, slots=True)
class RolloutRun:
    """How a simulated rollout went.

    Attributes:
        state: DONE, REVERTED, or PAUSED if no approver accepts inconclusive stages.
        stage: Index of the stage that was reached; the number of stages is the soak.
        pauses: Inconclusive stages.
        took_s: Until DONE, the verdict of fail, or the pause.
        exposed: Devices that ran the new bundle, or had begun to.
        reverted_s: float64 [exposed], from the verdict of fail until each reported that it runs the bundle before;
            devices that are off do so when they come back and are not in it.
        reason: Of the abort.
    """

    state: RolloutState
    stage: int
    pauses: int
    took_s: float
    exposed: int
    reverted_s: NDArray[np.float64]
    reason: str


def simulate_rollout(seed: int, devices: int, effect: Effect, *, accepts: bool = False) -> RolloutRun:
    """Simulate one rollout to its end.

    Args:
        seed: Of all chance; the same seed gives the same run.
        devices: How many.
        effect: Of the new bundle.
        accepts: An approver accepts each inconclusive stage at once, so that the rollout goes on.
    """
    rng = np.random.default_rng(seed)
    fleet = draw_devices(rng, devices, f"salt-{seed}")
    run = _Run(rng, fleet, effect)
    return run.to_the_end(seed, accepts)


class _Run:
    def __init__(self, rng: np.random.Generator, devices: SimulatedDevices, effect: Effect) -> None:
        self.rng, self.effect, self.model = rng, effect, PollModel()
        size = devices.size
        self.adopted = np.full(size, np.inf)  # when a device runs the new bundle
        self.rolls_back = rng.random(size) < effect.rolled_back
        self.silenced = rng.random(size) < effect.silenced
        self.devices = devices

    def to_the_end(self, seed: int, accepts: bool) -> RolloutRun:
        positions = self.devices.positions[self.devices.off_at > 0].tolist()
        rollout = Rollout(f"r{seed}", "simulated", "new", "old", f"salt-{seed}", _SETTINGS)
        for event in (E.SUBMIT, E.CHECK_PASSED, E.CHECK_PASSED):
            rollout = apply(rollout, event, 0.0, positions=positions)
        pauses, share, stage = 0, 0, 0
        now = watched_from = 0.0
        while rollout.state in (S.STAGE, S.SOAK):
            if rollout.share > share or rollout.began == now:
                share, watched_from = rollout.share, now
                self._tell_members(share, now)
            if rollout.looks >= MOST_LOOKS:
                raise RuntimeError(f"stage {rollout.stage} made {MOST_LOOKS} looks without an end")
            now = next_look(rollout)
            stage = rollout.stage
            rollout, _ = look(rollout, *self._observe(share, rollout.began, watched_from, now), now, positions)
            watched_from = now
            if rollout.state is S.PAUSED:
                pauses += 1
            if rollout.state is S.PAUSED and accepts:
                rollout = apply(rollout, E.ACCEPT, now, positions=positions)
        return self._ended(rollout, stage, pauses, now)

    def _tell_members(self, share: int, now: float) -> None:
        fresh = (self.devices.positions < share) & (self.devices.off_at > now) & np.isinf(self.adopted)
        count = int(fresh.sum())
        told = told_times(self.rng, count, self.devices.size, self.model)
        # Download, checks on the device, and the swap.
        self.adopted[fresh] = now + told + self.rng.lognormal(np.log(40.0), 0.6, count)
        lost = fresh & self.silenced
        self.devices.off_at[lost] = np.minimum(self.devices.off_at[lost], self.adopted[lost])

    def _observe(self, share: int, began: float, watched_from: float, now: float) -> tuple[Observations, Observations]:
        devices = self.devices
        reachable = (devices.off_at > began - _SETTINGS.silence_s) & ~devices.cloned
        members = reachable & (devices.positions < share)
        tried = members & (self.adopted <= watched_from)
        undone = tried & self.rolls_back
        weather = draw_weather(self.rng, devices.size)
        window, silence_s = (watched_from, now), _SETTINGS.silence_s
        canary, control = (
            observe(self.rng, devices, np.flatnonzero(chosen), window, weather, silence_s, effect)
            for chosen, effect in ((tried & ~undone, self.effect), (reachable & (devices.positions >= share), None))
        )
        waiting = int((members & (self.adopted > now)).sum())
        return replace(canary, rolled_back=int(undone.sum()), pending=waiting), control

    def _ended(self, rollout: Rollout, stage: int, pauses: int, now: float) -> RolloutRun:
        exposed = ~np.isinf(self.adopted)
        reverted = np.empty(0)
        if rollout.state is S.ABORTED:
            back = exposed & (self.devices.off_at > now)
            reverted = revert_times(self.rng, int(back.sum()), self.devices.size, self.model)
            for event in (E.REVERT, E.ALL_REVERTED):
                rollout = apply(rollout, event, now, reason=rollout.reason)
        return RolloutRun(rollout.state, stage, pauses, now, int(exposed.sum()), reverted, rollout.reason)
