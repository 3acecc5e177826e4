"""The box's reports of its state to its control plane, one after each change."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from router.bundle.protocol import BoxState, StatusReport

from ...version import daemon_version


class AgentReport(msgspec.Struct, frozen=True, kw_only=True):
    """The agent's part of a `StatusReport`, whose attributes are explained there."""

    state: BoxState = BoxState.IDLE
    running: str | None = None
    wanted: str | None = None
    rollout: str = ""
    code: str = ""
    reason: str = ""
    quarantined: tuple[str, ...] = ()
    unproven: bool = False
    since: float = 0.0


class StatusWriter:
    """Makes reports, each with a higher number."""

    def __init__(self, device: str, boot: str, unix: Callable[[], float]) -> None:
        self._device = device
        self._boot = boot
        self._unix = unix
        self._seq = 0
        self._daemon = daemon_version()

    def report(self, agent: AgentReport) -> StatusReport:
        now = self._unix()
        local = time.localtime(now)
        self._seq += 1
        return StatusReport(
            device=self._device,
            boot=self._boot,
            seq=self._seq,
            sent=now,
            daemon=self._daemon,
            local_weekday=local.tm_wday + 1,
            local_minute=local.tm_hour * 60 + local.tm_min,
            **msgspec.structs.asdict(agent),
        )
