"""The store of jobs in Redis: typed calls of the scripts in `lua/`. Times are Unix milliseconds from Redis's clock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Literal

import msgspec

from causeway_server.router import errors
from causeway_server.router.jobs.job import JobState, encode_job_error
from causeway_server.router.jobs.submission import is_same_request

from ..accounts.tenants.config import TenantLimits
from ..admission import Priority
from .config import JobsConfig
from .encryption import NO_CIPHER, ContentCipher
from .live_answers import LiveTexts
from .record import (
    LISTED_FIELDS,
    AcceptedJob,
    ClaimedJobs,
    DeadLetter,
    DueJobs,
    ExpiredJob,
    JobRecord,
    LeaseStates,
    NewJob,
    QueueDepth,
    QueueDepths,
    RunBill,
    encode_bill,
    parse_record,
)
from .redis_client import Argument, RedisClient, Reply, as_bytes, as_fields, as_int, as_list, as_text, list_newest

_RETRY_AFTER_S = 5.0
_MAX_COST = 1e6  # as in fair_queue.lua
log = logging.getLogger(__name__)
_NO_LIMITS = TenantLimits()
_OPTIONAL = (
    *("webhook", "batch", "line", "offset", "custom_id", "traceparent", "user", "not_before"),
    *("token_id", "token_issued"),
)
"""Fields of a NewJob that are stored only if they differ from their default."""
_MAX_WAIT_S = 2.0  # below the client's timeout


def job_cost(job: NewJob, limits: TenantLimits) -> float:
    """Return the job's cost in the fair queue of its tier: tokens divided by its tenant's weight."""
    return min(max(1.0, job.tokens) / limits.weight, _MAX_COST)


def unfinished_jobs(config: JobsConfig, limits: TenantLimits) -> int:
    """Return the tenant's limit of unfinished jobs."""
    return limits.max_jobs or config.max_unfinished


def same_key_conflict(other: str) -> errors.IdempotencyConflict:
    """Return the error for a different request under the key of the job `other`."""
    return errors.IdempotencyConflict(
        f"The Idempotency-Key was used for {other} with another body. Send the same body, or use a new key."
    )


def refusal(
    verdict: str, job: NewJob, other: str, config: JobsConfig, limits: TenantLimits
) -> errors.CausewayError | None:
    """Return the reason why the job is not accepted; None if it is. `other`: the job that has its idempotency key."""
    if verdict == "conflict":
        return same_key_conflict(other)
    if verdict == "batch_over":
        return errors.JobAlreadyEnded(f"The batch {job.batch} accepts no more lines.")
    if verdict == "queue_full":
        message = (
            f"The queue of {job.tier} for {job.priority} jobs is full: {config.max_queued} jobs (jobs.max_queued), "
            f"more than {config.min_queued_per_tenant} of them yours (jobs.min_queued_per_tenant)."
        )
        return errors.QueueFull(message, retry_after_s=_RETRY_AFTER_S)
    if verdict == "tenant_full":
        bound = "tenants max_jobs" if limits.max_jobs else "jobs.max_unfinished"
        message = f"Your tenant has {unfinished_jobs(config, limits)} unfinished jobs, which is the maximum ({bound})."
        return errors.RateLimited(message, retry_after_s=_RETRY_AFTER_S)
    if verdict == "tenant_bytes":
        message = (
            f"The requests of your tenant's unfinished jobs would exceed {config.max_unfinished_bytes} "
            "bytes, which is the maximum (jobs.max_unfinished_bytes)."
        )
        return errors.RateLimited(message, retry_after_s=_RETRY_AFTER_S)
    return None


class JobStore:
    """Accepts, claims and finishes jobs. Every method raises JobStoreUnavailable while Redis does not answer."""

    def __init__(self, database: RedisClient, config: JobsConfig, cipher: ContentCipher = NO_CIPHER) -> None:
        self._db = database
        self._config = config
        self._cipher = cipher
        self.texts = LiveTexts(database, cipher)
        self._result_ttl_ms = int(config.result_ttl_s * 1000)
        self._lease_ms = int(config.lease_s * 1000)
        self._dead_letters_kept = (int(config.dead_letter_ttl_s * 1000), config.max_dead_letters)  # ms, number

    # --- callers ---------------------------------------------------------------------------------------------------

    async def accept(self, job: NewJob, limits: TenantLimits = _NO_LIMITS) -> AcceptedJob:
        """Accept a job: when this returns, it is on Redis's disk.

        Raises:
            IdempotencyConflict, JobAlreadyEnded: The key was used with another body; the job's batch has ended.
            QueueFull: The queue of the tier and priority is full, and the tenant has its share of it.
            RateLimited: The tenant has too many unfinished jobs.
        """
        sealed = self._cipher.seal(job.body, "request", job.owner, job.id)
        config = self._config
        fields: list[Argument] = ["endpoint", job.endpoint, "body", sealed, "cost", job_cost(job, limits)]
        fields += ["max_attempts", config.max_attempts]
        optional = {name: getattr(job, name) for name in _OPTIONAL}
        optional |= {"tags": ",".join(job.tags), "ttl": job.ttl_ms}
        for name, value in optional.items():
            fields += [name, value] if value else []
        place = (job.id, job.owner, job.tier, job.priority, job.deadline_ms)
        queued = (config.max_queued, config.min_queued_per_tenant)
        unfinished = (unfinished_jobs(config, limits), config.max_unfinished_bytes, len(job.body))
        kept = (config.max_record_age_ms, config.max_ended, config.max_ended_bytes)
        arguments = (*place, job.idempotency, job.digest, *queued, *unfinished, *kept, *fields)
        verdict, job_id = map(as_text, as_list(await self._db.run("accept", self._db.time, *arguments)))
        if error := refusal(verdict, job, job_id, config, limits):
            raise error
        return AcceptedJob(job_id, verdict == "known")

    async def known(self, owner: str, key: str, digest: str) -> str:
        """Return the id of the owner's job under this key, or "". Raises IdempotencyConflict for another body."""
        if not key:
            return ""
        values = as_list(await self._db.command("HMGET", self._db.key("idempotency", owner, key), "id", "digest"))
        job, known_digest = (as_text(value) if isinstance(value, bytes) else "" for value in values)
        if job and not is_same_request(known_digest, digest):
            raise same_key_conflict(job)
        return job

    async def of_key(self, owner: str, key: str) -> str:
        """Return the id of the job that `owner` submitted under this digest of a key. Raises NotFound."""
        job = await self._db.command("HGET", self._db.key("idempotency", owner, key), "id")
        if not isinstance(job, bytes):
            raise errors.NotFound("No job was submitted under this `Idempotency-Key`, or its record has been deleted.")
        return as_text(job)

    async def get(self, job: str, owner: str) -> JobRecord:
        """Return a job of `owner`, without its body. Raises NotFound, also for another owner's, or RecordUnreadable."""
        record = await self.lookup(job)
        if record is None or record.owner != owner:
            raise job_not_found(job)
        return record

    async def lookup(self, job: str) -> JobRecord | None:
        """Return a job of any owner, without its body. Raises RecordUnreadable."""
        return _parse(job, await self._db.command(*self._listed_fields(job)))

    async def read_result(self, job: str, owner: str) -> bytes:
        """Return the JSON answer to a job of `owner`, or b"". Raises ContentKeyMissing or RecordUnreadable."""
        stored = as_bytes(await self._db.command("GET", self._db.key("result", job)))
        return self._cipher.open(stored, "result", owner, job)

    async def read_answer(
        self, job: str, owner: str, check: Callable[[JobRecord], object] = lambda _: None
    ) -> tuple[JobRecord, bytes]:
        """Return a job and the body of its answer, if any. Raises as `get`, `check` and `read_result`."""
        record = await self.get(job, owner)
        check(record)
        return record, await self.read_result(job, owner) if record.state is JobState.SUCCEEDED else b""

    def read_request(self, record: JobRecord) -> JobRecord:
        """Return a claimed record with its request as it was sent. Raises ContentKeyMissing or RecordUnreadable."""
        body = self._cipher.open(record.body, "request", record.owner, record.id)
        return msgspec.structs.replace(record, body=body)

    async def list_owned(self, owner: str, *, after: str = "", limit: int = 20) -> list[JobRecord]:
        """Return jobs of `owner`, newest first, after the job `after`. Raises NotFound for an unknown one."""
        key = self._db.key("jobs", owner)
        start = 0
        if after:
            rank = await self._db.command("ZREVRANK", key, after)
            if rank is None:
                raise job_not_found(after)
            start = as_int(rank) + 1
        return await list_newest(self._db, key, start, limit, self._listed_fields, _parse)

    def _listed_fields(self, job: str) -> tuple[str, ...]:
        return "HMGET", self._db.key("job", job), *LISTED_FIELDS

    async def cancel(self, job: str, owner: str) -> None:
        """Cancel a job; later reports of its worker have no effect. Raises NotFound or JobAlreadyEnded."""
        verdict = as_text(await self._db.run("cancel", self._db.time, job, owner, self._result_ttl_ms))
        if verdict == "absent":
            raise job_not_found(job)
        if verdict == "ended":
            raise errors.JobAlreadyEnded(f"The job {job} has ended, so it cannot be cancelled.")

    # --- workers: each report returns False if the job is another worker's by now; then nothing has changed. A report
    # that is accepted bills its run in the same transaction. -------------------------------------------------------

    async def claim(self, consumer: str, tier: str, priorities: Iterable[Priority]) -> ClaimedJobs:
        """Claim at most one job per entry of `priorities`, tenants in turn. Unreadable ones become dead letters."""
        bounds = (self._lease_ms, self._result_ttl_ms, *self._dead_letters_kept)
        reply = await self._db.run("claim", self._db.time, consumer, tier, *bounds, *priorities)
        rows, ids, expired, more = as_list(reply)
        records, unreadable = [], [as_text(job) for job in as_list(ids)]
        for row in as_list(rows):
            fields = as_fields(row)
            try:
                records.append(parse_record(fields))
            except errors.RecordUnreadable as error:
                log.error("Job %s becomes a dead letter: %s", as_text(fields["id"]), error.message)
                await self._db.run("quarantine", self._db.time, as_text(fields["id"]), *self._dead_letters_kept)
                unreadable.append(as_text(fields["id"]))
        return ClaimedJobs(tuple(records), tuple(unreadable), _expired_jobs(expired), bool(as_int(more)))

    async def wait(self, tier: str) -> None:
        """Wait until there may be a job of this tier, for at most 2 s."""
        await self._db.command("BLPOP", self._db.key("wake", tier), _MAX_WAIT_S)

    async def renew_leases(self, leases: Iterable[tuple[str, int]], *, renew: bool) -> LeaseStates:
        """Return the lost ones of the leases (job, fence), and followed jobs; with `renew`, renew other leases."""
        flat = [part for job, fence in leases for part in (job, fence)]
        if not flat:
            return LeaseStates()
        lease_ms = self._lease_ms if renew else 0
        lost, followed = as_list(await self._db.run("renew_leases", lease_ms, *flat))
        return LeaseStates(*(frozenset(as_text(job) for job in as_list(jobs)) for jobs in (lost, followed)))

    def seal_result(self, record: JobRecord, result: bytes) -> bytes:
        """Return an answer in its stored form."""
        return self._cipher.seal(result, "result", record.owner, record.id)

    async def succeed(
        self, job: str, fence: int, result: bytes, cache: str = "", *, bill: RunBill | None = None
    ) -> bool:
        """Report an answer, as returned by `seal_result`."""
        arguments = (job, fence, self._result_ttl_ms, result, cache, encode_bill(bill))
        return as_int(await self._db.run("succeed", self._db.time, *arguments)) > 0

    async def fail(
        self,
        job: str,
        fence: int,
        error: errors.CausewayError,
        event: Literal["fail", "expire", "cancel"] = "fail",
        *,
        bill: RunBill | None = None,
    ) -> bool:
        """Report an error that another attempt would not fix; `event` decides the job's final state."""
        arguments = (job, fence, self._result_ttl_ms, encode_job_error(error), error.code, event, encode_bill(bill))
        return as_int(await self._db.run("fail", self._db.time, *arguments)) > 0

    async def postpone(
        self,
        job: str,
        fence: int,
        error: errors.CausewayError,
        delay_s: float,
        *,
        counts: bool,
        park: bool = False,
        bill: RunBill | None = None,
    ) -> bool:
        """Schedule the next attempt in `delay_s`; without attempts left the job becomes a dead letter.

        `counts`: this run was an attempt. `park`: the tenant is over a limit, so none of its jobs starts for `delay_s`.
        """
        fault = (encode_job_error(error), error.code, *self._dead_letters_kept)
        arguments = (job, fence, int(delay_s * 1000), int(counts), *fault, int(park), encode_bill(bill))
        return as_int(await self._db.run("postpone", self._db.time, *arguments)) > 0

    async def release(self, job: str, fence: int) -> bool:
        """Return a job to its queue. The run does not count as an attempt."""
        return as_int(await self._db.run("release", self._db.time, job, fence)) > 0

    async def publish_progress(self, job: str, fence: int, progress: bytes) -> None:
        """Append a progress event. `progress`: JSON."""
        await self._db.run("publish_progress", job, fence, progress)

    async def promote_and_expire(self) -> DueJobs:
        """Process due jobs: queue waiting ones, return those of lost workers, expire late ones."""
        bounds = (self._result_ttl_ms, *self._dead_letters_kept)
        changed, expired = as_list(await self._db.run("promote_and_expire", self._db.time, *bounds))
        return DueJobs(as_int(changed), _expired_jobs(expired))

    async def unblock_all(self) -> int:
        """Let all parked jobs try again, because limits may have changed. Return the number of tenants."""
        return as_int(await self._db.run("unblock_all", self._db.time))

    # --- operators -------------------------------------------------------------------------------------------------

    async def dead_letters(self, limit: int = 100) -> list[DeadLetter]:
        """Return dead letters, newest first."""
        letters = []
        for entry in as_list(await self._db.command("XREVRANGE", self._db.key("dead"), "+", "-", "COUNT", limit)):
            entry_id, fields = as_list(entry)
            plain = {name: value.decode() for name, value in as_fields(fields).items()}
            died = int(as_text(entry_id).partition("-")[0])
            letters.append(msgspec.convert(plain | {"died": died}, DeadLetter, strict=False))
        return letters

    async def retry(self, job: str) -> bool:
        """Queue a dead letter again, with all attempts and a new deadline. False: it is none, or a line of a batch."""
        left_ms = int(self._config.default_deadline_s * 1000)
        return as_int(await self._db.run("revive", self._db.time, job, left_ms)) > 0

    async def purge(self, job: str) -> bool:
        """Delete a dead letter. Returns False if the job is not a dead letter."""
        return as_int(await self._db.run("purge", job)) > 0

    async def depths(self) -> QueueDepths:
        """Return the number of jobs by queue and state."""
        queues, *counts = as_list(await self._db.run("depths", self._db.time))
        return QueueDepths(tuple(_depth(row) for row in as_list(queues)), *(as_int(count) for count in counts))


def job_not_found(job: str) -> errors.NotFound:
    """Return the error for a job that does not exist or belongs to another owner."""
    return errors.NotFound(f"You have no job {job[:80]!r}.")


def _parse(_: str, row: Reply) -> JobRecord | None:
    values = zip(LISTED_FIELDS, as_list(row), strict=True)
    fields = {name: value for name, value in values if isinstance(value, bytes)}
    return parse_record(fields) if fields else None


def _expired_jobs(rows: Reply) -> tuple[ExpiredJob, ...]:
    return tuple(ExpiredJob(*(as_text(value) for value in as_list(row))) for row in as_list(rows))


def _depth(row: Reply) -> QueueDepth:
    tier, priority, *numbers = as_list(row)
    return QueueDepth(as_text(tier), as_text(priority), *(as_int(number) for number in numbers))
