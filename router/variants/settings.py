"""The settings of variants, as they stand in a policy's target and in a gateway's tier."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

ERRORS: Final = "errors"
LATENCY: Final = "latency"
FEEDBACK: Final = "feedback"
Sticky = Literal["device", "user", "conversation"]


class VariantConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Another model that answers a share of the requests in the place of the target's or tier's own model."""

    model: Annotated[str, Meta(min_length=1, max_length=128, title="a model name of 1 to 128 characters")]
    share: Annotated[float, Meta(ge=0, le=100)]


class VerdictMetric(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A metric by which a variant is compared with the model that it may replace."""

    name: Annotated[str, Meta(min_length=1, max_length=64, title="errors, latency, feedback or a label of feedback")]
    margin: Annotated[float, Meta(ge=0, le=1)] = 0.02
    over_s: Annotated[float, Meta(gt=0, le=3600)] = 10.0


class TrialConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The comparison of variants with the model that they may replace."""

    sticky: Sticky = "conversation"
    metrics: Annotated[tuple[VerdictMetric, ...], Meta(min_length=1)] = (VerdictMetric(ERRORS), VerdictMetric(FEEDBACK))
    least: Annotated[int, Meta(ge=20, le=1_000_000)] = 100
    promote: bool = False
