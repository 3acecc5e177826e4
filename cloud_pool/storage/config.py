"""The configuration of jobs, webhooks and batches. Requests that exceed a bound are refused with 4xx, never dropped."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated, Final, Literal
from zoneinfo import ZoneInfo

import msgspec
from msgspec import Meta

from causeway_server.router.config import Count, Pause, Positive, Seconds, doc
from causeway_server.router.errors import CausewayError, ConfigError, InvalidRequest, RateLimited
from causeway_server.router.jobs.webhooks import WebhookFormat

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

    allowed_networks: Annotated[
        tuple[str, ...], doc("Private networks that webhooks may reach, such as `10.1.0.0/16`.")
    ] = ()
    allow_http: Annotated[bool, doc("Whether webhooks may go to `http://` URLs.")] = False
    regions: Annotated[
        dict[str, str],
        doc("Regions of receivers, by host. Jobs that are bound to regions have webhooks only to receivers in them."),
    ] = {}
    timeout_s: Annotated[Seconds, doc("Maximum time of one delivery.")] = 15.0
    concurrency: Annotated[Positive, doc("Maximum concurrent deliveries of one worker.")] = 64
    concurrency_per_tenant: Annotated[
        Positive, doc("Maximum concurrent deliveries of one tenant, over all workers.")
    ] = 32
    concurrency_per_receiver: Annotated[
        Positive, doc("Maximum concurrent deliveries of one tenant to one scheme, host and port, over all workers.")
    ] = 16
    disable_after_410_s: Annotated[
        Seconds, doc("Time for which a URL gets no deliveries after it has answered 410 Gone.")
    ] = 7 * _DAY_S
    format: Annotated[
        WebhookFormat,
        doc(
            "Format of the request bodies: `standard` (Standard Webhooks), or a CloudEvent: `cloudevents` "
            "(structured) or `cloudevents-binary`."
        ),
    ] = "standard"
    tenant_formats: Annotated[
        dict[str, WebhookFormat],
        doc("Formats by tenant, for tenants that need a format other than `jobs.webhooks.format`."),
    ] = {}

    def format_of(self, owner: str) -> WebhookFormat:
        """Return the format of the deliveries of `owner` (tenant/device)."""
        return self.tenant_formats.get(owner.partition("/")[0], self.format)


class S3Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `jobs.files.s3`. Credentials come from the environment (`AWS_*`) or the machine's role."""

    bucket: Annotated[str, doc("Name of the bucket. Empty: S3 is not used.")] = ""
    prefix: Annotated[str, doc("Prefix of all object names.")] = "causeway"
    endpoint: Annotated[str, doc("URL of another S3-compatible API, such as MinIO's. Empty: AWS.")] = ""
    region: Annotated[str, doc("AWS region of the bucket.")] = "us-east-1"


class FilesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `jobs.files`: the place of files' content. If none is set, content is in Redis, within small quotas."""

    path: Annotated[str, doc("Folder that all gateways and workers share, such as an NFS mount. Empty: none.")] = ""
    s3: S3Config = S3Config()


class BatchConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `jobs.batches`. Quotas apply to a tenant with all its devices."""

    max_file_bytes: Annotated[Positive, doc("Maximum size of one uploaded file.")] = 100 * 1024 * 1024
    max_files: Annotated[Positive, doc("Maximum files of one tenant, input and output.")] = 1000
    max_bytes: Annotated[Positive, doc("Maximum size of all files of one tenant.")] = 1024 * 1024 * 1024
    max_redis_file_bytes: Annotated[Positive, doc("Maximum size of one uploaded file whose content is in Redis.")] = (
        16 * 1024 * 1024
    )
    max_redis_bytes: Annotated[Positive, doc("Maximum size of all files of one tenant in Redis.")] = 64 * 1024 * 1024
    max_redis_total_bytes: Annotated[Positive, doc("Maximum size of all tenants' files in Redis.")] = 512 * 1024 * 1024
    max_open_batches: Annotated[Positive, doc("Maximum unfinished batches of one tenant.")] = 20
    max_batches: Annotated[
        Positive,
        doc("Maximum batches of one tenant, including those that ended less than `jobs.batches.file_ttl_s` ago."),
    ] = 1000
    max_lines: Annotated[Positive, doc("Maximum lines of one batch.")] = 50_000
    max_line_bytes: Annotated[Positive, doc("Maximum size of one line.")] = 1024 * 1024
    max_open_jobs: Annotated[
        Positive, doc("Maximum open jobs of one batch. Further lines follow as these jobs end.")
    ] = 100
    completion_window_s: Annotated[Seconds, doc("Duration of the completion window `24h`.")] = _DAY_S
    file_ttl_s: Annotated[Seconds, doc("Time for which a file is kept.")] = 7 * _DAY_S


class OffPeakConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `jobs.off_peak`: the hours in which jobs that ask for it start, and their price."""

    hours: Annotated[str, doc("Daily off-peak hours, such as `22:00-06:00`. Empty: none.")] = ""
    timezone: Annotated[str, doc("Time zone of the hours, such as `Europe/Berlin`.")] = "UTC"
    price_share: Annotated[float, Meta(ge=0, le=1), doc("Off-peak price as a share of the tier's price.")] = 1.0


class StoredResponsesConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `jobs.responses`: stored responses and conversations. Bounds apply to a tenant with all its devices."""

    by_default: Annotated[bool, doc("Whether a response is stored if its request has no `store`.")] = True
    max_responses: Annotated[
        Positive, doc("Maximum stored responses and conversations of one tenant. The oldest ones give way to new ones.")
    ] = 10_000
    max_bytes: Annotated[Positive, doc("Maximum size of what is stored for one tenant, likewise.")] = 64 * 1024 * 1024
    ttl_s: Annotated[
        Seconds, doc("Time for which a response is kept. A conversation is kept for as long after its last change.")
    ] = 30 * _DAY_S


class JobsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `jobs`."""

    redis: Annotated[
        RedisAddress,
        doc(
            "Redis of the jobs: a URL, or keys as in `redis`. A cluster is refused, because jobs need "
            "all their keys on one server. Empty: the Redis of `redis`, unless it is a cluster."
        ),
    ] = ""
    region: Annotated[
        str,
        doc(
            "Region of the jobs' Redis and of the content of files. Jobs, batches and files that are bound to other "
            "regions are refused. Workers must be in it. Empty: outside every region."
        ),
    ] = ""
    replicas: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        doc(
            "Minimum number of replicas that must confirm a job, file or batch before it is accepted (WAIT); with "
            "Sentinels, all replicas that are up must confirm. 0: none. Default: 1 with Sentinels, otherwise 0."
        ),
    ] = None
    replica_timeout_s: Annotated[
        float,
        Meta(gt=0, le=4),
        doc("Maximum time to wait for replicas. After it the request gets 503, although the job may exist."),
    ] = 1.0
    durability: Annotated[
        Literal["require", "warn"],
        doc("Reaction to a Redis that may lose jobs on `kill -9`: `require` refuses jobs, `warn` only logs a warning."),
    ] = "require"
    key_prefix: Annotated[str, doc("Prefix of all Redis keys.")] = "causeway:jobs"
    encryption_key_file: Annotated[
        str,
        doc(
            "File with the keys that encrypt requests, results, files and cached answers in Redis. It must be equal "
            "for all processes. Empty: no encryption."
        ),
    ] = ""
    max_body_bytes: Annotated[Positive, doc("Maximum size of one job's request.")] = 1024 * 1024
    max_result_bytes: Annotated[Positive, doc("Maximum size of one job's result.")] = 4 * 1024 * 1024
    max_queued: Annotated[Positive, doc("Maximum queued jobs of one tier and priority, over all tenants.")] = 100_000
    min_queued_per_tenant: Annotated[
        Positive, doc("Number of queued jobs of each tenant that are accepted even if the queue is full.")
    ] = 100
    max_unfinished: Annotated[Positive, doc("Maximum unfinished jobs of one tenant.")] = 20_000
    max_unfinished_bytes: Annotated[Positive, doc("Maximum size of all requests of one tenant's unfinished jobs.")] = (
        256 * 1024 * 1024
    )
    max_ended: Annotated[
        Positive,
        doc(
            "Maximum ended jobs kept per tenant. Beyond it, the jobs that expire first are deleted "
            "early. A job that never ran is kept for ten minutes."
        ),
    ] = 10_000
    max_ended_bytes: Annotated[
        Positive,
        doc("Maximum size of the answers kept per tenant. Beyond it, the answers that expire first are deleted early."),
    ] = 256 * 1024 * 1024
    max_dead_letters: Annotated[Positive, doc("Maximum dead letters. Beyond it, the oldest are deleted.")] = 10_000
    max_event_streams: Annotated[
        Positive, doc("Maximum clients that follow events per gateway; one tenant may have half.")
    ] = 256
    default_deadline_s: Annotated[Seconds, doc("Deadline of a job that sets none.")] = _DAY_S
    max_deadline_s: Annotated[Seconds, doc("Latest deadline that a job may set.")] = 7 * _DAY_S
    result_ttl_s: Annotated[
        Seconds, doc("Time for which results, events and idempotency keys are kept after the job's end.")
    ] = _DAY_S
    dead_letter_ttl_s: Annotated[Seconds, doc("Time for which a dead letter is kept.")] = 7 * _DAY_S
    max_attempts: Annotated[Positive, doc("Number of attempts after which a job becomes a dead letter.")] = 5
    attempt_timeout_s: Annotated[Seconds, doc("Maximum time of one attempt.")] = 300.0
    max_revise_s: Annotated[
        Seconds, doc("Maximum time in which late parts may revise an answer (`revise_within_ms`).")
    ] = 120.0
    lease_s: Annotated[Seconds, doc("Lease of a worker. A worker that does not renew it in time counts as dead.")] = (
        15.0
    )
    lease_check_s: Annotated[Seconds, doc("Interval at which a worker checks whether its jobs were cancelled.")] = 0.4
    reclaim_interval_s: Annotated[
        Seconds, doc("Interval at which a worker searches for late jobs and for jobs of dead workers.")
    ] = 1.0
    limit_retry_s: Annotated[
        Seconds, doc("Time after which a tenant over a limit tries one job, if the limit is not reset earlier.")
    ] = 60.0
    backoff_s: Annotated[
        Seconds, doc("Pause before the second attempt. It doubles with each further attempt, with jitter.")
    ] = 1.0
    backoff_max_s: Annotated[Seconds, doc("Maximum pause between two attempts.")] = 60.0
    concurrency: Annotated[
        Count, doc("Maximum jobs of one tier in one worker. 0: as many as the gateways' load allows.")
    ] = 0
    drain_s: Annotated[
        Pause, doc("Maximum time for jobs to finish after SIGTERM. Other jobs return to their queue.")
    ] = 20.0
    off_peak: OffPeakConfig = OffPeakConfig()
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

    def price_share(self, window: str) -> float:
        """Return the share of the tier's price that is billed to a job of this window."""
        return self.off_peak.price_share if window else 1.0

    def check(self) -> None:
        """Check that jobs can be stored in the configured Redis. Raises ConfigError."""
        if self.redis:
            parse_redis(self.redis, "jobs.redis")
        if is_cluster(self.redis):
            raise ConfigError(NO_CLUSTER, where="jobs.redis")


def with_shared_redis(config: JobsConfig, shared: RedisAddress) -> JobsConfig:
    """Return the configuration with the shared Redis, unless jobs have their own or the shared one is a cluster."""
    return config if config.redis or is_cluster(shared) else msgspec.structs.replace(config, redis=shared)


class OffPeakWindow(msgspec.Struct, frozen=True):
    """An off-peak window, half-open, in Unix milliseconds."""

    start: int
    end: int


class OffPeakHours:
    """Off-peak hours of a configuration, in which jobs with `window: off_peak` may start. The time comes from Redis.

    The hours follow the wall clock of a time zone, so a night with a clock change is an hour shorter or longer. A start
    time that the change skips moves to the next existing time; of a repeated time, the first counts.
    """

    def __init__(self, config: OffPeakConfig) -> None:
        """Parse the hours. Raises ConfigError."""
        self._hours: tuple[time, time] | None = None
        try:
            self._zone = ZoneInfo(config.timezone)
        except (KeyError, ValueError, OSError):
            reason = f"{config.timezone!r} is not a time zone of this machine (tzdata), such as Europe/Berlin"
            raise ConfigError(reason, where="jobs.off_peak.timezone") from None
        if not config.hours:
            return
        match = _HOURS.fullmatch(config.hours)
        if match is None or match[1] + match[2] == match[3] + match[4]:
            raise ConfigError(f"Write the hours as 22:00-06:00, not {config.hours!r}.", where="jobs.off_peak.hours")
        self._hours = time(int(match[1]), int(match[2])), time(int(match[3]), int(match[4]))

    def __bool__(self) -> bool:
        """Return whether off-peak hours are configured."""
        return self._hours is not None

    def windows(self, now_ms: int) -> list[OffPeakWindow]:
        """Return the windows of the next week, in order, without those that are over."""
        if self._hours is None:
            return []
        today = datetime.fromtimestamp(now_ms / 1000.0, self._zone).date()
        nights = (self._window(today + timedelta(days=days), *self._hours) for days in range(-1, _DAYS))
        return [night for night in nights if night.end > now_ms]

    def wait_ms(self, now_ms: int) -> int:
        """Return the time in milliseconds until the next window begins; 0 inside a window or without any."""
        windows = self.windows(now_ms)
        return max(windows[0].start - now_ms, 0) if windows else 0

    def _window(self, day: date, start: time, end: time) -> OffPeakWindow:
        last = day if end > start else day + timedelta(days=1)
        return OffPeakWindow(self._unix_ms(day, start), self._unix_ms(last, end))

    def _unix_ms(self, day: date, at: time) -> int:
        return int(datetime.combine(day, at, self._zone).astimezone(UTC).timestamp() * 1000)


def no_off_peak_hours() -> InvalidRequest:
    """Return the error for a job that asks for off-peak hours although none are configured."""
    return InvalidRequest("This gateway has no off-peak hours configured (jobs.off_peak.hours).", param="window")


def job_retry_delay_s(attempts: int, draw: float, *, base_s: float, max_s: float) -> float:
    """Return an exponential delay with full jitter: uniform in (0, min(max_s, base_s · 2^(attempts-1))].

    Args:
        attempts: Number of attempts so far, at least 1.
        draw: Random number, uniform in [0, 1).
    """
    ceiling = min(max_s, base_s * 2.0 ** min(attempts - 1, 32))
    return ceiling * (1.0 - draw)
