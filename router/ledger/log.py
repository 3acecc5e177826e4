"""The form of a log: lines of JSON, each a record, a tree head, or the head of its file; and the header that ties logs.

    {"egress_ledger":1,"key":…,"size":0,"frontier":[],"head":null}         the head of each file
    ["open",1764460800.123,"9f2c41aa","device","kiosk-7",1.0,0]            the daemon started, as epoch 9f2c41aa
    ["item",1764460801.5,0,"e3b0…","0b1c…","large","eu-central",false,""]  number 0 of this epoch left, or arrived
    ["confirmed",["5d41402abc4b2a76-03ac6742-17-12-0"]]                    the gateway's receipt for number 0
    {"size":3,"root":…,"time":…,"signature":…}                             all records so far, signed
    ["close",1764460900.0,"9f2c41aa"]                                      a clean end: nothing of this epoch is missing

A request carries a claim in `x-causeway-egress`, `LOG-EPOCH-NUMBER-DURABLE-NONCE`: the device's log has it under this
number, and has all numbers below DURABLE on its disk. So a log that was cut below that contradicts what its own daemon
said. The answer carries the gateway's receipt in the same form, with the device's number in place of the nonce.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, Protocol

import msgspec

from .proofs import leaf_hash, log_id, signed_text
from .tree import Frontier

HEADER: Final = "x-causeway-egress"
_POSITION: Final = re.compile(r"([0-9a-f]{16})-([0-9a-f]{8})-([0-9]{1,15})-([0-9]{1,15})", re.ASCII)


class Position(msgspec.Struct, frozen=True):
    """A number in an epoch of a log; `durable`: the numbers below were on its disk when this was said."""

    log: str
    epoch: str
    seq: int
    durable: int


def read_position(text: str) -> Position | None:
    """Return a position; None if it is malformed."""
    match = _POSITION.fullmatch(text)
    return None if match is None else Position(match[1], match[2], int(match[3]), int(match[4]))


class Opened(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """The start of an epoch, or its continuation in a further file. Times are Unix seconds."""

    time: float
    epoch: str
    role: str  # device or gateway
    name: str  # of the device in its fleet; "" for others
    commit_s: float
    seq: int  # the next number; an epoch begins with 0


class Closed(msgspec.Struct, frozen=True, array_like=True, tag="close"):
    time: float
    epoch: str


class Item(msgspec.Struct, frozen=True, array_like=True, tag="item"):
    """A request that was about to leave a device, or that arrived at a gateway."""

    time: float
    seq: int
    commitment: str  # "" without a claim
    id: str  # of the decision, or of the request
    peer: str  # the target, or the caller as tenant/device
    region: str  # of the cloud, or of the gateway
    private: bool  # whether it has the tag `private`
    claim: str  # what came with it, without the nonce; "" on a device, and for a caller without a ledger


class Confirmed(msgspec.Struct, frozen=True, array_like=True, tag="confirmed"):
    """Receipts of gateways, as they came. A malformed one says nothing."""

    receipts: tuple[str, ...]


class Lost(msgspec.Struct, frozen=True, array_like=True, tag="lost"):
    """Numbers that could not be kept, because the disk was full or failing."""

    time: float
    first: int
    count: int


class TreeHead(msgspec.Struct, frozen=True):
    size: int
    root: str  # hex, as key and signature
    time: float
    signature: str


class FileHead(msgspec.Struct, frozen=True):
    """The first line of a file. `frontier`: the tree of all files before it, in hex; `head`: its signed head."""

    egress_ledger: int
    key: str  # raw Ed25519 public key
    size: int
    frontier: tuple[str, ...]
    head: TreeHead | None


_decode_record: Final = msgspec.json.Decoder(Opened | Closed | Item | Confirmed | Lost).decode
_decode_head: Final = msgspec.json.Decoder(TreeHead).decode
_decode_file_head: Final = msgspec.json.Decoder(FileHead).decode


class Verify(Protocol):
    """Returns whether an Ed25519 signature is valid."""

    def __call__(self, key: bytes, signature: bytes, data: bytes, /) -> bool: ...


class Epoch(msgspec.Struct):
    """An epoch of a log, which has the numbers from `first` to `next`, but for those in `lost`."""

    first: int
    next: int
    commit_s: float
    is_closed: bool = False
    lost: tuple[range, ...] = ()


class Log:
    """A log that was read, and what is wrong with it by itself.

    Attributes:
        start, frontier: The trees of the records whose files were deleted for space, and of all records.
        leaves, since: The hashes of the records here, and the time of the first, Unix seconds.
        items, receipts: Requests that left or arrived, by epoch and number; receipts, with the position in a gateway's
            log.
        faults: Changes, each with its file and lines.
    """

    def __init__(self, verify: Verify) -> None:
        self.id, self.start, self.frontier = "", Frontier(), Frontier()
        self.leaves: list[bytes] = []
        self.role, self.name, self.since = "", "", 0.0
        self.epochs: dict[str, Epoch] = {}
        self.items: dict[tuple[str, int], Item] = {}
        self.receipts: list[tuple[str, int, Position]] = []
        self.head: TreeHead | None = None  # the newest valid one
        self.faults: list[str] = []
        self.key, self._verify, self._epoch, self._is_changed = b"", verify, "", False

    def begin(self, line: bytes) -> None:
        """Begin a file. Raises ValueError if it does not continue what is before it."""
        head = _decode_file_head(line)
        key, start = bytes.fromhex(head.key), Frontier(head.size, [bytes.fromhex(text) for text in head.frontier])
        if not self.id:
            self.id, self.key, self.start = log_id(key), key, start
            self.frontier = Frontier(start.size, start.hashes)
            if head.head is not None or start.size:
                self.sign(head.head or TreeHead(0, "", 0.0, ""))
        elif (key, start.size, start.root()) != (self.key, self.frontier.size, self.frontier.root()):
            raise ValueError("the file does not continue the previous file")

    def add(self, line: bytes) -> None:
        """Append a record. Raises ValueError if it does not follow from those before it."""
        leaf = leaf_hash(line)
        self.leaves.append(leaf)
        self.frontier.add(leaf)
        record = _decode_record(line)
        if isinstance(record, Opened):
            self._epoch, self.role, self.name = record.epoch, record.role, record.name or self.name
            self.since = self.since or record.time
            epoch = self.epochs.setdefault(record.epoch, Epoch(record.seq, record.seq, record.commit_s))
            _expect(epoch.next, record.seq)
            return
        epoch = self.epochs.get(self._epoch, Epoch(0, 0, 0.0, is_closed=True))
        if epoch.is_closed:
            raise ValueError("the record is outside of an epoch")
        if isinstance(record, Closed):
            epoch.is_closed = True
        elif isinstance(record, Confirmed):
            for text in record.receipts:
                receipt, _, number = text.rpartition("-")
                if (position := read_position(receipt)) is not None and number.isdecimal():
                    self.receipts.append((self._epoch, int(number), position))
        elif isinstance(record, Item):
            self.items[self._epoch, record.seq] = record
            expected, epoch.next = epoch.next, record.seq + 1
            _expect(expected, record.seq)
        else:
            epoch.lost = (*epoch.lost, range(record.first, record.first + record.count))
            expected, epoch.next = epoch.next, record.first + record.count
            _expect(expected, record.first)

    def sign(self, head: TreeHead) -> None:
        """Take a tree head. Raises ValueError if it does not sign the records before it."""
        data = signed_text(self.id, head.size, head.root, head.time)
        if not self._verify(self.key, bytes.fromhex(head.signature), data):
            raise ValueError("the signature of the tree head is not valid")
        self.head = head
        if (head.size, head.root) != (self.frontier.size, self.frontier.root().hex()) and not self._is_changed:
            self._is_changed = True  # and so are the roots of all later heads
            raise ValueError(
                f"the log has {self.frontier.size} records, which are not the {head.size} records that were signed"
            )


def read_log(files: Iterable[tuple[str, bytes]], verify: Verify) -> Log:
    """Check a log by itself: `files` with name and content, the oldest first. The text after its last tree head was
    being written, and is ignored. Raises ValueError if this is not a log.
    """
    log = Log(verify)
    for name, content in files:
        end = content.find(b"\n", content.rfind(b'\n{"size":') + 1)
        since = 2
        for number, line in enumerate(content[:end].split(b"\n"), 1):
            where = f"{name}:{number}"
            try:
                if number == 1:
                    log.begin(line)
                elif line.startswith(b"{"):
                    where, since = f"{name}:{since}-{number}", number + 1
                    log.sign(_decode_head(line))
                else:
                    log.add(line)
            except (ValueError, msgspec.MsgspecError) as error:
                log.faults.append(f"{where}: {error}")
        if not log.id:
            raise ValueError(f"{name} is not an egress ledger.")
    return log


def _expect(expected: int, found: int) -> None:
    if found != expected:
        raise ValueError(f"the number should be {expected}, but it is {found}")
