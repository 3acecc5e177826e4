"""The grammar of the policy file: these structs define its keys, for the reader and for the JSON schema.

Durations stay text here; `compiled.py` turns a valid file into a `Policy`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ..config import doc, schema_of
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
Condition = Annotated[
    str, Meta(max_length=MAX_EXPRESSION, title="a condition in CEL", examples=["device.temperature_c > 85"])
]


class _Doc(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The base of all parts of the file. Unknown keys are refused."""


class TargetDoc(_Doc, frozen=True):
    """A model on the device (`edge`) or in a cloud (`cloud`)."""

    at: Annotated[
        Place | Annotated[tuple[CloudPlace, ...], Meta(min_length=1)],
        doc(
            "Place of the model: `edge` (the device), `cloud` (the first of the device's clouds), `cloud:NAME`, or a "
            "list of `cloud:NAME`: the next one is tried if one fails before the first byte."
        ),
    ]
    model: Annotated[ModelName, doc("Name of the model at that place; on the device also MODEL+ADAPTER.")]
    timeout: Annotated[Duration | UnsetType, doc("Maximum time for the answer; then the next target is tried.")] = UNSET
    first_token_timeout: Annotated[
        Duration | UnsetType, doc("Maximum time to the first token; then the next target is tried.")
    ] = UNSET
    price: Price = FREE
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | UnsetType,
        doc(
            "Temperature that is sent if the client sets none. Default: on the device the model's own; in the cloud "
            "none is sent, and 1.0 is assumed."
        ),
    ] = UNSET
    can: Annotated[
        tuple[Ability, ...] | UnsetType,
        doc("Abilities of the model. Replaces the default: chat, completion, tools, json, logprobs."),
    ] = UNSET
    variants: Annotated[
        tuple[VariantConfig, ...],
        doc("Other models at the same place, each for a share of the requests that this target answers."),
    ] = ()
    trial: Annotated[TrialConfig, doc("Comparison of the variants with the target's own model.")] = TrialConfig()

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

    name: Annotated[Name, doc("Name of the constraint, for reasons and error messages.")]
    keep: Annotated[
        Literal["on_device", "parts_on_device", "in_region"],
        doc(
            "`on_device`: only edge targets may answer, and the content is neither logged nor stored on disk. "
            "`parts_on_device`: audio, images and files do not leave the device; cloud targets get the text that the "
            "device's encoders find in them, or do not answer. `in_region`: only the device and clouds in `regions` "
            "may answer, and nothing outside gets the content, webhooks or traces."
        ),
    ]
    regions: Annotated[
        tuple[RegionName, ...],
        doc("Allowed regions of `keep: in_region`, as in `clouds.NAME.region`; several constraints narrow each other."),
    ] = ()
    when: Annotated[Condition | UnsetType, doc("Condition of the constraint. Default: it always applies.")] = UNSET


class GuardRuleDoc(_Doc, frozen=True):
    """Applies to every request, also if its condition cannot be evaluated."""

    name: Annotated[Name, doc("Name of the rule, for reasons, audit records and error messages.")]
    action: Annotated[
        Literal["refuse", "mask", "audit"],
        doc(
            "`refuse`: the client gets 400 `guard_refused`. `mask`: cloud targets (at the gateway: all tiers) get "
            "placeholders such as `<EMAIL_1>`, and the client the values again. `audit`: the decision says that the "
            "rule applied."
        ),
    ]
    when: Annotated[
        Condition | UnsetType, doc("Condition of the rule, such as `pii.count > 0`. Default: it always applies.")
    ] = UNSET
    classes: Annotated[tuple[GuardClass, ...], doc("Classes that `mask` replaces. Default: all.")] = ()


class GuardDoc(_Doc, frozen=True):
    """Rules about requests with personal data or keys in their texts."""

    rules: Annotated[tuple[GuardRuleDoc, ...], doc("Rules. All that hold apply.")] = ()
    phone_regions: Annotated[
        tuple[Annotated[str, Meta(pattern="^[A-Z]{2}$", title="a region such as DE")], ...],
        doc(
            "Regions (ISO 3166) whose national telephone numbers are found anywhere. Others are found after a word "
            "such as `phone`, and with their country's code."
        ),
    ] = ()
    on_failure: Annotated[
        Literal["hit", "clean"],
        doc(
            "Verdict on a request that the detectors cannot read in time: `hit`, as if it had personal data of each "
            "class, and a key; `clean`, as if it had none."
        ),
    ] = "hit"
    timeout: Annotated[Duration, doc("Maximum time of the detectors for one request.")] = "1s"


class HandoffDoc(_Doc, frozen=True):
    """Holds back the device's first tokens. If their confidence is too low, the next target answers instead."""

    after_tokens: Annotated[int, Meta(ge=1, le=64), doc("Number of tokens that are held back.")]
    below: Annotated[float, Meta(gt=0, le=1), doc("Confidence, 0 to 1, below which the next target answers instead.")]
    within: Annotated[
        Duration | UnsetType,
        doc("Maximum time for which tokens are held back; the first token after it decides. Default: no limit."),
    ] = UNSET


Weight = Annotated[float, Meta(ge=0, le=1_000_000)]


class WeightsDoc(_Doc, frozen=True):
    """The score of a target: quality · its weight, minus its price and its latency · their weights."""

    quality: Annotated[Weight, doc("Weight of the probability, 0 to 1, that the target's answer is right.")] = 1.0
    usd: Annotated[Weight, doc("Weight of the expected price of the answer, per US dollar.")] = 0.0
    latency: Annotated[Weight, doc("Weight of the recent time of the target's answers, per second.")] = 0.0


class BestOfDoc(_Doc, frozen=True):
    """Targets that are tried in the order of their scores for the request, best first."""

    best_of: Annotated[
        tuple[Name, ...],
        Meta(min_length=2),
        doc("Names of targets. Without an estimate of one's quality they are tried in this order."),
    ]
    weights: Annotated[WeightsDoc, doc("Weights of the score.")] = WeightsDoc()


class RouteDoc(_Doc, frozen=True):
    """An ordered list of targets. The first route that holds decides."""

    name: Annotated[Name, doc("Name of the route, for reasons, headers and metrics.")]
    use: Annotated[
        Annotated[tuple[Name, ...], Meta(min_length=1)] | BestOfDoc,
        doc(
            "Names of targets, in the order in which they are tried; or `best_of`, a list that is ordered for each "
            "request."
        ),
    ]
    when: Annotated[Condition | UnsetType, doc("Condition of the route. Default: it always applies.")] = UNSET
    handoff: Annotated[
        HandoffDoc | UnsetType, doc("Handoff to the next target if the device's first tokens have low confidence.")
    ] = UNSET
    fusion: Annotated[
        Fusion,
        doc(
            "Form in which audio and images reach a target that takes text only. `late`: as text in their place. "
            "`early`: as soft tokens in the prompt, where the target's model on the device has an mmproj "
            "file for them; other targets are left out. `hybrid`: early where the model can, late for the rest."
        ),
    ] = "late"
    wait_for: Annotated[
        WaitFor,
        doc(
            "Branches whose facts an answer waits for. `all`: each kind of part, or its time-out. `first`: the one "
            "that is ready first; the others are left out, and the answer is degraded."
        ),
    ] = "all"


def used(route: RouteDoc) -> tuple[str, ...]:
    """Return the names of a route's targets, in the order of the file."""
    return route.use.best_of if isinstance(route.use, BestOfDoc) else route.use


class ExactDoc(_Doc, frozen=True):
    """Answers equal requests from the cache."""

    ttl: Annotated[Duration, doc("Time for which an answer is used.")]
    stale_if_error: Annotated[
        Duration | UnsetType, doc("Additional time for which an expired answer may be used if every target fails.")
    ] = UNSET


class SemanticDoc(_Doc, frozen=True):
    """Answers a question from the cache that means the same as an earlier one."""

    ttl: Annotated[Duration, doc("Time for which an answer is used for similar questions; at most `exact.ttl`.")]
    max_error: Annotated[
        float,
        Meta(ge=0.002, le=0.05),
        doc("Share of all requests that may get a wrong answer this way, as measured on held-back data."),
    ] = 0.01


class CacheDoc(_Doc, frozen=True):
    """Says which answers are cached. The first rule that holds decides; without one nothing is cached."""

    name: Annotated[Name | UnsetType, doc("Name of the rule, for reasons. Default: its index.")] = UNSET
    when: Annotated[Condition | UnsetType, doc("Condition of the rule. Default: it always applies.")] = UNSET
    exact: Annotated[
        ExactDoc | UnsetType, doc("Cache by exact match. A rule without `exact` keeps its requests out of the cache.")
    ] = UNSET
    semantic: Annotated[
        SemanticDoc | UnsetType,
        doc(
            "Also answer a question that means the same as an earlier one of the same client, if nothing else in the "
            "request differs. Needs `exact`."
        ),
    ] = UNSET
    allow_sampled: Annotated[bool, doc("Also cache sampled answers (temperature above 0, or n above 1).")] = False
    allow_tools: Annotated[bool, doc("Also cache answers to requests that offer tools.")] = False


class ClaimDoc(_Doc, frozen=True):
    """A promise of the policy, which `causeway-fleet prove` checks for all requests."""

    name: Annotated[Name, doc("Name of the claim.")]
    holds: Annotated[
        Condition,
        doc("Condition that is true for each request: over its signals and `outcome.*`, which tells what is decided."),
    ]
    when: Annotated[
        Condition | UnsetType,
        doc("Requests that it is about; also those for which it cannot be evaluated. Default: all."),
    ] = UNSET


class LimitsDoc(_Doc, frozen=True):
    """Limits on admission. Above them a request gets 429 with Retry-After."""

    concurrent: Annotated[int, Meta(ge=1, le=100_000), doc("Maximum requests that are served at the same time.")] = 16
    queue: Annotated[int, Meta(ge=0, le=100_000), doc("Maximum requests that may wait; further ones get 429.")] = 64
    per_client_rps: Annotated[
        Annotated[float, Meta(gt=0, le=1_000_000)] | UnsetType,
        doc("Maximum requests per second of one client. Default: no limit."),
    ] = UNSET


class ContextDoc(_Doc, frozen=True):
    """Chats that do not fit a model's context."""

    overflow: Annotated[
        Overflow,
        doc(
            "Treatment of a chat that exceeds the context of the device's model where no other target answers it. "
            "`refuse`: 400. `trim_middle`: its oldest turns are left out; system messages, the user's last message and "
            "the newest step stay, and a call never loses its result. The model is told; "
            "`x-causeway-trimmed` and the record have the number of messages."
        ),
    ] = "refuse"


class ShadowDoc(_Doc, frozen=True):
    """Asks the other side too, after the answer, to learn when the device is good enough. Only agreement is kept."""

    share: Annotated[
        float,
        Meta(gt=0, le=1),
        doc(
            "Share of the answers after which a target on the other side (device, cloud) is asked as well, and of the "
            "semantic answers that are generated again and compared. Never for requests that are bound to the device "
            "or to regions."
        ),
    ]
    usd_per_day: Annotated[
        float,
        Meta(ge=0, le=1_000_000),
        doc(
            "Daily budget of shadow requests, midnight to midnight. A request that could exceed it is not sent. The "
            "signals `spend.*` count them too."
        ),
    ] = 1.0
    max_drift: Annotated[
        float,
        Meta(ge=0.01, le=1),
        doc(
            "Calibration error of the newest shadow answers, beyond what chance explains, above which a pair's "
            "calibrated signals are set aside."
        ),
    ] = 0.1


class SessionDoc(_Doc, frozen=True):
    """Keeps the turns of an agent together. A session is an `x-session-id`, a stored conversation, or one history."""

    pin: Annotated[
        Literal["tool_loop", "conversation"],
        doc(
            "Turns that are pinned. `tool_loop`: the result of a tool goes to the target that asked for it. "
            "`conversation`: each turn goes to the target of the last one."
        ),
    ] = "tool_loop"
    mode: Annotated[
        Literal["require", "prefer"],
        doc(
            "Behaviour if that target cannot answer: `require` is an error that names it, `prefer` asks the others of "
            "the route."
        ),
    ] = "prefer"
    switch_cost: Annotated[
        Literal["none", "prefix"],
        doc(
            "`prefix`: in the score of `best_of`, tokens of the session that a target has warm have their "
            "`cached_input` price, and leaving the target of the last turn costs its warm tokens at its `input` price."
        ),
    ] = "none"


@described
class PolicyDoc(_Doc, frozen=True):
    """A Causeway policy: where each request is answered, and why."""

    version: Annotated[Literal[1], doc("Version of the file format.")]
    name: Annotated[Name, doc("Name of the policy. Headers and records show name@revision.")]
    targets: Annotated[dict[Name, TargetDoc], Meta(min_length=1), doc("Models that may answer, by name.")]
    routes: Annotated[
        tuple[RouteDoc, ...], Meta(min_length=1), doc("Rules for `model: auto`; the first that applies decides.")
    ]
    constraints: Annotated[
        tuple[ConstraintDoc, ...], doc("Restrictions on all requests, also those that name a model.")
    ] = ()
    guard: Annotated[GuardDoc, doc("Rules about personal data and keys in requests.")] = GuardDoc()
    cache: Annotated[tuple[CacheDoc, ...], doc("Rules of the response cache; the first that applies decides.")] = ()
    claims: Annotated[
        tuple[ClaimDoc, ...], doc("Promises of the policy; `causeway-fleet prove` checks them. Devices ignore them.")
    ] = ()
    limits: Annotated[LimitsDoc, doc("Limits on admission.")] = LimitsDoc()
    context: Annotated[ContextDoc, doc("Chats that do not fit a model's context.")] = ContextDoc()
    shadow: Annotated[
        ShadowDoc | UnsetType, doc("Shadow requests, which compare both sides' answers. Default: none is sent.")
    ] = UNSET
    session: Annotated[
        SessionDoc | UnsetType, doc("Sessions, which stay at their target. Default: each request is decided alone.")
    ] = UNSET


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


def policy_schema() -> bytes:
    """Return the JSON schema of policy files: indented JSON text that ends in a newline."""
    return schema_of(PolicyDoc, "Causeway policy")
