"""The egress ledger of a process: a thread that appends to a log (`router.ledger.log`), beside the requests' path.

What a request adds waits in memory for at most half of `commit_s`. Then the thread writes it with a signed tree head
and one fsync. A crash loses what waits; what it left half written is cut off at the next start. Full files are kept up
to `max_bytes`. While the disk is full or failing nothing waits for it: numbers that do not fit into memory are recorded
as lost.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from ...config import EgressLedgerConfig
from ...errors import ConfigError
from ...ledger.log import Closed, Confirmed, FileHead, Item, Lost, Opened, TreeHead
from ...ledger.proofs import commitment, log_id, signed_text
from ...ledger.tree import Frontier
from ..folders import sync, write_new

log = logging.getLogger(__name__)

FOLDER: Final = "egress"
_MOST: Final = 20_000  # records that wait for a disk
_DASHES: Final = 3  # in a claim
_LONGEST: Final = 128
_FILES: Final = 16  # into which `max_bytes` is divided


class EgressLedger:
    """A log that this process alone writes, in a folder of its name below `folder`. `role`: device or gateway; `name`:
    the device's in its fleet; "" for others; `key_file`: PEM of the Ed25519 key that signs, made if there is none.
    """

    def __init__(self, folder: Path, role: str, config: EgressLedgerConfig, key_file: Path, name: str = "") -> None:
        self._root, self._role, self._name, self._key_file = folder, role, name, key_file
        self._commit_s, self._file_bytes = config.commit_s, config.max_bytes // _FILES
        self.id = self.problem = ""
        self.lost = 0  # numbers that were not kept
        self._epoch, self._seq, self._unkept, self._place = secrets.token_hex(4), 0, 0, ""
        self._waiting: deque[Opened | Closed | Item | Confirmed | Lost] = deque()
        self._receipts: deque[str] = deque(maxlen=_MOST)
        self._wake, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="egress-ledger", daemon=True)
        self._held, self._is_failing = 0, False  # records that the thread is writing; whether its last write failed
        # Used by the thread only, after `start`:
        self._durable, self._size = 0, 0  # next number in the file, and the file's bytes
        self._tree, self._head = Frontier(), TreeHead(0, "", 0.0, "")
        self._file, self._lock = -1, -1

    def start(self) -> None:
        """Open the log and commit the beginning of an epoch, an fsync or two. Raises ConfigError if another process
        writes to it, or the key is not one. If the disk fails, requests go on without a ledger, and `problem` says so.
        """
        try:
            self._key = self._read_key()
            public = self._key.public_key().public_bytes_raw()
            self.id, self._public = log_id(public), public.hex()
            self._folder = self._root / self.id
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._open()
        except BlockingIOError:
            raise ConfigError(f"Another process writes to {self._folder}.", where="egress_ledger") from None
        except OSError as error:
            self._report(f"No egress ledger until a restart: {self._root} cannot be used ({error.strerror}).")
            return
        self._add(self._opened())
        self._commit()
        self._thread.start()

    def close(self) -> None:
        """Write what waits, and end the epoch. Blocks for a limited time."""
        if self._thread.is_alive():
            if self._unkept:
                self._waiting.append(Lost(time.time(), self._seq - self._unkept, self._unkept))
            self._add(Closed(time.time(), self._epoch))
            self._stop.set()
            self._thread.join(5.0)
        for file in (self._file, self._lock):
            if file >= 0 and not self._thread.is_alive():
                os.close(file)
        self._file = self._lock = -1

    # --- the requests' path ------------------------------------------------------------------------------------------

    def sent(self, body: bytes, decision: str, target: str, region: str, *, private: bool) -> str:
        """Record a request that is about to leave; return its header's value, "" if the log cannot be written yet."""
        if not self._place:
            self.lost += 1
            return ""
        nonce, seq = os.urandom(16), self._seq
        header = f"{self._place}-{seq}-{self._durable}-{nonce.hex()}"
        self._put(Item(time.time(), seq, commitment(nonce, body), decision, target, region, private, ""))
        return header

    def arrived(self, header: str, body: bytes, request: str, caller: str, region: str, *, private: bool) -> str:
        """Record a body that arrived with this header, "" for none; return the receipt, "" for none."""
        if not self._place:
            self.lost += 1
            return ""
        claim, _, nonce = header.rpartition("-")
        seq, hidden, receipt = self._seq, "", ""
        if claim.count("-") == _DASHES and len(header) < _LONGEST and header.isascii():  # the auditor reads it whole
            try:
                hidden = commitment(bytes.fromhex(nonce), body)
                receipt = f"{self._place}-{seq}-{self._durable}-{claim.split('-')[2]}"
            except ValueError:
                claim = ""
        self._put(Item(time.time(), seq, hidden, request, caller, region, private, claim if hidden else ""))
        return receipt

    def confirmed(self, header: str) -> None:
        """Record the receipt in a response's header."""
        if len(header) < _LONGEST and header.isascii():
            self._receipts.append(header)
            if not self._wake.is_set():
                self._wake.set()

    def _put(self, item: Item) -> None:
        """Let an item wait for the thread. Those that find no room are recorded as lost once there is some."""
        self._seq += 1
        if len(self._waiting) + self._held >= _MOST:
            self._unkept += 1
            self.lost += 1
            return
        if self._unkept:
            self._waiting.append(Lost(time.time(), item.seq - self._unkept, self._unkept))
            self._unkept = 0
        self._add(item)

    def _add(self, record: Opened | Closed | Item) -> None:
        self._waiting.append(record)
        if not self._wake.is_set():
            self._wake.set()

    def _opened(self) -> Opened:
        return Opened(time.time(), self._epoch, self._role, self._name, self._commit_s, self._durable)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stop.is_set():
            self._wake.wait()
            self._stop.wait(self._commit_s / 2)
            self._wake.clear()
            self._commit()
        self._commit()

    def _commit(self) -> None:
        """Write what waits; after a failure it goes on waiting."""
        self._held = len(self._waiting)
        records = [self._waiting.popleft() for _ in range(self._held)]
        if self._receipts and not self._is_failing:  # else they wait in their own bounded deque
            receipts = tuple([self._receipts.popleft() for _ in range(len(self._receipts))])
            records.insert(bool(records) and isinstance(records[0], Opened), Confirmed(receipts))
        if not records:
            return
        lines = [msgspec.json.encode(record) for record in records]
        tree = Frontier(self._tree.size, self._tree.hashes)
        tree.extend(lines)
        last = next((record for record in reversed(records) if isinstance(record, Item | Lost)), None)
        durable = self._durable
        if last is not None:
            durable = last.seq + 1 if isinstance(last, Item) else last.first + last.count
        head = self._signed(tree)
        try:
            self._write(b"\n".join((*lines, msgspec.json.encode(head), b"")))
        except OSError as error:
            self._waiting.extendleft(reversed(records))
            self._held, self._is_failing = 0, True
            self._wake.set()
            self._report(f"The egress ledger in {self._folder} cannot be written ({error.strerror}).")
            return
        self._held, self._is_failing = 0, False
        if self._receipts:
            self._wake.set()
        self._tree, self._head, self._durable, self.problem = tree, head, durable, ""
        self._place = f"{self.id}-{self._epoch}"  # the beginning of the epoch is on disk
        if self._size >= self._file_bytes and not self._stop.is_set():
            self._next_file()

    def _write(self, data: bytes) -> None:
        try:
            if os.write(self._file, data) < len(data):
                raise OSError(28, "No space left on device")
            os.fsync(self._file)
        except OSError:
            os.ftruncate(self._file, self._size)
            raise
        self._size += len(data)

    def _next_file(self) -> None:
        """Continue in a new file, and delete the oldest ones beyond the limit."""
        old = self._file
        try:
            self._new_file()
            os.close(old)
            self._waiting.appendleft(self._opened())
            files = sorted(self._folder.glob("*.log"))
            for path in files[: max(0, len(files) - _FILES)]:
                path.unlink()
        except OSError as error:
            self._file = old
            self._report(f"The egress ledger in {self._folder} cannot be continued ({error.strerror}).")

    def _report(self, problem: str) -> None:
        if not self.problem:
            log.warning("%s", problem)
        self.problem = problem

    def _new_file(self) -> None:
        path = self._folder / f"{self._tree.size:015}.log"
        head = self._head if self._tree.size else None
        frontier = tuple(one.hex() for one in self._tree.hashes)
        data = msgspec.json.encode(FileHead(1, self._public, self._tree.size, frontier, head)) + b"\n"
        write_new(path, data, 0o600)
        sync(self._folder)
        self._file, self._size = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), len(data)

    def _open(self) -> None:
        """Open the newest file after its last signed record; a log that was changed is set aside."""
        files = sorted(self._folder.glob("*.log"))
        if not files:
            return self._new_file()
        content = files[-1].read_bytes()
        at = content.rfind(b'\n{"size":') + 1
        end = content.find(b"\n", at) + 1
        try:
            first, *lines = content[:end].split(b"\n")[:-1]
            start = msgspec.json.decode(first, type=FileHead)
            self._tree = Frontier(start.size, [bytes.fromhex(text) for text in start.frontier])
            self._tree.extend([line for line in lines if line.startswith(b"[")])
            head = msgspec.json.decode(lines[-1], type=TreeHead) if lines else start.head
            self._head = head or self._head
            if head is not None and (head.size, head.root) != (self._tree.size, self._tree.root().hex()):
                raise ValueError
        except (ValueError, msgspec.MsgspecError):
            aside = self._folder / f"changed-{secrets.token_hex(4)}"
            aside.mkdir(mode=0o700)
            for path in files:
                path.rename(aside / path.name)
            log.error(
                "The egress ledger in %s was altered. It was moved to %s, and a new ledger begins.", self._folder, aside
            )
            self._tree = Frontier()
            return self._new_file()
        self._file, self._size = os.open(files[-1], os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC), end
        os.ftruncate(self._file, end)
        return None

    def _signed(self, tree: Frontier) -> TreeHead:
        root, now = tree.root().hex(), time.time()
        return TreeHead(tree.size, root, now, self._key.sign(signed_text(self.id, tree.size, root, now)).hex())

    def _read_key(self) -> Ed25519PrivateKey:
        """Return the key, which is created if there is none. Raises OSError or ConfigError."""
        if not self._key_file.exists():
            key = Ed25519PrivateKey.generate()
            self._key_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_new(self._key_file, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
            return key
        with suppress(ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it has a passphrase
            loaded = load_pem_private_key(self._key_file.read_bytes(), password=None)
            if isinstance(loaded, Ed25519PrivateKey):
                return loaded
        reason = "This is not an Ed25519 key. Restore a copy of it, or move it away: then another log begins"
        raise ConfigError(reason, where=str(self._key_file))
