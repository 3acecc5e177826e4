"""Detect replays, repeated telemetry and clones by the boot ids and sequence numbers of a device's messages."""

from __future__ import annotations

import msgspec

from ...rollout.boxes import is_cloned

_BOOTS = 16
_ARRIVALS = 8


class BootHistory(msgspec.Struct, frozen=True, omit_defaults=True):
    """The last boots of a device.

    Attributes:
        arrivals: The boot ids of its reports in order of arrival, repetitions left out, the last 8.
        reports: The newest `seq` of a status report of each of the last 16 boots.
        telemetry: The newest `seq` of telemetry of each of the last 16 boots.
    """

    arrivals: tuple[str, ...] = ()
    reports: dict[str, int] = {}
    telemetry: dict[str, int] = {}

    @property
    def cloned(self) -> bool:
        """Whether two machines report with this identity."""
        return is_cloned(self.arrivals)

    def with_report(self, boot: str, seq: int) -> BootHistory | None:
        """Return the history after a status report, or None if it is a replay."""
        if seq <= self.reports.get(boot, -1):
            return None
        arrivals = self.arrivals
        if not arrivals or arrivals[-1] != boot:
            arrivals = (*arrivals, boot)[-_ARRIVALS:]
        return msgspec.structs.replace(self, arrivals=arrivals, reports=_noted(self.reports, boot, seq))

    def with_telemetry(self, boot: str, seq: int) -> BootHistory | None:
        """Return the history after telemetry, or None if it was counted before."""
        if seq <= self.telemetry.get(boot, -1):
            return None
        return msgspec.structs.replace(self, telemetry=_noted(self.telemetry, boot, seq))


def read_history(text: str) -> BootHistory:
    return msgspec.json.decode(text, type=BootHistory)


def write_history(history: BootHistory) -> str:
    return msgspec.json.encode(history).decode()


def _noted(seqs: dict[str, int], boot: str, seq: int) -> dict[str, int]:
    """The newest boot is last; the oldest is forgotten."""
    kept = {name: value for name, value in seqs.items() if name != boot}
    return dict([*kept.items(), (boot, seq)][-_BOOTS:])
