"""What an operator says about degrading. Without `tiers` nobody falls; without a key no answer is shortened."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

import msgspec
from msgspec import Meta

from router.errors import ConfigError

Seconds = Annotated[float, Meta(gt=0)]
Pause = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(gt=0, le=1)]
Positive = Annotated[int, Meta(ge=1)]


class ShareRamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a tier's share of the work goes down and comes back.

    Down by the factor `back_off` for each two `dwell_s` under stress: what was done shows only then, and who would
    wait too long goes elsewhere anyway. Work that gives way to more urgent work does so each `step_s`. Never below
    `floor` while the tier lives: what it still gets shows how it is. Back by `grow` for each `step_s` once it has been
    well for `dwell_s` and has room; a tier that is well and busy takes one step back (by `back_off`) each `probe_s`,
    for a load that goes on would only push it down again. Each time that it does, both pauses are twice as long, up to
    `longest_s`, and the next step goes half the way to the share that was too much.
    """

    dwell_s: Pause = 1.0
    step_s: Seconds = 0.2
    back_off: Annotated[float, Meta(gt=0, lt=1)] = 0.7
    grow: Share = 0.25
    floor: Share = 0.05
    probe_s: Seconds = 3.0
    longest_s: Seconds = 60.0


class DegradationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tiers: tuple[str, ...] = ()  # best first; the tier that a caller names is where it starts
    pace: ShareRamp = ShareRamp()
    patience: Annotated[float, Meta(ge=1)] = (
        3.0  # times a tier's ttft_objective_s without a token: the next one is asked
    )
    critical_tenants: tuple[str, ...] = ()  # as if each request of theirs said x-causeway-critical
    continue_key_file: str = ""  # Fernet keys, a line each: the first signs, all are believed; "": nothing is shortened
    continue_ttl_s: Seconds = 600.0
    partial_tokens: Positive = 128  # a shortened answer's length
    warm_after_s: Pause = 60.0  # a tier that was idle for so long answers a tiny request; 0: never

    def check(self, tiers: Collection[str]) -> None:
        """Raises ConfigError."""
        for at, name in enumerate(self.tiers):
            if name not in tiers:
                raise ConfigError(f"there is no tier {name!r}", where=f"ladder.tiers[{at}]")
            if name in self.tiers[:at]:
                raise ConfigError(f"{name!r} is there twice", where=f"ladder.tiers[{at}]")
