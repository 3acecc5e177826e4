"""The configuration of jobs, webhooks and batches. Requests that exceed a bound are refused with 4xx, never dropped."""

from __future__ import annotations

import re
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from causeway_server.router.config import Count, Pause, Positive, Seconds
from causeway_server.router.errors import CausewayError, ConfigError, RateLimited

from ..redis.config import RedisAddress, is_cluster, is_sentinel, parse_redis

NO_CLUSTER: Final = (
    "Jobs do not run on a Redis Cluster, because each step of a job changes keys of many slots at once. "
    "Use one server, or one behind Sentinels (redis+sentinel://)."
)
_DAY_S = 86_400.0
_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
_DAYS: Final = 9  # ahead: a job waits a day at most


class WebhookConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `jobs.webhooks`."""

    allowed_networks: tuple[str, ...] = ()
    allow_http: bool = False
    regions: dict[str, str] = {}
    timeout_s: Seconds = 15.0
    concurrency: Positive = 64
    concurrency_per_tenant: Positive = 32
    concurrency_per_receiver: Positive = 16
    disable_after_410_s: Seconds = 7 * _DAY_S


class S3Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `jobs.files.s3`. Credentials come from the environment (`AWS_*`) or the machine's role."""

    bucket: str = ""
    prefix: str = "causeway"
    endpoint: str = ""
    region: str = "us-east-1"


class FilesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `jobs.files`: the place of files' content. If none is set, content is in Redis, within small quotas."""

    path: str = ""
    s3: S3Config = S3Config()


class BatchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `jobs.batches`. Quotas apply to a tenant with all its devices."""

    max_file_bytes: Positive = 100 * 1024 * 1024
    max_files: Positive = 1000
    max_bytes: Positive = 1024 * 1024 * 1024
    max_redis_file_bytes: Positive = 16 * 1024 * 1024
    max_redis_bytes: Positive = 64 * 1024 * 1024
    max_redis_total_bytes: Positive = 512 * 1024 * 1024
    max_open_batches: Positive = 20
    max_batches: Positive = 1000
    max_lines: Positive = 50_000
    max_line_bytes: Positive = 1024 * 1024
    max_open_jobs: Positive = 100
    completion_window_s: Seconds = _DAY_S
    file_ttl_s: Seconds = 7 * _DAY_S


class StoredResponsesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `jobs.responses`: stored responses and conversations. Bounds apply to a tenant with all its devices."""

    by_default: bool = True
    max_responses: Positive = 10_000
    max_bytes: Positive = 64 * 1024 * 1024
    ttl_s: Seconds = 30 * _DAY_S


class JobsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `jobs`."""

    redis: RedisAddress = ""
    region: str = ""
    replicas: Annotated[int, Meta(ge=0)] | None = None
    replica_timeout_s: Annotated[float, Meta(gt=0, le=4)] = 1.0
    durability: Literal["require", "warn"] = "require"
    key_prefix: str = "causeway:jobs"
    encryption_key_file: str = ""
    max_body_bytes: Positive = 1024 * 1024
    max_result_bytes: Positive = 4 * 1024 * 1024
    max_queued: Positive = 100_000
    min_queued_per_tenant: Positive = 100
    max_unfinished: Positive = 20_000
    max_unfinished_bytes: Positive = 256 * 1024 * 1024
    max_ended: Positive = 10_000
    max_ended_bytes: Positive = 256 * 1024 * 1024
    max_dead_letters: Positive = 10_000
    max_event_streams: Positive = 256
    default_deadline_s: Seconds = _DAY_S
    max_deadline_s: Seconds = 7 * _DAY_S
    result_ttl_s: Seconds = _DAY_S
    dead_letter_ttl_s: Seconds = 7 * _DAY_S
    max_attempts: Positive = 5
    attempt_timeout_s: Seconds = 300.0
    lease_s: Seconds = 15.0
    lease_check_s: Seconds = 0.4
    reclaim_interval_s: Seconds = 1.0
    limit_retry_s: Seconds = 60.0
    backoff_s: Seconds = 1.0
    backoff_max_s: Seconds = 60.0
    concurrency: Count = 0
    drain_s: Pause = 20.0
    webhooks: WebhookConfig = WebhookConfig()
    batches: BatchConfig = BatchConfig()
    files: FilesConfig = FilesConfig()
    responses: StoredResponsesConfig = StoredResponsesConfig()

    @property
    def replicas_to_wait_for(self) -> int:
        """Return the minimum number of replicas that must confirm accepted data; 0 for none."""
        return int(is_sentinel(self.redis)) if self.replicas is None else self.replicas

    @property
    def max_record_age_ms(self) -> int:
        """Maximum age of a record of a job, batch, file or response after its acceptance."""
        longest_s = self.max_deadline_s + self.result_ttl_s + self.dead_letter_ttl_s + self.batches.file_ttl_s
        return int(max(longest_s, self.responses.ttl_s) * 1000)

    def retry_delay_s(self, error: CausewayError, attempts: int, draw: float) -> float:
        """Return the delay before a failed run is repeated. `attempts`: at least 1; `draw`: uniform in [0, 1)."""
        if isinstance(error, RateLimited) and error.retry_after_s is not None:
            return min(error.retry_after_s, self.limit_retry_s)
        return job_retry_delay_s(attempts, draw, base_s=self.backoff_s, max_s=self.backoff_max_s)

    def check(self) -> None:
        """Check that jobs can be stored in the configured Redis. Raises ConfigError."""
        if self.redis:
            parse_redis(self.redis, "jobs.redis")
        if is_cluster(self.redis):
            raise ConfigError(NO_CLUSTER, where="jobs.redis")


def with_shared_redis(config: JobsConfig, shared: RedisAddress) -> JobsConfig:
    """Return the configuration with the shared Redis, unless jobs have their own or the shared one is a cluster."""
    return config if config.redis or is_cluster(shared) else msgspec.structs.replace(config, redis=shared)


def job_retry_delay_s(attempts: int, draw: float, *, base_s: float, max_s: float) -> float:
    """Return an exponential delay with full jitter: uniform in (0, min(max_s, base_s · 2^(attempts-1))].

    `attempts`: at least 1; `draw`: uniform in [0, 1).
    """
    ceiling = min(max_s, base_s * 2.0 ** min(attempts - 1, 32))
    return ceiling * (1.0 - draw)
