"""How the cloud degrades. Without `tiers` there is no fallback; without a key file no answer is truncated."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated

import msgspec
from msgspec import Meta

from causeway_server.router.config import Pause, Positive, Seconds
from causeway_server.router.errors import ConfigError

Share = Annotated[float, Meta(gt=0, le=1)]


class ShareRamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a tier's share of the movable requests goes down and comes back.

    Under stress the share is multiplied by `decrease_factor` once per two `stable_for_s`: the effect of a step
    shows only then, and requests that would wait too long go to another tier anyway. Requests that are displaced by
    more urgent ones lose share each `step_interval_s`. A tier that responds keeps at least `min_share`: these
    requests show how it is. A tier that was stable for `stable_for_s` and has capacity gets `increase_step` back
    each `step_interval_s`. A stable but busy tier undoes one `decrease_factor` each `busy_step_interval_s`, for a
    lasting load would only push it down again. After each relapse both pauses double, up to `max_backoff_s`, and
    the next step goes half the way to the share that was too much.
    """

    stable_for_s: Pause = 1.0  # how long a tier must be stable before its share increases
    step_interval_s: Seconds = 0.2  # between two steps
    decrease_factor: Annotated[float, Meta(gt=0, lt=1)] = 0.7  # multiplies the share at each step under stress
    increase_step: Share = 0.25  # added to the share at each stable step
    min_share: Share = 0.05  # lower bound for a tier that responds
    busy_step_interval_s: Seconds = 3.0  # how often a stable but busy tier undoes one `decrease_factor`
    max_backoff_s: Seconds = 60.0  # both pauses double after each relapse, up to this


class DegradationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tiers: tuple[str, ...] = ()  # best first; a request starts at the tier that it names
    share_ramp: ShareRamp = ShareRamp()
    # Times a tier's ttft_objective_s without a token, after which the next tier is tried.
    first_token_timeout_factor: Annotated[float, Meta(ge=1)] = 3.0
    critical_tenants: tuple[str, ...] = ()  # all their requests are critical, whatever their header or token says
    continue_key_file: str = ""  # Fernet keys, one a line: the first signs, all verify; "": no answer is truncated
    continue_ttl_s: Seconds = 600.0  # validity of a continue token
    truncate_to_tokens: Positive = 128  # length of a truncated answer
    warm_up_after_idle_s: Pause = 60.0  # a tier that was idle for so long answers a tiny request; 0: never

    def check(self, tiers: Collection[str]) -> None:
        """Raises ConfigError."""
        for at, name in enumerate(self.tiers):
            if name not in tiers:
                raise ConfigError(f"there is no tier {name!r}", where=f"degradation.tiers[{at}]")
            if name in self.tiers[:at]:
                raise ConfigError(f"{name!r} is listed twice", where=f"degradation.tiers[{at}]")
