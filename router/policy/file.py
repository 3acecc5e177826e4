"""The policy file's grammar: these structs are what may stand in it, for the reader and for the JSON schema.

Durations stay text here; router/policy turns a file that holds together into a Policy.
"""

from __future__ import annotations

import re
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ..types import Ability

MAX_EXPRESSION = 2000
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)(ms|s|m|h|d)")

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
        pattern="^[A-Za-z0-9][A-Za-z0-9_.:/@-]{0,127}$",
        title="a model name of 1 to 128 letters, digits or . : / @ _ -",
    ),
]
Duration = Annotated[
    str, Meta(pattern=r"^[0-9]{1,9}(\.[0-9]{1,6})?(ms|s|m|h|d)$", title="a duration such as 250ms, 4s, 10m, 1h or 7d")
]
Condition = Annotated[
    str,
    Meta(max_length=MAX_EXPRESSION, title="a condition in CEL", description="For example: device.temperature_c > 85"),
]


class _Doc(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Every part of the file: unknown keys are refused."""


class TargetDoc(_Doc, frozen=True):
    """A model somewhere: on the device (`edge`) or behind the cloud's URL (`cloud`)."""

    at: Literal["edge", "cloud"]
    model: ModelName
    timeout: Annotated[Duration | UnsetType, Meta(description="For the whole answer.")] = UNSET
    first_token_timeout: Annotated[Duration | UnsetType, Meta(description="Until the first token.")] = UNSET
    usd_per_1k_tokens: Annotated[float, Meta(ge=0, le=1_000_000)] = 0.0
    can: Annotated[
        tuple[Ability, ...] | UnsetType,
        Meta(description="What it can do; replaces the default chat, completion, tools, json, logprobs."),
    ] = UNSET


class ConstraintDoc(_Doc, frozen=True):
    """Binds every route, fallback, cache, queue and log. Without `when` it always binds; in doubt it binds."""

    name: Name
    keep: Literal["on_device"]
    when: Condition | UnsetType = UNSET


class HandoffDoc(_Doc, frozen=True):
    """The device starts; if it is unsure of its first tokens, the next target answers and nobody sees the start."""

    after_tokens: Annotated[int, Meta(ge=1, le=64)]
    below: Annotated[float, Meta(gt=0, le=1, description="Confidence, 0 to 1, under which the next target answers.")]


class RouteDoc(_Doc, frozen=True):
    """The first route that holds decides. `use` is the order of attempts."""

    name: Name
    use: Annotated[tuple[Name, ...], Meta(min_length=1)]
    when: Condition | UnsetType = UNSET
    handoff: HandoffDoc | UnsetType = UNSET


class ExactDoc(_Doc, frozen=True):
    """Same request, same answer."""

    ttl: Duration
    stale_if_error: Annotated[
        Duration | UnsetType, Meta(description="Longer life for the day when every target fails.")
    ] = UNSET


class CacheDoc(_Doc, frozen=True):
    """The first rule that holds decides; a rule without `exact` keeps its requests out of the cache."""

    name: Name | UnsetType = UNSET
    when: Condition | UnsetType = UNSET
    exact: ExactDoc | UnsetType = UNSET
    allow_sampled: Annotated[bool, Meta(description="Also answers that were drawn (temperature above 0, n > 1).")] = (
        False
    )
    allow_tools: Annotated[bool, Meta(description="Also requests that offer tools.")] = False


class LimitsDoc(_Doc, frozen=True):
    concurrent: Annotated[int, Meta(ge=1, le=100_000, description="Requests at work at once.")] = 16
    queue: Annotated[int, Meta(ge=0, le=100_000, description="Requests that may wait; more get 429.")] = 64
    per_client_rps: (
        Annotated[float, Meta(gt=0, le=1_000_000, description="Requests per second of one client.")] | UnsetType
    ) = UNSET


class PolicyDoc(_Doc, frozen=True):
    """A Causeway policy: where each request is answered, and why."""

    version: Literal[1]
    name: Name
    targets: Annotated[dict[Name, TargetDoc], Meta(min_length=1)]
    routes: Annotated[tuple[RouteDoc, ...], Meta(min_length=1)]
    constraints: tuple[ConstraintDoc, ...] = ()
    cache: tuple[CacheDoc, ...] = ()
    limits: LimitsDoc = LimitsDoc()


RuleDoc = ConstraintDoc | RouteDoc | CacheDoc


def rules(doc: PolicyDoc) -> dict[str, tuple[RuleDoc, ...]]:
    """All that has a name and a condition, by the key it stands under."""
    return {"constraints": doc.constraints, "routes": doc.routes, "cache": doc.cache}


def seconds(duration: str | UnsetType) -> float | None:
    """Seconds of a Duration; None for a key that was left out."""
    if isinstance(duration, UnsetType):
        return None
    match = _DURATION.fullmatch(duration)
    if match is None:
        raise ValueError(f"not a duration: {duration!r}")
    return float(match[1]) * _SECONDS[match[2]]


def policy_schema() -> bytes:
    """Return the JSON schema of policy files, for editors: indented JSON text that ends in a newline.

    It is made from the structs above. The daemon refuses all that the schema refuses, and checks more.
    """
    schema = {"$schema": _DIALECT, "title": "Causeway policy", **msgspec.json.schema(PolicyDoc)}
    return msgspec.json.format(msgspec.json.encode(schema, order="deterministic"), indent=2) + b"\n"
