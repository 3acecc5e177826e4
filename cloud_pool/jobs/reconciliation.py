"""What of all that was acknowledged to callers, by the audit files, Redis has lost.

A failover to a replica that lagged, or a restored backup, loses what was written last, and with it the fact that it was
ever accepted. The gateways' audit files still have it: each job and batch is in one before its caller gets an answer.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from ..accounts.audit import AuditRecord
from ..storage.config import JobsConfig
from ..storage.redis_client import RedisClient, as_int
from .http.job_api import ACCEPTED, AcceptedKind

_CHUNK = 500  # keys that Redis is asked for at a time


class LostAcceptance(msgspec.Struct, frozen=True, kw_only=True):
    """A job or batch that was acknowledged and that Redis does not know."""

    id: str
    kind: AcceptedKind
    tenant: str
    device: str
    tier: str
    accepted_at: float  # unix, s; Redis's clock
    last_run: str = ""  # outcome of the job's last run in the same files; "": none is known


class Reconciliation(msgspec.Struct, frozen=True, kw_only=True):
    """The audit files compared with Redis."""

    acknowledged: int
    too_old: int  # of these: their records may have been removed at the end of their time to live
    lost: tuple[LostAcceptance, ...]  # by time
    unreadable_lines: int


class _AuditFiles:
    """The acceptances and the outcomes of runs in audit files. Repeated acceptances count once."""

    def __init__(self, files: Iterable[Path]) -> None:
        """Raises OSError."""
        self.accepted: dict[str, AuditRecord] = {}
        self.last_runs: dict[str, str] = {}
        self.unreadable_lines = 0
        for path in files:
            for line in _lines(path):
                self._add(line)

    def _add(self, line: bytes) -> None:
        if b'"route":"job"' not in line and b'"route":"batch"' not in line:
            return
        try:
            record = msgspec.json.decode(line, type=AuditRecord)
        except (msgspec.DecodeError, UnicodeDecodeError):
            self.unreadable_lines += 1  # such as one that a full disk cut short
            return
        if record.outcome == ACCEPTED:
            self.accepted.setdefault(record.id, record)
        else:
            self.last_runs[record.id] = record.outcome


async def reconcile(database: RedisClient, config: JobsConfig, files: Iterable[Path]) -> Reconciliation:
    """Find what the audit files of gateways and workers say was accepted, and Redis does not have.

    A record lives for `result_ttl_s` after its job's end (`file_ttl_s` for a batch), so an acceptance that is older
    proves nothing. A dead letter that was purged counts as lost.

    Raises:
        OSError: a file cannot be read
        JobStoreUnavailable: Redis does not answer
    """
    found = _AuditFiles(files)
    now = await database.now_ms() / 1000.0
    ttl_s = {"job": config.result_ttl_s, "batch": config.batches.file_ttl_s}
    recent = [record for record in found.accepted.values() if record.at > now - ttl_s[record.route]]
    lost = []
    for start in range(0, len(recent), _CHUNK):
        chunk = recent[start : start + _CHUNK]
        exist = await database.commands([("EXISTS", database.key(record.route, record.id)) for record in chunk])
        lost += [record for record, is_there in zip(chunk, exist, strict=True) if not as_int(is_there)]
    return Reconciliation(
        acknowledged=len(found.accepted),
        too_old=len(found.accepted) - len(recent),
        lost=tuple(_lost(record, found.last_runs) for record in sorted(lost, key=lambda record: record.at)),
        unreadable_lines=found.unreadable_lines,
    )


def _lost(record: AuditRecord, last_runs: dict[str, str]) -> LostAcceptance:
    return LostAcceptance(
        id=record.id,
        kind="batch" if record.route == "batch" else "job",
        tenant=record.tenant,
        device=record.device,
        tier=record.tier,
        accepted_at=record.at,
        last_run=last_runs.get(record.id, ""),
    )


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, also of one that a log rotation has compressed. Raises OSError."""
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
        yield from file
