"""Acceptance of a new job within the limits of the outbox, which apply to jobs that have not ended, and to the bytes of
requests and results:

1. A job that is not bulk displaces the oldest waiting bulk jobs, if there is no other room.
2. A bulk job displaces older bulk jobs. Bulk jobs together have a share of the outbox; the rest is reserved.
3. Each client has a share of both: half while other clients hold jobs, else seven eighths, so that a new client finds
   room; bulk jobs of a client may fill all of the bulk share. Beyond its share a client displaces only its own bulk
   jobs, and a bulk job displaces its client's own before those of others.
4. A job without room even so is refused.
"""

from __future__ import annotations

import heapq
import sqlite3
from collections.abc import Iterator
from operator import itemgetter
from typing import NamedTuple, get_args

from causeway_server.router.errors import IdempotencyConflict
from causeway_server.router.jobs.job import JobEvent, encode_job_error
from causeway_server.router.jobs.submission import is_same_request
from causeway_server.router.trackers import network_of, stored_share

from ..config.schema import OutboxConfig
from .record import Accepted, EdgeJob, JobDropped, Lane, OutboxFull, ReplyTo
from .rows import OutboxRows
from .schema import BY_KEY, FREE_KEY, OLDEST_BULK, decode_job, read_row


class OutboxAcceptance:
    """Accepts jobs within the limits."""

    def __init__(self, config: OutboxConfig, rows: OutboxRows) -> None:
        self._config = config
        self._rows = rows

    def known(self, db: sqlite3.Connection, owner: str, key: str) -> EdgeJob | None:
        row = db.execute(BY_KEY, (owner, key)).fetchone() if key else None
        return None if row is None else read_row(*row)

    def accept(self, db: sqlite3.Connection, job: EdgeJob, body: bytes, reply: ReplyTo | None = None) -> Accepted:
        rows = self._rows
        row = db.execute(BY_KEY, (job.owner, job.key)).fetchone() if job.key else None
        renewed = row is not None and reply is not None and reply.is_new
        if row is not None and not renewed:
            known = read_row(*row)
            if not is_same_request(known.digest, job.digest):
                raise IdempotencyConflict(
                    f"This `Idempotency-Key` was used for the job {known.id} with another body or other headers. Send "
                    "the same request, or use a new key."
                )
            if reply is not None and known.has_ended:  # its sender has lost the answer
                rows.replies.set_due(db, known.seq, rows.time.now())
            return Accepted(known, known=True)
        self._make_room(db, job, len(body))
        if renewed:
            db.execute(FREE_KEY, (job.owner, job.key))
        job = rows.add(db, job, body)
        if reply is not None:
            rows.replies.add(db, job, reply)
        rows.stats.accepted += 1
        return Accepted(job)

    def _make_room(self, db: sqlite3.Connection, job: EdgeJob, body_bytes: int) -> None:
        """Make room for a new job, cases (1) to (4). Raises OutboxFull before any job is dropped."""
        lacking, client_lack = self._lacking(job, body_bytes), self._lacking_share(job, body_bytes)
        victims: list[EdgeJob] = []
        if lacking.any or client_lack.any:
            for is_own, victim in self._giving_way(db, job, own_alone=client_lack.any):
                victims.append(victim)
                lacking = lacking.less(victim)
                client_lack = client_lack.less(victim) if is_own else client_lack
                if not (lacking.any or client_lack.any):
                    break
        if lacking.any or client_lack.any:
            raise OutboxFull(self._full(client_lack.any, job), retry_after_s=30.0)
        dropped = JobDropped("The outbox was full, and a newer job displaced the oldest bulk jobs.")
        for victim in victims:
            self._rows.end(db, victim, JobEvent.CANCEL, {"error": encode_job_error(dropped)})
            self._rows.stats.dropped += 1

    def _giving_way(self, db: sqlite3.Connection, job: EdgeJob, own_alone: bool) -> Iterator[tuple[bool, EdgeJob]]:
        """Yield waiting bulk jobs in the order of displacement, and whether each is the client's own."""
        client = network_of(job.owner)
        if job.priority != "bulk" and not own_alone:  # (1)
            yield from ((network_of(job.owner) == client, job) for job in _oldest_bulk(db))
            return
        if self._rows.held_by(client).bulk:  # (3)
            yield from ((True, job) for job in _oldest_bulk(db) if network_of(job.owner) == client)
        if not own_alone:  # (2)
            yield from ((False, job) for job in _oldest_bulk(db) if network_of(job.owner) != client)

    def _lacking(self, job: EdgeJob, body_bytes: int) -> _Lack:
        """Return the number of jobs and bytes by which a new job exceeds the limits of all clients. (1) (2)"""
        config, stats = self._config, self._rows.stats
        lack = _Lack(stats.unfinished + 1 - config.max_jobs, stats.bytes + body_bytes - config.max_bytes)
        if job.priority != "bulk":
            return lack
        jobs, size = int(config.max_jobs * config.bulk_share), int(config.max_bytes * config.bulk_share)
        return _Lack(max(lack.jobs, stats.bulk + 1 - jobs), max(lack.size, stats.bulk_bytes + body_bytes - size))

    def _lacking_share(self, job: EdgeJob, body_bytes: int) -> _Lack:
        """Return the number of jobs and bytes by which a new job exceeds its client's share. (3)"""
        config, stats, held = self._config, self._rows.stats, self._rows.held_by(job.owner)
        jobs = stored_share(config.max_jobs, stats.unfinished > held.unfinished)
        size = stored_share(config.max_bytes, stats.bytes > held.bytes)
        lack = _Lack(held.unfinished + 1 - jobs, held.bytes + body_bytes - size)
        if job.priority != "bulk" or stats.bulk == held.bulk:
            return lack
        jobs, size = int(config.max_jobs * config.bulk_share) // 2, int(config.max_bytes * config.bulk_share) // 2
        return _Lack(
            max(lack.jobs, held.bulk + 1 - max(1, jobs)), max(lack.size, held.bulk_bytes + body_bytes - max(1, size))
        )

    def _full(self, is_share: bool, job: EdgeJob) -> str:
        stats, held = self._rows.stats, self._rows.held_by(job.owner)
        if is_share:
            return (
                f"The outbox holds {held.unfinished} jobs and {held.bytes} bytes of this client, which is "
                "its share. Wait until they have ended, purge results, or raise jobs.max_jobs or "
                "jobs.max_bytes."
            )
        return (
            f"The outbox holds {stats.unfinished} jobs and {stats.bytes} bytes, and no waiting bulk job "
            "can be displaced. Wait, or raise jobs.max_jobs or jobs.max_bytes."
        )


def _oldest_bulk(db: sqlite3.Connection) -> Iterator[EdgeJob]:
    by_lane = [db.execute(OLDEST_BULK, (lane,)) for lane in get_args(Lane)]
    return (decode_job(record) for _, record in heapq.merge(*by_lane, key=itemgetter(0)))


class _Lack(NamedTuple):
    """Jobs and bytes by which a limit is exceeded; zero or less means that there is room."""

    jobs: int
    size: int

    @property
    def any(self) -> bool:
        return self.jobs > 0 or self.size > 0

    def less(self, victim: EdgeJob) -> _Lack:
        return _Lack(self.jobs - 1, self.size - victim.body_bytes)
