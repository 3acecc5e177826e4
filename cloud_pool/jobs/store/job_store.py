"""Jobs in Redis: what `scripts` does, with types. Wall-clock times are unix milliseconds and come from the caller."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec

from router.errors import CausewayError, NotFound, QueueFull, RateLimited

from ...admission import Priority
from ..config import JobsConfig
from ..errors import IdempotencyConflict, JobAlreadyEnded
from ..record import JobRecord, NewJob, encode_error, parse_record
from .redis_client import RedisClient, Reply, data, items, number, pairs, text

_RETRY_S = 5.0
_SILENT_MS = 3_600_000
_LONGEST_WAIT_S = 2.0  # well within the time in which any answer must come


class AcceptedJob(msgspec.Struct, frozen=True):
    id: str
    known: bool  # it was accepted before, under the same idempotency key


class ClaimedJobs(msgspec.Struct, frozen=True):
    records: tuple[JobRecord, ...]
    seen: tuple[str, ...]  # the last entry of each priority's queue, to wait for the next


class DeadLetter(msgspec.Struct, frozen=True):
    """A dead letter. It says nothing of what was asked."""

    id: str
    owner: str
    tier: str
    attempts: int
    code: str
    died: int  # unix ms


class QueueDepth(msgspec.Struct, frozen=True):
    tier: str
    priority: str
    queued: int
    running: int
    oldest_ms: int  # unix; 0: nothing is queued


class QueueDepths(msgspec.Struct, frozen=True):
    queues: tuple[QueueDepth, ...]
    dead: int
    waiting: int
    pending_deliveries: int


class JobStore:
    """Raises StoreUnavailable, everywhere, when Redis does not answer."""

    def __init__(self, database: RedisClient, config: JobsConfig, *, clock: Callable[[], float] = time.time) -> None:
        self._db = database
        self._config = config
        self._clock = clock

    @property
    def now_ms(self) -> int:
        return int(self._clock() * 1000)

    @property
    def _ttl(self) -> int:
        return int(self._config.result_ttl_s * 1000)

    @property
    def _dead_ttl(self) -> int:
        return int(self._config.dead_letter_ttl_s * 1000)

    @property
    def _forgotten(self) -> int:
        """No record is kept for longer, ms after its acceptance."""
        config = self._config
        longest_s = config.max_deadline_s + config.result_ttl_s + config.dead_letter_ttl_s + config.batches.file_ttl_s
        return int(longest_s * 1000)

    # --- callers ---------------------------------------------------------------------------------------------------

    async def accept(self, offer: NewJob) -> AcceptedJob:
        """On Redis's disk when this returns. Raises IdempotencyConflict, QueueFull, RateLimited or JobEnded."""
        optional = {
            "webhook": offer.webhook,
            "batch": offer.batch,
            "ttl": offer.ttl_ms or "",
            "tags": ",".join(offer.tags),
            "traceparent": offer.traceparent,
        }
        fields: list[str | bytes | int] = ["endpoint", offer.endpoint, "body", offer.body]
        fields += ["max_attempts", self._config.max_attempts]
        for name, value in optional.items():
            fields += [name, value] if value else []
        reply = await self._db.run(
            "accept",
            self.now_ms,
            offer.id,
            offer.owner,
            offer.tier,
            offer.priority,
            offer.deadline_ms,
            offer.idempotency,
            offer.digest,
            self._config.max_queued,
            self._config.max_unfinished,
            self.now_ms - self._forgotten,
            *fields,
        )
        verdict, found = (text(item) for item in items(reply))
        if verdict == "conflict":
            raise IdempotencyConflict(
                f"The Idempotency-Key was used with another body, for {found}. Send that body again, or a new key."
            )
        if verdict == "batch_over":
            raise JobAlreadyEnded(f"The batch {offer.batch} takes no more lines.")
        if verdict == "queue_full":
            raise QueueFull(f"The queue of {offer.tier}, {offer.priority}, is full.", retry_after_s=_RETRY_S)
        if verdict == "owner_full":
            raise RateLimited(
                f"You have {self._config.max_unfinished} unfinished jobs: no more.", retry_after_s=_RETRY_S
            )
        return AcceptedJob(found, verdict == "known")

    async def get(self, job: str, owner: str) -> JobRecord:
        """Raises NotFound, also for what belongs to another."""
        record = await self.find(job)
        if record is None or record.owner != owner:
            raise job_not_found(job)
        return record

    async def find(self, job: str) -> JobRecord | None:
        fields = pairs(await self._db.command("HGETALL", self._db.key("job", job)))
        return parse_record(fields) if fields else None

    async def result(self, job: str) -> bytes:
        return data(await self._db.command("GET", self._db.key("result", job)))

    async def owned(self, owner: str, *, after: str = "", limit: int = 20) -> list[JobRecord]:
        """Newest first, from behind `after`. Those whose time to live ended are forgotten on the way."""
        key = self._db.key("jobs", owner)
        start = 0
        if after:
            rank = await self._db.command("ZREVRANK", key, after)
            if rank is None:
                raise job_not_found(after)
            start = number(rank) + 1
        found: list[JobRecord] = []
        while len(found) < limit:
            names = [text(name) for name in items(await self._db.command("ZREVRANGE", key, start, start + limit - 1))]
            gone = []
            for name in names:
                record = await self.find(name)
                if record is None:
                    gone.append(name)
                else:
                    found.append(record)
            if gone:
                await self._db.command("ZREM", key, *gone)
            start += len(names) - len(gone)
            if len(names) < limit:
                break
        return found[:limit]

    async def cancel(self, job: str, owner: str) -> None:
        """From now on no report about it counts. Raises NotFound or JobEnded."""
        verdict = text(await self._db.run("cancel", self.now_ms, job, owner, self._ttl))
        if verdict == "absent":
            raise job_not_found(job)
        if verdict == "ended":
            raise JobAlreadyEnded(f"The job {job} has ended: there is nothing to cancel.")

    # --- workers ---------------------------------------------------------------------------------------------------

    async def claim(self, consumer: str, tier: str, turns: Iterable[Priority]) -> ClaimedJobs:
        """One job a turn at most, those of dead workers first."""
        reply = items(
            await self._db.run(
                "claim",
                self.now_ms,
                consumer,
                tier,
                int(self._config.lease_s * 1000),
                self._ttl,
                self._dead_ttl,
                self._config.max_dead_letters,
                *turns,
            )
        )
        records = tuple(parse_record(pairs(record)) for record in items(reply[0]))
        return ClaimedJobs(records, tuple(text(entry) for entry in items(reply[1])))

    async def wait(self, tier: str, seen: tuple[str, ...]) -> None:
        """Until a job is queued behind `seen`, or `reclaim_interval_s` is over."""
        queues = [self._db.key("queue", tier, priority) for priority in ("interactive", "standard", "bulk")]
        block = max(1, int(min(self._config.reclaim_interval_s, _LONGEST_WAIT_S) * 1000))
        await self._db.command("XREAD", "COUNT", 1, "BLOCK", block, "STREAMS", *queues, *seen)

    async def keep(self, consumer: str, held: Iterable[tuple[str, int]], *, renew: bool) -> set[str]:
        """Which of the held (job, fence) are no longer this worker's; the lease of the others is renewed if asked."""
        flat = [part for job, fence in held for part in (job, fence)]
        if not flat:
            return set()
        return {text(job) for job in items(await self._db.run("renew_leases", consumer, int(renew), *flat))}

    async def succeed(self, job: str, fence: int, result: bytes, cache: str = "") -> bool:
        """`cache`: what the shared cache did. False: the job was another's, and nothing happened. So for all
        reports."""
        return number(await self._db.run("succeed", self.now_ms, job, fence, self._ttl, result, cache)) > 0

    async def fail(self, job: str, fence: int, error: CausewayError, *, expired: bool = False) -> bool:
        event = "expire" if expired else "fail"
        done = await self._db.run("fail", self.now_ms, job, fence, self._ttl, encode_error(error), error.code, event)
        return number(done) > 0

    async def postpone(self, job: str, fence: int, error: CausewayError, due_ms: int, *, counts: bool) -> bool:
        """Tried again at `due_ms`; dead when its attempts are used up. `counts`: whether this was one of them."""
        done = await self._db.run(
            "postpone",
            self.now_ms,
            job,
            fence,
            due_ms,
            int(counts),
            encode_error(error),
            error.code,
            self._dead_ttl,
            self._config.max_dead_letters,
        )
        return number(done) > 0

    async def release(self, job: str, fence: int) -> bool:
        return number(await self._db.run("release", job, fence)) > 0

    async def note(self, job: str, fence: int, progress: bytes) -> None:
        await self._db.run("publish_progress", job, fence, progress)

    async def tick(self) -> int:
        """Queue what is due, expire what is late. Returns how many moved."""
        return number(await self._db.run("promote_and_expire", self.now_ms, self._ttl))

    async def retire(self) -> int:
        """Forget the names of workers that hold nothing and were silent for an hour."""
        return number(await self._db.run("remove_idle_consumers", _SILENT_MS))

    # --- operators -------------------------------------------------------------------------------------------------

    async def dead_letters(self, limit: int = 100) -> list[DeadLetter]:
        """Dead letters, newest first."""
        found = []
        for entry in items(await self._db.command("XREVRANGE", self._db.key("dead"), "+", "-", "COUNT", limit)):
            at, fields = items(entry)
            plain = {name: value.decode() for name, value in pairs(fields).items()}
            died = int(text(at).partition("-")[0])
            found.append(msgspec.convert(plain | {"died": died}, DeadLetter, strict=False))
        return found

    async def retry(self, job: str) -> bool:
        """With all its attempts and a new deadline. False: it is no dead letter, or its batch has counted it."""
        deadline = self.now_ms + int(self._config.default_deadline_s * 1000)
        return number(await self._db.run("revive", self.now_ms, job, deadline)) > 0

    async def purge(self, job: str) -> bool:
        return number(await self._db.run("purge", job)) > 0

    async def depths(self) -> QueueDepths:
        queues, dead, waiting, pending = items(await self._db.run("depths"))
        return QueueDepths(tuple(_depth(row) for row in items(queues)), number(dead), number(waiting), number(pending))


def job_not_found(job: str) -> NotFound:
    return NotFound(f"There is no job {job[:80]!r} of yours.")


def _depth(row: Reply) -> QueueDepth:
    tier, priority, queued, running, oldest = items(row)
    return QueueDepth(text(tier), text(priority), number(queued), number(running), number(oldest))
