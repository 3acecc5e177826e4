"""Reconciliation: find jobs and batches that were accepted according to the audit files, but that Redis has lost.

A failover to a replica that lagged, or a restored backup, loses the latest writes, including the acceptance of jobs.
The gateways' audit files still have them: each job and batch is in one before its caller gets an answer.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from pathlib import Path

import msgspec

from ..accounts.audit import AuditRecord
from ..storage.config import JobsConfig
from ..storage.redis_client import RedisClient, as_int
from .http.job_api import ACCEPTED, AcceptedKind

_CHUNK = 500  # keys that Redis is asked for at a time


class LostAcceptance(msgspec.Struct, frozen=True, kw_only=True):
    """A job or batch that was acknowledged and that Redis does not have."""

    id: str
    kind: AcceptedKind
    tenant: str
    device: str
    tier: str
    accepted_at: float  # time of the acceptance, Unix seconds by Redis's clock
    last_run: str = ""  # outcome of the job's last run in the same files; "" if none is known


class Reconciliation(msgspec.Struct, frozen=True, kw_only=True):
    """The result of comparing the audit files with Redis."""

    acknowledged: int
    too_old: int  # number of acceptances so old that their records may have expired
    lost: tuple[LostAcceptance, ...]  # lost acceptances, ordered by time
    unreadable_lines: int


async def reconcile(database: RedisClient, config: JobsConfig, files: Iterable[Path]) -> Reconciliation:
    """Find the acceptances in the audit files of gateways and workers that Redis does not have.

    A record lives for `result_ttl_s` after its job's end (`file_ttl_s` for a batch), so an older acceptance is not
    evidence of a loss. A purged dead letter counts as lost. Raises OSError (files) or JobStoreUnavailable.
    """
    accepted, last_runs, unreadable_lines = _read(files)
    now = await database.now_ms() / 1000.0
    ttl_s = {"job": config.result_ttl_s, "batch": config.batches.file_ttl_s}
    recent = [record for record in accepted.values() if record.at > now - ttl_s[record.route]]
    lost = []
    for start in range(0, len(recent), _CHUNK):
        chunk = recent[start : start + _CHUNK]
        exist = await database.commands([("EXISTS", database.key(record.route, record.id)) for record in chunk])
        lost += [record for record, is_there in zip(chunk, exist, strict=True) if not as_int(is_there)]
    return Reconciliation(
        acknowledged=len(accepted),
        too_old=len(accepted) - len(recent),
        lost=tuple(_lost(record, last_runs) for record in sorted(lost, key=lambda record: record.at)),
        unreadable_lines=unreadable_lines,
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


def _read(files: Iterable[Path]) -> tuple[dict[str, AuditRecord], dict[str, str], int]:
    """Return acceptances, last outcomes by id, and the number of unreadable lines of audit files, also compressed ones.

    Repeated acceptances count once. Raises OSError.
    """
    accepted, last_runs, unreadable_lines = dict[str, AuditRecord](), dict[str, str](), 0
    for path in files:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
            for line in lines:
                if b'"route":"job"' not in line and b'"route":"batch"' not in line:
                    continue
                try:
                    record = msgspec.json.decode(line, type=AuditRecord)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    unreadable_lines += 1  # such as one that a full disk cut short
                    continue
                if record.outcome == ACCEPTED:
                    accepted.setdefault(record.id, record)
                else:
                    last_runs[record.id] = record.outcome
    return accepted, last_runs, unreadable_lines
