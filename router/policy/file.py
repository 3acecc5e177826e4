"""The grammar of the policy file: these structs define its keys, for the reader and for the JSON schema.

Durations stay text here; `compiled.py` turns a valid file into a `Policy`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ..config import schema_of
from ..described import described
from ..guard.classes import GuardClass
from ..numbers import seconds_of
from ..prices import FREE, Price
from ..types import Ability, Fusion, Location, Overflow, WaitFor
from ..variants.settings import TrialConfig, VariantConfig
from .signals import CLOUD_NAME

MAX_EXPRESSION = 2000

Place = Annotated[
    str,
    Meta(pattern=f"^(edge|cloud(:{CLOUD_NAME})?)$", title="edge, cloud, cloud:NAME, or a list of cloud:NAME in order"),
]
CloudPlace = Annotated[str, Meta(pattern=f"^cloud:{CLOUD_NAME}$", title="the name of a cloud, as cloud:NAME")]

Name = Annotated[
    str,
    Meta(
        pattern="^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$",
        title="a name of 1 to 64 letters, digits, dots, dashes or underscores",
    ),
]
ModelName = Annotated[
    str,
    Meta(
        pattern="^[A-Za-z0-9][A-Za-z0-9_.:/@+-]{0,127}$",
        title="a model name of 1 to 128 letters, digits or . : / @ _ + -",
    ),
]
RegionName = Annotated[
    str,
    Meta(
        pattern="^[a-z0-9][a-z0-9._-]{0,31}$",
        title="a region's name of 1 to 32 lower-case letters, digits, dots, dashes or underscores",
    ),
]
Duration = Annotated[
    str, Meta(pattern=r"^[0-9]{1,9}(\.[0-9]{1,6})?(ms|s|m|h|d)$", title="a duration such as 250ms, 4s, 10m, 1h or 7d")
]
TimeOfDay = Annotated[str, Meta(pattern="^([01][0-9]|2[0-3]):[0-5][0-9]$", title="a local time such as 18:00")]
Condition = Annotated[
    str, Meta(max_length=MAX_EXPRESSION, title="a condition in CEL", examples=["device.temperature_c > 85"])
]


class _Doc(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The base of all parts of the file. Unknown keys are refused."""


class TargetDoc(_Doc, frozen=True):
    """A model on the device (`edge`) or in a cloud (`cloud`)."""

    at: Place | Annotated[tuple[CloudPlace, ...], Meta(min_length=1)]
    model: ModelName
    timeout: Duration | UnsetType = UNSET
    first_token_timeout: Duration | UnsetType = UNSET
    price: Price = FREE
    temperature: Annotated[float, Meta(ge=0, le=2)] | UnsetType = UNSET
    can: tuple[Ability, ...] | UnsetType = UNSET
    variants: tuple[VariantConfig, ...] = ()
    trial: TrialConfig = TrialConfig()

    @property
    def location(self) -> Location:
        return "edge" if self.at == "edge" else "cloud"

    @property
    def clouds(self) -> tuple[str, ...]:
        """The names of its clouds in order; () on the device, and for the first one of the device."""
        places = (self.at,) if isinstance(self.at, str) else self.at
        return tuple([name for _, _, name in (place.partition(":") for place in places) if name])


class ConstraintDoc(_Doc, frozen=True):
    """Applies to every route, fallback, cache, queue and log; also if its condition cannot be evaluated."""

    name: Name
    keep: Literal["on_device", "parts_on_device", "in_region"]
    regions: tuple[RegionName, ...] = ()
    when: Condition | UnsetType = UNSET


class GuardRuleDoc(_Doc, frozen=True):
    """Applies to every request, also if its condition cannot be evaluated."""

    name: Name
    action: Literal["refuse", "mask", "audit"]
    when: Condition | UnsetType = UNSET
    classes: tuple[GuardClass, ...] = ()


class GuardDoc(_Doc, frozen=True):
    """Rules about requests with personal data or keys in their texts."""

    rules: tuple[GuardRuleDoc, ...] = ()
    phone_regions: tuple[Annotated[str, Meta(pattern="^[A-Z]{2}$", title="a region such as DE")], ...] = ()
    on_failure: Literal["hit", "clean"] = "hit"
    timeout: Duration = "1s"


class HandoffDoc(_Doc, frozen=True):
    """Holds back the device's first tokens. If their confidence is too low, the next target answers instead."""

    after_tokens: Annotated[int, Meta(ge=1, le=64)]
    below: Annotated[float, Meta(gt=0, le=1)]
    within: Duration | UnsetType = UNSET


class PromiseDoc(_Doc, frozen=True):
    """Keeps the quality of a cloud target: the device moves the threshold of the handoff by labelled answers."""

    of: Name
    keep: Annotated[float, Meta(ge=0.5, le=0.999)]
    risk: Annotated[float, Meta(ge=0.001, le=0.2)] = 0.05
    tolerance: Annotated[float, Meta(ge=0.005, le=0.1)] = 0.01
    shadow: Annotated[float, Meta(ge=0.01, le=1)] = 0.06
    applies: Literal["always", "only_where_measured"] = "always"


Weight = Annotated[float, Meta(ge=0, le=1_000_000)]


class WeightsDoc(_Doc, frozen=True):
    """The score of a target: quality · its weight, minus its price and its latency · their weights."""

    quality: Weight = 1.0
    usd: Weight = 0.0
    latency: Weight = 0.0


class BestOfDoc(_Doc, frozen=True):
    """Targets that are tried in the order of their scores for the request, best first."""

    best_of: Annotated[tuple[Name, ...], Meta(min_length=2)]
    weights: WeightsDoc = WeightsDoc()


class RouteDoc(_Doc, frozen=True):
    """An ordered list of targets. The first route that holds decides."""

    name: Name
    use: Annotated[tuple[Name, ...], Meta(min_length=1)] | BestOfDoc
    when: Condition | UnsetType = UNSET
    handoff: HandoffDoc | UnsetType = UNSET
    promise: PromiseDoc | UnsetType = UNSET
    fusion: Fusion = "late"
    wait_for: WaitFor = "all"


def used(route: RouteDoc) -> tuple[str, ...]:
    """Return the names of a route's targets, in the order of the file."""
    return route.use.best_of if isinstance(route.use, BestOfDoc) else route.use


class ExactDoc(_Doc, frozen=True):
    """Answers equal requests from the cache."""

    ttl: Duration
    stale_if_error: Duration | UnsetType = UNSET


class SemanticDoc(_Doc, frozen=True):
    """Answers a question from the cache that means the same as an earlier one."""

    ttl: Duration
    max_error: Annotated[float, Meta(ge=0.002, le=0.05)] = 0.01


class CacheDoc(_Doc, frozen=True):
    """Says which answers are cached. The first rule that holds decides; without one nothing is cached."""

    name: Name | UnsetType = UNSET
    when: Condition | UnsetType = UNSET
    exact: ExactDoc | UnsetType = UNSET
    semantic: SemanticDoc | UnsetType = UNSET
    allow_sampled: bool = False
    allow_tools: bool = False


class ClaimDoc(_Doc, frozen=True):
    """A promise of the policy, which `causeway-fleet prove` checks for all requests."""

    name: Name
    holds: Condition
    when: Condition | UnsetType = UNSET


class LimitsDoc(_Doc, frozen=True):
    """Limits on admission. Above them a request gets 429 with Retry-After."""

    concurrent: Annotated[int, Meta(ge=1, le=100_000)] = 16
    queue: Annotated[int, Meta(ge=0, le=100_000)] = 64
    per_client_rps: Annotated[float, Meta(gt=0, le=1_000_000)] | UnsetType = UNSET


class ContextDoc(_Doc, frozen=True):
    """Chats that do not fit a model's context."""

    overflow: Overflow = "refuse"


class ShadowDoc(_Doc, frozen=True):
    """Asks the other side too, after the answer, to learn when the device is good enough. Only agreement is kept."""

    share: Annotated[float, Meta(gt=0, le=1)]
    usd_per_day: Annotated[float, Meta(ge=0, le=1_000_000)] = 1.0
    max_drift: Annotated[float, Meta(ge=0.01, le=1)] = 0.1
    refit: bool = False


class BatteryDoc(_Doc, frozen=True):
    """The battery lasts until a local time. Nothing is held back outside these hours, and while the device is fed."""

    until: TimeOfDay
    since: TimeOfDay = "00:00"
    reserve: Annotated[float, Meta(ge=0, le=0.5)] = 0.02
    radio_w: Annotated[float, Meta(ge=0, le=100)] = 1.5


class HeatDoc(_Doc, frozen=True):
    """Answers on the device have a price before it gets so hot that it is slowed down."""

    limit_c: Annotated[float, Meta(ge=30, le=120)] | UnsetType = UNSET
    margin_c: Annotated[float, Meta(ge=0, le=30)] = 3.0


class BudgetDoc(_Doc, frozen=True):
    """Money and energy, which are spent where they help most. A day of money begins at local midnight."""

    usd_per_day: Annotated[float, Meta(gt=0, le=1_000_000)] | UnsetType = UNSET
    battery: BatteryDoc | UnsetType = UNSET
    heat: HeatDoc | UnsetType = UNSET


class SessionDoc(_Doc, frozen=True):
    """Keeps the turns of an agent together. A session is an `x-session-id`, a stored conversation, or one history."""

    pin: Literal["tool_loop", "conversation"] = "tool_loop"
    mode: Literal["require", "prefer"] = "prefer"
    switch_cost: Literal["none", "prefix"] = "none"


@described
class PolicyDoc(_Doc, frozen=True):
    """A Causeway policy: where each request is answered, and why."""

    version: Literal[1]
    name: Name
    targets: Annotated[dict[Name, TargetDoc], Meta(min_length=1)]
    routes: Annotated[tuple[RouteDoc, ...], Meta(min_length=1)]
    constraints: tuple[ConstraintDoc, ...] = ()
    guard: GuardDoc = GuardDoc()
    cache: tuple[CacheDoc, ...] = ()
    claims: tuple[ClaimDoc, ...] = ()
    limits: LimitsDoc = LimitsDoc()
    context: ContextDoc = ContextDoc()
    shadow: ShadowDoc | UnsetType = UNSET
    session: SessionDoc | UnsetType = UNSET
    budget: BudgetDoc | UnsetType = UNSET


RuleDoc = ConstraintDoc | GuardRuleDoc | RouteDoc | CacheDoc


def rules(doc: PolicyDoc) -> dict[str, tuple[RuleDoc, ...]]:
    """Return everything that has a name and a condition, by the key of its list."""
    return {"constraints": doc.constraints, "guard.rules": doc.guard.rules, "routes": doc.routes, "cache": doc.cache}


def seconds(duration: str | UnsetType) -> float | None:
    """Convert a Duration to seconds; None for a key that was left out."""
    if isinstance(duration, UnsetType):
        return None
    if (found := seconds_of(duration)) is None:
        raise ValueError(f"not a duration: {duration!r}")
    return found


def hours(time: str) -> float:
    """Convert a TimeOfDay to hours since midnight."""
    hour, _, minute = time.partition(":")
    return int(hour) + int(minute) / 60


def policy_schema() -> bytes:
    """Return the JSON schema of policy files: indented JSON text that ends in a newline."""
    return schema_of(PolicyDoc, "Causeway policy")
