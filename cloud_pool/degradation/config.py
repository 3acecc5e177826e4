"""Configuration of degradation. Without `tiers` there is no fallback; without a key file no answer is truncated."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from causeway_server.router.config import Pause, Positive, Seconds, doc
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

    stable_for_s: Annotated[Pause, doc("Time for which a tier must be stable before its share increases.")] = 1.0
    step_interval_s: Annotated[Seconds, doc("Interval between two steps of the share.")] = 0.2
    decrease_factor: Annotated[float, Meta(gt=0, lt=1), doc("Factor on the share at each step under stress.")] = 0.7
    increase_step: Annotated[Share, doc("Amount added to the share at each stable step.")] = 0.25
    min_share: Annotated[Share, doc("Minimum share of a tier that responds.")] = 0.05
    busy_step_interval_s: Annotated[
        Seconds, doc("Interval at which a busy stable tier undoes one `decrease_factor`.")
    ] = 3.0
    max_backoff_s: Annotated[
        Seconds, doc("Maximum of `stable_for_s` and `busy_step_interval_s`, which double after each relapse.")
    ] = 60.0


class TierSessionsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sessions of agents. One is an `x-session-id`, a stored conversation or chain of responses, or one history."""

    mode: Annotated[
        Literal["off", "prefer", "require"],
        doc(
            "`prefer`: the pinned tier is tried first. `require`: it alone may answer, and the error names it. `off`: "
            "each request is answered by itself."
        ),
    ] = "off"
    pin: Annotated[
        Literal["tool_loop", "conversation"],
        doc(
            "`tool_loop`: the result of a tool goes to the tier that asked for it. `conversation`: each turn goes to "
            "the tier of the last one."
        ),
    ] = "tool_loop"
    ttl_s: Annotated[Seconds, doc("Time for which a session is known after its last turn.")] = 86_400.0
    max_per_tenant: Annotated[
        Positive, doc("Maximum known turns of a tenant's sessions; the oldest ones give way.")
    ] = 20_000


class DegradationConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tiers: Annotated[
        tuple[str, ...], doc("Tiers in the order of fallback, best first. A request starts at the tier that it names.")
    ] = ()
    share_ramp: ShareRamp = ShareRamp()
    first_token_timeout_factor: Annotated[
        float,
        Meta(ge=1),
        doc(
            "Multiple of a tier's `ttft_objective_s`. If there is no first token within this time, the "
            "next tier is tried."
        ),
    ] = 3.0
    critical_tenants: Annotated[
        tuple[str, ...], doc("Tenants whose requests are all critical, whatever their headers or tokens say.")
    ] = ()
    sessions: TierSessionsConfig = TierSessionsConfig()
    continue_key_file: Annotated[
        str,
        doc("File with Fernet keys, one per line: the first signs, all verify. Empty: answers are never truncated."),
    ] = ""
    continue_ttl_s: Annotated[Seconds, doc("Validity of a continue token.")] = 600.0
    truncate_to_tokens: Annotated[Positive, doc("Length of a truncated answer, in tokens.")] = 128
    warm_up_after_idle_s: Annotated[
        Pause, doc("Idle time after which a tier gets a tiny request to keep it warm. 0: never.")
    ] = 60.0

    def check(self, tiers: Collection[str]) -> None:
        """Check the section. Raises ConfigError."""
        for at, name in enumerate(self.tiers):
            if name not in tiers:
                raise ConfigError(f"There is no tier {name!r}.", where=f"degradation.tiers[{at}]")
            if name in self.tiers[:at]:
                raise ConfigError(f"{name!r} is listed twice.", where=f"degradation.tiers[{at}]")
