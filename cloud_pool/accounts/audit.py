"""Audit log: caller, policy, tier, tokens and outcome of each request, never its content; one JSON object per line.

A thread writes the lines, so a slow or full disk delays no answer; it loses records, which are counted. After a log
rotation the file is opened again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import stat
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

import anyio
import msgspec

_QUEUE_CAPACITY = 10_000
_WRITE_TIMEOUT_S = 1.0
log = logging.getLogger(__name__)


class AuditRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Record of one request. No field can hold content: each is a validated name, a number or a known word."""

    at: float  # unix, s
    id: str  # the request's, as in logs and traces
    tenant: str
    device: str
    token_id: str  # "" for a static token
    policy: str  # name@revision of the edge's policy; "" if the edge sent none
    # chat, completion, embedding, response, transcription, generate, realtime, job, batch or stream
    route: str
    tier: str  # "" if refused before a tier was known
    # ok or an error's code; `accepted` for a job or batch that was acknowledged to its caller; `superseded` for a job's
    # run whose report was not accepted
    outcome: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    audio_ms: int = 0
    estimated: bool = False  # the prompt's tokens, or some of them: the client left before the model told them
    pico_usd: int = 0  # cost, 1e-12 USD
    cache: str = ""  # hit, stale, miss, coalesced, bypass; "" without a cache
    variant: str = ""  # the tier's variant that answered
    region: str = ""  # region of the tier that answered
    session: str = ""  # ``stayed; reason=requested``: whether the tier of the last turn answered; "" without sessions
    guard: str = ""  # rules of the guard that applied, ``personal=mask``
    parts: str = ""  # what became of audio, images and files, ``audio=ok,image=timeout``; "" without any


class _PendingRecord(NamedTuple):
    record: AuditRecord
    written: Future[None] | None = None  # set when the thread is done with the record


def open_private(path: Path) -> IO[bytes]:
    """Open a file for appending with no access for other users, but for an operator's group. Raises OSError."""
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600), "ab", buffering=0)
    mode = os.fstat(file.fileno()).st_mode
    if stat.S_ISREG(mode) and mode & stat.S_IRWXO:
        with suppress(OSError):  # Another account owns it.
            os.fchmod(file.fileno(), stat.S_IMODE(mode) & ~stat.S_IRWXO)
    return file


class AuditLog:
    """Log that appends records to a file.

    Args:
        target: File path, "-" for stdout, "" for none.
        capacity: Number of records that may wait for the thread.
        open_file: Function that opens a path as a binary file for appending.
    """

    def __init__(
        self, target: str, *, capacity: int = _QUEUE_CAPACITY, open_file: Callable[[Path], IO[bytes]] = open_private
    ) -> None:
        self._target = target
        self._open_file = open_file
        self._queue: queue.Queue[_PendingRecord | None] = queue.Queue(capacity)
        self._thread: threading.Thread | None = None
        self._file: IO[bytes] | None = None
        self._inode = -1
        # Two counters, because two threads count: an increment is not atomic.
        self._lost_on_enqueue = 0
        self._lost_on_write = 0

    @property
    def lost(self) -> int:
        """Number of records that were not written."""
        return self._lost_on_enqueue + self._lost_on_write

    def start(self) -> None:
        if self._target:
            self._thread = threading.Thread(target=self._write_all, name="audit", daemon=True)
            self._thread.start()

    def enqueue(self, record: AuditRecord) -> None:
        """Hand a record to the thread. Never blocks: a full queue loses the record."""
        self._put(_PendingRecord(record))

    async def write(self, record: AuditRecord, timeout_s: float = _WRITE_TIMEOUT_S) -> None:
        """Hand a record to the thread and wait until it is in the file, safe from a kill, at most `timeout_s`."""
        written: Future[None] = Future()
        if self._put(_PendingRecord(record, written)) and self._thread is not None:
            with anyio.move_on_after(timeout_s):
                await asyncio.wrap_future(written)

    def _put(self, entry: _PendingRecord) -> bool:
        if not self._target:
            return False
        try:
            self._queue.put_nowait(entry)
        except queue.Full:
            self._lost_on_enqueue += 1
            return False
        return True

    def close(self, timeout_s: float = 5.0) -> None:
        """Write the pending records, for at most about `timeout_s`, and end the thread."""
        if self._thread is None:
            return
        try:
            self._queue.put(None, timeout=timeout_s)
        except queue.Full:
            self._lost_on_enqueue += self._queue.qsize()
            return
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._thread = None

    def _write_all(self) -> None:
        while (entry := self._queue.get()) is not None:
            try:
                self._write(msgspec.json.encode(entry.record) + b"\n")
            except (OSError, ValueError) as error:
                if not self._lost_on_write:
                    log.error("Audit records cannot be written: %s", error)
                self._lost_on_write += 1
                self._close_file()
            if entry.written is not None and entry.written.set_running_or_notify_cancel():
                entry.written.set_result(None)
        self._close_file()

    def _write(self, line: bytes) -> None:
        """Append a line; if a full disk cut an earlier line short, end that line first. Raises OSError."""
        if self._target == "-":
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
            return
        file = self._open_current()
        if file.write(line) < len(line):
            file.write(b"\n")
            raise OSError(f"{self._target}: only a part of an audit record was written.")

    def _open_current(self) -> IO[bytes]:
        path = Path(self._target)
        if self._file is None or not path.exists() or path.stat().st_ino != self._inode:
            self._close_file()
            self._file = self._open_file(path)
            self._inode = path.stat().st_ino
        return self._file

    def _close_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
