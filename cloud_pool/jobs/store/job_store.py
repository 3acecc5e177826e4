"""Jobs in Redis: the scripts of `lua/`, with types. Times are unix ms from Redis's clock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import msgspec

from router.errors import CausewayError, NotFound, QueueFull, RateLimited

from ...admission import Priority
from ..config import JobsConfig
from ..errors import IdempotencyConflict, JobAlreadyEnded, RecordUnreadable
from ..record import LISTED_FIELDS, JobRecord, NewJob, encode_error, parse_record
from .redis_client import RedisClient, Reply, as_bytes, as_fields, as_int, as_list, as_text, redis_time
from .replies import AcceptedJob, ClaimedJobs, DeadLetter, QueueDepth, QueueDepths

_log = logging.getLogger("causeway.cloud.jobs")
_RETRY_AFTER_S = 5.0
_IDLE_CONSUMER_MS = 3_600_000
_MAX_WAIT_S = 2.0  # below the client's timeout


class JobStore:
    """Accepts, claims and finishes jobs. Every method raises JobStoreUnavailable while Redis does not answer.

    Args:
        clock: replaces Redis's clock in tests; unix time, s
    """

    def __init__(self, database: RedisClient, config: JobsConfig, *, clock: Callable[[], float] = redis_time) -> None:
        self._db = database
        self._config = config
        self._clock = clock

    async def now_ms(self) -> int:
        """Return the time of jobs: Redis's unix time."""
        return await self._db.now_ms(self._clock)

    @property
    def _now(self) -> int:
        """What scripts get as the time: negative for Redis's own."""
        return int(self._clock() * 1000)

    @property
    def _result_ttl_ms(self) -> int:
        return int(self._config.result_ttl_s * 1000)

    @property
    def _dead_letter_ttl_ms(self) -> int:
        return int(self._config.dead_letter_ttl_s * 1000)

    @property
    def _max_record_age_ms(self) -> int:
        """No record lives longer after its acceptance."""
        config = self._config
        longest_s = config.max_deadline_s + config.result_ttl_s + config.dead_letter_ttl_s + config.batches.file_ttl_s
        return int(longest_s * 1000)

    # --- callers ---------------------------------------------------------------------------------------------------

    async def accept(self, job: NewJob) -> AcceptedJob:
        """Accept a job. It is on Redis's disk when this returns.

        Raises:
            IdempotencyConflict: the key was used with another body
            JobAlreadyEnded: the job's batch has ended
            QueueFull: the queue of its tier and priority is full
            RateLimited: its owner has too many unfinished jobs
        """
        optional = {
            "webhook": job.webhook,
            "batch": job.batch,
            "ttl": job.ttl_ms or "",
            "tags": ",".join(job.tags),
            "traceparent": job.traceparent,
        }
        fields: list[str | bytes | int] = ["endpoint", job.endpoint, "body", job.body]
        fields += ["max_attempts", self._config.max_attempts]
        for name, value in optional.items():
            fields += [name, value] if value else []
        reply = await self._db.run(
            "accept",
            self._now,
            job.id,
            job.owner,
            job.tier,
            job.priority,
            job.deadline_ms,
            job.idempotency,
            job.digest,
            self._config.max_queued,
            self._config.max_unfinished,
            self._max_record_age_ms,
            *fields,
        )
        verdict, job_id = (as_text(item) for item in as_list(reply))
        if verdict == "conflict":
            raise IdempotencyConflict(
                f"The Idempotency-Key was used with another body, for {job_id}. Send that body again, or a new key."
            )
        if verdict == "batch_over":
            raise JobAlreadyEnded(f"The batch {job.batch} accepts no more lines.")
        if verdict == "queue_full":
            raise QueueFull(f"The queue of {job.tier}, {job.priority}, is full.", retry_after_s=_RETRY_AFTER_S)
        if verdict == "owner_full":
            limit = self._config.max_unfinished
            raise RateLimited(f"You have {limit} unfinished jobs, the maximum.", retry_after_s=_RETRY_AFTER_S)
        return AcceptedJob(job_id, verdict == "known")

    async def get(self, job: str, owner: str) -> JobRecord:
        """Return a job of `owner`, without its body.

        Raises:
            NotFound: also for a job of another owner
            RecordUnreadable: the record is damaged or of another version
        """
        record = await self.lookup(job)
        if record is None or record.owner != owner:
            raise job_not_found(job)
        return record

    async def lookup(self, job: str) -> JobRecord | None:
        """Return a job of any owner, without its body. Raises RecordUnreadable."""
        values = as_list(await self._db.command("HMGET", self._db.key("job", job), *LISTED_FIELDS))
        fields = {name: value for name, value in zip(LISTED_FIELDS, values, strict=True) if isinstance(value, bytes)}
        return parse_record(fields) if fields else None

    async def read_result(self, job: str) -> bytes:
        """Return the JSON body of the answer; empty if there is none."""
        return as_bytes(await self._db.command("GET", self._db.key("result", job)))

    async def list_owned(self, owner: str, *, after: str = "", limit: int = 20) -> list[JobRecord]:
        """Return jobs of `owner`, newest first, from behind the job `after`. Raises NotFound for an unknown `after`.

        Ids whose record has expired are removed from the owner's list on the way. Unreadable records are left out.
        """
        key = self._db.key("jobs", owner)
        start = 0
        if after:
            rank = await self._db.command("ZREVRANK", key, after)
            if rank is None:
                raise job_not_found(after)
            start = as_int(rank) + 1
        records: list[JobRecord] = []
        while len(records) < limit:
            reply = await self._db.command("ZREVRANGE", key, start, start + limit - 1)
            names = [as_text(name) for name in as_list(reply)]
            expired = []
            for name in names:
                try:
                    record = await self.lookup(name)
                except RecordUnreadable as error:
                    _log.warning("%s is not listed: %s", name, error.message)
                    continue
                if record is None:
                    expired.append(name)
                else:
                    records.append(record)
            if expired:
                await self._db.command("ZREM", key, *expired)
            start += len(names) - len(expired)
            if len(names) < limit:
                break
        return records[:limit]

    async def cancel(self, job: str, owner: str) -> None:
        """Cancel a job; later reports of its worker have no effect. Raises NotFound or JobAlreadyEnded."""
        verdict = as_text(await self._db.run("cancel", self._now, job, owner, self._result_ttl_ms))
        if verdict == "absent":
            raise job_not_found(job)
        if verdict == "ended":
            raise JobAlreadyEnded(f"The job {job} has ended: there is nothing to cancel.")

    # --- workers: each report returns False if the job is another worker's by now; then nothing has changed --------

    async def claim(self, consumer: str, tier: str, priorities: Iterable[Priority]) -> ClaimedJobs:
        """Claim at most one job per entry of `priorities`, those of dead workers first.

        A job whose record cannot be read becomes a dead letter.
        """
        reply = as_list(
            await self._db.run(
                "claim",
                self._now,
                consumer,
                tier,
                int(self._config.lease_s * 1000),
                self._result_ttl_ms,
                self._dead_letter_ttl_ms,
                self._config.max_dead_letters,
                *priorities,
            )
        )
        records, unreadable = [], [as_text(job) for job in as_list(reply[2])]
        for row in as_list(reply[0]):
            fields = as_fields(row)
            try:
                records.append(parse_record(fields))
            except RecordUnreadable as error:
                _log.error("%s is a dead letter: %s", as_text(fields["id"]), error.message)
                await self._quarantine(as_text(fields["id"]))
                unreadable.append(as_text(fields["id"]))
        return ClaimedJobs(tuple(records), tuple(as_text(entry) for entry in as_list(reply[1])), tuple(unreadable))

    async def _quarantine(self, job: str) -> None:
        limits = (self._dead_letter_ttl_ms, self._config.max_dead_letters)
        await self._db.run("quarantine", self._now, job, *limits)

    async def wait(self, tier: str, last_entries: tuple[str, ...]) -> None:
        """Wait until a job is queued behind `last_entries`, at most for `reclaim_interval_s`."""
        queues = [self._db.key("queue", tier, priority) for priority in ("interactive", "standard", "bulk")]
        block_ms = max(1, int(min(self._config.reclaim_interval_s, _MAX_WAIT_S) * 1000))
        await self._db.command("XREAD", "COUNT", 1, "BLOCK", block_ms, "STREAMS", *queues, *last_entries)

    async def renew_leases(self, consumer: str, leases: Iterable[tuple[str, int]], *, renew: bool) -> set[str]:
        """Return which of the leases (job, fence) are lost; with `renew`, renew the others."""
        flat = [part for job, fence in leases for part in (job, fence)]
        if not flat:
            return set()
        return {as_text(job) for job in as_list(await self._db.run("renew_leases", consumer, int(renew), *flat))}

    async def succeed(self, job: str, fence: int, result: bytes, cache: str = "") -> bool:
        """Report an answer. `cache` is the outcome of the shared cache."""
        return as_int(await self._db.run("succeed", self._now, job, fence, self._result_ttl_ms, result, cache)) > 0

    async def fail(self, job: str, fence: int, error: CausewayError, *, expired: bool = False) -> bool:
        """Report an error that another attempt would not mend, or with `expired` a deadline that has passed."""
        event = "expire" if expired else "fail"
        arguments = (job, fence, self._result_ttl_ms, encode_error(error), error.code, event)
        return as_int(await self._db.run("fail", self._now, *arguments)) > 0

    async def postpone(
        self, job: str, fence: int, error: CausewayError, delay_s: float, *, counts: bool, park: bool = False
    ) -> bool:
        """Schedule the next attempt in `delay_s`; without attempts left the job becomes a dead letter.

        Args:
            counts: whether this run counts as an attempt
            park: no job of this tenant starts for `delay_s`: it is over a limit that resets then
        """
        reply = await self._db.run(
            "postpone",
            self._now,
            job,
            fence,
            int(delay_s * 1000),
            int(counts),
            encode_error(error),
            error.code,
            self._dead_letter_ttl_ms,
            self._config.max_dead_letters,
            int(park),
        )
        return as_int(reply) > 0

    async def release(self, job: str, fence: int) -> bool:
        """Return a job to its queue. The run does not count as an attempt."""
        return as_int(await self._db.run("release", job, fence)) > 0

    async def publish_progress(self, job: str, fence: int, progress: bytes) -> None:
        """Append a progress event. `progress` is JSON."""
        await self._db.run("publish_progress", job, fence, progress)

    async def promote_and_expire(self) -> int:
        """Queue waiting jobs that are due and expire late ones. Returns how many changed."""
        return as_int(await self._db.run("promote_and_expire", self._now, self._result_ttl_ms))

    async def release_parked(self) -> int:
        """Let all parked jobs try again, since limits may have changed. Returns the number of tenants."""
        return as_int(await self._db.run("release_parked"))

    async def remove_idle_consumers(self) -> int:
        """Remove the names of workers that hold no job and were silent for an hour. Returns how many."""
        return as_int(await self._db.run("remove_idle_consumers", _IDLE_CONSUMER_MS))

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
        """Queue a dead letter again, with all attempts and a new deadline.

        Returns False if it is no dead letter, or a line of a batch, which has counted it.
        """
        left_ms = int(self._config.default_deadline_s * 1000)
        return as_int(await self._db.run("revive", self._now, job, left_ms)) > 0

    async def purge(self, job: str) -> bool:
        """Delete a dead letter. Returns False if it is none."""
        return as_int(await self._db.run("purge", job)) > 0

    async def depths(self) -> QueueDepths:
        """Count jobs by queue and state."""
        queues, *counts = as_list(await self._db.run("depths", self._now))
        return QueueDepths(tuple(_depth(row) for row in as_list(queues)), *(as_int(count) for count in counts))


def job_not_found(job: str) -> NotFound:
    """Return the error for a job that does not exist or belongs to another owner."""
    return NotFound(f"There is no job {job[:80]!r} of yours.")


def _depth(row: Reply) -> QueueDepth:
    tier, priority, *numbers = as_list(row)
    return QueueDepth(as_text(tier), as_text(priority), *(as_int(number) for number in numbers))
