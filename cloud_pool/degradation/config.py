"""Configuration of degradation. Without `tiers` there is no fallback."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from causeway_server.router.config import Pause, Positive, Seconds
from causeway_server.router.errors import ConfigError

Share = Annotated[float, Meta(gt=0, le=1)]


class ShareRamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The rules by which a tier's share of the movable requests goes down and comes back.

    Under stress the share is multiplied by `decrease_factor` once per two `stable_for_s`: the effect of a step
    shows only then, and requests that would wait too long go to another tier anyway. Requests that are displaced by
    more urgent ones lose share each `step_interval_s`. A tier that responds keeps at least `min_share`, because these
    requests show its state. A tier that was stable for `stable_for_s` and has capacity gets `increase_step` back each
    `step_interval_s`. A stable but busy tier undoes one `decrease_factor` each `busy_step_interval_s`, because a
    lasting load would soon lower its share again. After each relapse both pauses double, up to `max_backoff_s`, and the
    next step goes half the way to the share that was too high.
    """

    stable_for_s: Pause = 1.0
    step_interval_s: Seconds = 0.2
    decrease_factor: Annotated[float, Meta(gt=0, lt=1)] = 0.7
    increase_step: Share = 0.25
    min_share: Share = 0.05
    busy_step_interval_s: Seconds = 3.0
    max_backoff_s: Seconds = 60.0


class TierSessionsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sessions of agents. One is an `x-session-id`, a stored conversation or chain of responses, or one history."""

    mode: Literal["off", "prefer", "require"] = "off"
    pin: Literal["tool_loop", "conversation"] = "tool_loop"
    ttl_s: Seconds = 86_400.0
    max_per_tenant: Positive = 20_000


class DegradationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tiers: tuple[str, ...] = ()
    share_ramp: ShareRamp = ShareRamp()
    first_token_timeout_factor: Annotated[float, Meta(ge=1)] = 3.0
    critical_tenants: tuple[str, ...] = ()
    sessions: TierSessionsConfig = TierSessionsConfig()
    truncated_answer_tokens: Annotated[int, Meta(ge=0)] = 0
    warm_up_after_idle_s: Pause = 60.0

    def check(self, tiers: Collection[str]) -> None:
        """Check the section. Raises ConfigError."""
        for at, name in enumerate(self.tiers):
            if name not in tiers:
                raise ConfigError(f"There is no tier {name!r}.", where=f"degradation.tiers[{at}]")
            if name in self.tiers[:at]:
                raise ConfigError(f"The tier {name!r} is listed twice.", where=f"degradation.tiers[{at}]")
