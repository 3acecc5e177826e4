"""A tier's key `admission`, and with its limits what its door goes by."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Share = Annotated[float, Meta(ge=0, le=0.5)]


class AdmissionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reserved_share: Share = 0.08  # of the places, kept for who is urgent and asks little, while there is such
    preemption_share: Share = 0.1  # of the requests, may make one that has no token yet give its place back; 0: none
    standard_share: Share = 0.05  # of the places that come free while interactive work waits as well
    bulk_share: Share = 0.02  # the same, while anything else waits


class AdmissionSettings(msgspec.Struct, frozen=True, kw_only=True):
    places: int  # in Triton at once, at most
    queue: int  # more wait
    min_places: int = 0  # the limit is found between these; 0: it is `places`, whatever comes
    ttft_objective_s: float = 2.0  # of an interactive request, queue and Triton together
    config: AdmissionConfig = AdmissionConfig()
