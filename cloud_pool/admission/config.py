"""A tier's key `admission`, and the settings of its admission with the tier's limits."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Share = Annotated[float, Meta(ge=0, le=0.5)]


class AdmissionConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    reserved_share: Share = 0.08  # share of the permits reserved for urgent requests and light tenants, if mixed
    preemption_share: Share = 0.1  # share of the requests that may preempt one without a first token; 0: none
    standard_share: Share = 0.05  # share of the released permits that standard work gets while interactive work waits
    bulk_share: Share = 0.02  # the same for bulk work while any other work waits


class TierCapacity(msgspec.Struct, frozen=True):
    """What serves a tier now."""

    permits: int  # of all gateways and workers
    endpoints: float  # as many as take requests
    jobs: int = 0  # this gateway's part of the permits that jobs hold
    away: int = 0  # open calls of this process at endpoints that take no more requests


class AdmissionSettings(msgspec.Struct, frozen=True, kw_only=True):
    permits: int  # upper bound of the sequences in Triton at once; PeerHeartbeat changes it
    max_queued: int  # sequences that may wait for their request to begin
    min_permits: int = 0  # lower bound of the concurrency limit; 0: the limit is fixed at `permits`
    ttft_objective_s: float = 2.0  # of an interactive request, queue and Triton together
    config: AdmissionConfig = AdmissionConfig()
