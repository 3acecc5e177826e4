"""How jobs are kept, run and told. All bounded: what is beyond a bound is refused with 4xx, never dropped."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
_DAY_S = 86_400.0


class WebhookConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    allowed_networks: tuple[str, ...] = ()  # networks that may be reached though they are private, as 10.1.0.0/16
    allow_http: bool = False  # beside https
    timeout_s: Seconds = 15.0  # of one delivery
    concurrency: Positive = 16
    disable_after_410_s: Seconds = 7 * _DAY_S  # how long an address that said 410 gets nothing


class BatchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    max_file_bytes: Positive = 16 * 1024 * 1024
    max_files: Positive = 100  # of one owner
    max_lines: Positive = 10_000
    max_line_bytes: Positive = 1024 * 1024
    completion_window_s: Seconds = _DAY_S
    file_ttl_s: Seconds = 7 * _DAY_S
    lines_per_step: Positive = 200  # lines accepted in one go: other work comes between


class JobsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    redis: str = ""  # URL; "": the one that gateways share, and without that there are no jobs here
    durability: Literal["require", "warn"] = "require"  # of a Redis that may forget on kill -9
    key_prefix: str = "{causeway}:jobs"  # of all keys; the braces keep them in one slot of a cluster
    max_body_bytes: Positive = 1024 * 1024
    max_result_bytes: Positive = 4 * 1024 * 1024
    max_queued: Positive = 20_000  # jobs of one tier and priority
    max_unfinished: Positive = 20_000  # unfinished jobs of one owner
    max_dead_letters: Positive = 10_000  # dead letters kept
    max_event_streams: Positive = 256  # clients that follow events, per gateway
    default_deadline_s: Seconds = _DAY_S  # where the caller names none
    max_deadline_s: Seconds = 7 * _DAY_S
    result_ttl_s: Seconds = _DAY_S  # results, events and idempotency keys, after the end
    dead_letter_ttl_s: Seconds = 7 * _DAY_S
    max_attempts: Positive = 5
    attempt_timeout_s: Seconds = 300.0  # one run
    lease_s: Seconds = 15.0  # a worker that is silent for so long has died
    lease_check_s: Seconds = 0.4  # how soon a cancelled job's worker knows
    reclaim_interval_s: Seconds = 1.0  # how often a worker without jobs looks for those of the dead
    backoff_s: Seconds = 1.0
    backoff_max_s: Seconds = 60.0
    concurrency: Annotated[int, Meta(ge=0)] = 0  # jobs of a tier in one worker; 0: the tier's own
    drain_s: Annotated[float, Meta(ge=0)] = 20.0
    webhooks: WebhookConfig = WebhookConfig()
    batches: BatchConfig = BatchConfig()


def with_shared_redis(config: JobsConfig, shared: str) -> JobsConfig:
    """Jobs live in a Redis of their own, or in the one that gateways share."""
    return config if config.redis else msgspec.structs.replace(config, redis=shared)
