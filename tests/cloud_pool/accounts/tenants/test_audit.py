"""The audit log."""

from __future__ import annotations

import errno
import json
import stat
import threading
from pathlib import Path
from typing import IO

import pytest

from causeway_server.cloud_pool.accounts.audit import AuditLog, AuditRecord, open_private


def record(number: int = 0) -> AuditRecord:
    return AuditRecord(
        at=1.0,
        id=f"r{number}",
        tenant="acme",
        device="kiosk",
        token_id="t",
        policy="retail@9f2c",
        route="chat",
        tier="large",
        outcome="ok",
        prompt_tokens=7,
        completion_tokens=3,
        pico_usd=12,
    )


def test_records_are_appended_as_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    path.write_text("{}\n")
    log = AuditLog(str(path))
    log.start()
    for number in range(100):
        log.enqueue(record(number))
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line.get("id") for line in lines] == [None, *(f"r{number}" for number in range(100))]
    assert (lines[1]["tenant"], lines[1]["policy"], lines[1]["prompt_tokens"]) == ("acme", "retail@9f2c", 7)
    assert log.lost == 0


def test_a_full_queue_loses_records_and_counts_them(tmp_path: Path) -> None:
    """Enqueueing never blocks, even while the disk does."""
    path, stuck, waiting = tmp_path / "audit.jsonl", threading.Event(), threading.Event()

    def slow(where: Path) -> IO[bytes]:
        waiting.set()
        stuck.wait()
        return where.open("ab", buffering=0)

    log = AuditLog(str(path), capacity=3, open_file=slow)
    log.start()
    log.enqueue(record())
    waiting.wait()
    for number in range(10):
        log.enqueue(record(number))
    assert log.lost == 7
    stuck.set()
    log.close()
    assert len(path.read_text().splitlines()) == 4


def test_a_full_disk_loses_records_and_counts_them(tmp_path: Path) -> None:
    """When the disk has room again, records are written again."""
    path, faults = tmp_path / "audit.jsonl", [2]

    def full(where: Path) -> IO[bytes]:
        if faults[0]:
            faults[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        return where.open("ab", buffering=0)

    log = AuditLog(str(path), open_file=full)
    log.start()
    for number in range(5):
        log.enqueue(record(number))
    log.close()
    assert log.lost == 2
    assert len(path.read_text().splitlines()) == 3


def test_a_rotated_file_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    taken = threading.Semaphore(0)

    class SignallingLog(AuditLog):
        def _write(self, line: bytes) -> None:
            super()._write(line)
            taken.release()

    log = SignallingLog(str(path))
    log.start()
    log.enqueue(record(1))
    taken.acquire()
    path.rename(tmp_path / "audit.1")
    log.enqueue(record(2))
    log.close()
    assert "r1" in (tmp_path / "audit.1").read_text()
    assert "r2" in path.read_text()


def test_targets_none_and_stdout(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    off = AuditLog("")
    off.start()
    off.enqueue(record())
    off.close()
    assert off.lost == 0
    out = AuditLog("-")
    out.start()
    out.enqueue(record(5))
    out.close()
    assert b'"id":"r5"' in capfdbinary.readouterr().out


def test_other_accounts_cannot_read_the_records(tmp_path: Path) -> None:
    """A file of an earlier version is closed to them; a group that an operator gave it to keeps its rights."""
    for name, before, after in (("new", None, 0o600), ("old", 0o644, 0o640), ("shared", 0o660, 0o660)):
        path = tmp_path / name
        if before is not None:
            path.touch()
            path.chmod(before)
        open_private(path).close()
        assert stat.S_IMODE(path.stat().st_mode) == after, name
