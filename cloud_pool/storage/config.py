"""Configuration of jobs, webhooks and batches. Everything is bounded; what exceeds a bound gets 4xx, never dropped."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated, Final, Literal
from zoneinfo import ZoneInfo

import msgspec
from msgspec import Meta

from causeway_server.router.config import Positive, Seconds
from causeway_server.router.errors import CausewayError, ConfigError, InvalidRequest, RateLimited
from causeway_server.router.jobs.webhooks import WebhookFormat

from ..redis.config import RedisAddress, is_cluster, is_sentinel, parse_redis

NO_CLUSTER: Final = (
    "jobs do not run on a Redis Cluster, because each step of a job changes keys of many slots at once: use one "
    "server, or one behind Sentinels (redis+sentinel://)"
)
_DAY_S = 86_400.0
_HOURS = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")
_DAYS: Final = 9  # ahead: a job waits a day at most


class WebhookConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `jobs.webhooks`."""

    allowed_networks: tuple[str, ...] = ()  # private networks that webhooks may reach, as 10.1.0.0/16
    allow_http: bool = False  # beside https
    timeout_s: Seconds = 15.0  # of one delivery
    concurrency: Positive = 64  # deliveries of one worker at a time
    concurrency_per_tenant: Positive = 32  # of one tenant, in all workers
    concurrency_per_receiver: Positive = 16  # of one tenant to one scheme, host and port, in all workers
    disable_after_410_s: Seconds = 7 * _DAY_S  # how long a URL that answered 410 Gone gets no deliveries
    # of the bodies: `standard` (Standard Webhooks), or a CloudEvent: `cloudevents` (structured), `cloudevents-binary`
    format: WebhookFormat = "standard"
    tenant_formats: dict[str, WebhookFormat] = {}  # the same by tenant, for those that need another one

    def format_of(self, owner: str) -> WebhookFormat:
        """Return the format of an owner's deliveries. `owner`: tenant/device."""
        return self.tenant_formats.get(owner.partition("/")[0], self.format)


class S3Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `jobs.files.s3`. Credentials come from the environment (`AWS_*`) or the machine's role."""

    bucket: str = ""  # empty: S3 is not used
    prefix: str = "causeway"  # of all object names
    endpoint: str = ""  # URL of another S3 API, such as MinIO's; empty: AWS
    region: str = "us-east-1"


class FilesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `jobs.files`: where the content of files lives. With neither it is in Redis, within small quotas."""

    path: str = ""  # folder that all gateways and workers share, such as an NFS mount
    s3: S3Config = S3Config()


class BatchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `jobs.batches`. Quotas are of one tenant, whatever its devices are."""

    max_file_bytes: Positive = 100 * 1024 * 1024  # of one uploaded file
    max_files: Positive = 1000  # files of one tenant, input and output
    max_bytes: Positive = 1024 * 1024 * 1024  # of all files of one tenant
    max_redis_file_bytes: Positive = 16 * 1024 * 1024  # of one uploaded file whose content is in Redis
    max_redis_bytes: Positive = 64 * 1024 * 1024  # of all files of one tenant in Redis
    max_redis_total_bytes: Positive = 512 * 1024 * 1024  # of all files of all tenants in Redis
    max_open_batches: Positive = 20  # batches of one tenant that have not ended
    max_batches: Positive = 1000  # batches of one tenant, with those that ended less than `file_ttl_s` ago
    max_lines: Positive = 50_000  # of one batch
    max_line_bytes: Positive = 1024 * 1024  # of one line
    max_open_jobs: Positive = 100  # jobs that one batch has open at once: more lines become jobs as these end
    completion_window_s: Seconds = _DAY_S  # the 24h of completion_window
    file_ttl_s: Seconds = 7 * _DAY_S  # how long a file is kept


class OffPeakConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `jobs.off_peak`: when jobs that ask for it start, and what they cost."""

    hours: str = ""  # as 22:00-06:00, every day; empty: there are none
    timezone: str = "UTC"  # of these hours, as Europe/Berlin
    price_share: Annotated[float, Meta(ge=0, le=1)] = 1.0  # of the tier's price


class JobsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `jobs`."""

    # as `redis` above, but no cluster: jobs need all their keys on one server; empty: `redis`, unless that is a cluster
    redis: RedisAddress = ""
    # replicas that must at least have a job, file or batch before it is accepted (WAIT); with Sentinels all that are up
    # must; 0: none; empty: 1 with Sentinels, else 0
    replicas: Annotated[int, Meta(ge=0)] | None = None
    replica_timeout_s: Annotated[float, Meta(gt=0, le=4)] = 1.0  # then 503; the job may exist all the same
    durability: Literal["require", "warn"] = "require"  # of a Redis that may lose jobs on kill -9: refuse or log
    key_prefix: str = "causeway:jobs"  # of all Redis keys
    encryption_key_file: str = (
        ""  # of requests, results and files at rest, the same for all processes; "": not encrypted
    )
    max_body_bytes: Positive = 1024 * 1024  # of one job's request
    max_result_bytes: Positive = 4 * 1024 * 1024  # of one job's result
    max_queued: Positive = 100_000  # jobs of one tier and priority, of all tenants
    min_queued_per_tenant: Positive = 100  # so many of each tenant's are accepted in a full queue, too
    max_unfinished: Positive = 20_000  # jobs of one tenant
    max_unfinished_bytes: Positive = 256 * 1024 * 1024  # requests of one tenant's unfinished jobs
    # ended jobs of one tenant with their answers; those beyond that are forgotten before their time, the one that would
    # expire first at first. A job that never ran is kept for ten minutes
    max_ended: Positive = 10_000
    max_ended_bytes: Positive = 256 * 1024 * 1024
    max_dead_letters: Positive = 10_000  # the oldest are dropped beyond that
    max_event_streams: Positive = 256  # clients that follow events, per gateway; of one tenant at most half
    default_deadline_s: Seconds = _DAY_S  # of a job whose request names no deadline
    max_deadline_s: Seconds = 7 * _DAY_S  # longest deadline that a request may name
    result_ttl_s: Seconds = _DAY_S  # of results, events and idempotency keys, after the job's end
    dead_letter_ttl_s: Seconds = 7 * _DAY_S  # how long a dead letter is kept
    max_attempts: Positive = 5  # then the job is a dead letter
    attempt_timeout_s: Seconds = 300.0  # of one run
    max_revise_s: Seconds = 120.0  # longest time in which late parts may revise a job's answer (`revise_within_ms`)
    lease_s: Seconds = 15.0  # a worker that does not renew its lease for so long is taken for dead
    lease_check_s: Seconds = 0.4  # how soon a worker notices that a job was cancelled
    reclaim_interval_s: Seconds = 1.0  # how often a worker looks for late jobs and for jobs of dead workers
    limit_retry_s: Seconds = 60.0  # a tenant over a limit tries one job at the limit's reset, or after so long
    backoff_s: Seconds = 1.0  # before the second attempt; doubles with each further one, with jitter
    backoff_max_s: Seconds = 60.0  # longest back-off
    concurrency: Annotated[int, Meta(ge=0)] = 0  # most jobs of a tier in one worker; 0: as many as gateways leave
    drain_s: Annotated[float, Meta(ge=0)] = 20.0  # on SIGTERM; unfinished jobs then return to their queue
    off_peak: OffPeakConfig = OffPeakConfig()
    webhooks: WebhookConfig = WebhookConfig()
    batches: BatchConfig = BatchConfig()
    files: FilesConfig = FilesConfig()

    @property
    def replicas_to_wait_for(self) -> int:
        """Replicas that must at least confirm what is accepted; 0: none."""
        return int(is_sentinel(self.redis)) if self.replicas is None else self.replicas

    @property
    def max_record_age_ms(self) -> int:
        """No record of a job, batch or file lives longer after its acceptance."""
        longest_s = self.max_deadline_s + self.result_ttl_s + self.dead_letter_ttl_s + self.batches.file_ttl_s
        return int(longest_s * 1000)

    def retry_delay_s(self, error: CausewayError, attempts: int, chance: float) -> float:
        """Return the time until a run that failed is repeated. `attempts`: at least 1; `chance`: uniform in [0, 1)."""
        if isinstance(error, RateLimited) and error.retry_after_s is not None:
            return min(error.retry_after_s, self.limit_retry_s)
        return job_retry_delay_s(attempts, chance, base_s=self.backoff_s, max_s=self.backoff_max_s)

    def price_share(self, window: str) -> float:
        """Return the share of the tier's price that a job of this window costs."""
        return self.off_peak.price_share if window else 1.0

    def check(self) -> None:
        """Raises ConfigError for a Redis where jobs cannot be."""
        if self.redis:
            parse_redis(self.redis, "jobs.redis")
        if is_cluster(self.redis):
            raise ConfigError(NO_CLUSTER, where="jobs.redis")


def with_shared_redis(config: JobsConfig, shared: RedisAddress) -> JobsConfig:
    """Return the configuration with the shared Redis, unless jobs have a Redis of their own or it is a cluster."""
    return config if config.redis or is_cluster(shared) else msgspec.structs.replace(config, redis=shared)


class Opening(msgspec.Struct, frozen=True):
    """One night. Unix ms; `end` is not part of it."""

    start: int
    end: int


class OffPeakHours:
    """The off-peak hours of a configuration: when jobs with `window: off_peak` may start. The time comes from Redis.

    Hours are those of a wall clock in a time zone, so a night in which it is changed is an hour shorter or longer. An
    hour that such a night skips begins with the next one that exists; of one that it repeats the first counts.
    """

    def __init__(self, config: OffPeakConfig) -> None:
        """Raises ConfigError."""
        self._hours: tuple[time, time] | None = None
        try:
            self._zone = ZoneInfo(config.timezone)
        except (KeyError, ValueError, OSError):
            reason = f"{config.timezone!r} is no time zone of this machine (tzdata), such as Europe/Berlin"
            raise ConfigError(reason, where="jobs.off_peak.timezone") from None
        if not config.hours:
            return
        match = _HOURS.fullmatch(config.hours)
        if match is None or match[1] + match[2] == match[3] + match[4]:
            raise ConfigError(f"write them as 22:00-06:00, not {config.hours!r}", where="jobs.off_peak.hours")
        self._hours = time(int(match[1]), int(match[2])), time(int(match[3]), int(match[4]))

    def __bool__(self) -> bool:
        """Whether there are any."""
        return self._hours is not None

    def openings(self, now_ms: int) -> list[Opening]:
        """Return the nights that are not over, in order, for a week."""
        if self._hours is None:
            return []
        today = datetime.fromtimestamp(now_ms / 1000.0, self._zone).date()
        nights = (self._opening(today + timedelta(days=days), *self._hours) for days in range(-1, _DAYS))
        return [night for night in nights if night.end > now_ms]

    def wait_ms(self, now_ms: int) -> int:
        """Return how long until they begin; 0 within them, or without any."""
        openings = self.openings(now_ms)
        return max(openings[0].start - now_ms, 0) if openings else 0

    def _opening(self, day: date, start: time, end: time) -> Opening:
        last = day if end > start else day + timedelta(days=1)
        return Opening(self._unix_ms(day, start), self._unix_ms(last, end))

    def _unix_ms(self, day: date, at: time) -> int:
        return int(datetime.combine(day, at, self._zone).astimezone(UTC).timestamp() * 1000)


def no_off_peak_hours() -> InvalidRequest:
    """Return the error for a job that asks for hours that do not exist."""
    return InvalidRequest("there are no off-peak hours here (jobs.off_peak.hours)", param="window")


def job_retry_delay_s(attempts: int, chance: float, *, base_s: float, max_s: float) -> float:
    """Return an exponential delay with full jitter: uniform in (0, min(max_s, base_s · 2^(attempts-1))].

    Args:
        attempts: attempts so far, at least 1
        chance: uniform in [0, 1)
    """
    ceiling = min(max_s, base_s * 2.0 ** min(attempts - 1, 32))
    return ceiling * (1.0 - chance)
