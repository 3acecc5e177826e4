"""The settings of variants, as they stand in a policy's target and in a gateway's tier."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from ..config import doc

ERRORS: Final = "errors"
LATENCY: Final = "latency"
FEEDBACK: Final = "feedback"
Sticky = Literal["device", "user", "conversation"]


class VariantConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Another model that answers a share of the requests in the place of the target's or tier's own model."""

    model: Annotated[
        str,
        Meta(min_length=1, max_length=128, title="a model name of 1 to 128 characters"),
        doc("Name of the model, at the same place as the one that it may replace."),
    ]
    share: Annotated[
        float,
        Meta(ge=0, le=100),
        doc(
            "Share of the requests, in percent. Another share begins the comparison again; a larger one keeps the "
            "requests of the smaller one."
        ),
    ]


class VerdictMetric(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A metric by which a variant is compared with the model that it may replace."""

    name: Annotated[
        str,
        Meta(min_length=1, max_length=64, title="errors, latency, feedback or a label of feedback"),
        doc(
            "`errors` (share of failed answers), `latency` (share of answers slower than `over_s`), `feedback` (1 "
            "minus the mean score of feedback without a label), or a label of feedback, whose scores count alike."
        ),
    ]
    margin: Annotated[float, Meta(ge=0, le=1), doc("The largest accepted worsening, as a difference of shares.")] = 0.02
    over_s: Annotated[float, Meta(gt=0, le=3600), doc("Time of an answer, above which `latency` counts it.")] = 10.0


class TrialConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The comparison of variants with the model that they may replace."""

    sticky: Annotated[
        Sticky,
        doc(
            "Unit that stays with one model: a `conversation` (by its client and first user message), a `user` (by the "
            "request's `user`, else its client), or a `device` (at the gateway: a client)."
        ),
    ] = "conversation"
    metrics: Annotated[
        tuple[VerdictMetric, ...],
        Meta(min_length=1),
        doc("Metrics of the verdict. A variant that fails one of them is returned to a share of 0 at once."),
    ] = (VerdictMetric(ERRORS), VerdictMetric(FEEDBACK))
    least: Annotated[
        int, Meta(ge=20, le=1_000_000), doc("Minimum of answers (or labels) of either side before a verdict.")
    ] = 100
    promote: Annotated[
        bool, doc("Let a variant that passes every metric answer all requests. Default: it is only reported.")
    ] = False
