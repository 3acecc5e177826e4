"""Logs of a device and a gateway as text, record by record, signed like real ones."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from causeway_server.router.ledger.log import Closed, Confirmed, FileHead, Item, Lost, Opened, TreeHead
from causeway_server.router.ledger.proofs import commitment, log_id
from tests.bed.ledger import Written, signed_again

Record = Opened | Closed | Item | Confirmed | Lost
DEVICE_KEY = Ed25519PrivateKey.from_private_bytes(b"d" * 32)
GATEWAY_KEY = Ed25519PrivateKey.from_private_bytes(b"g" * 32)
DEVICE = log_id(DEVICE_KEY.public_key().public_bytes_raw())
GATEWAY = log_id(GATEWAY_KEY.public_key().public_bytes_raw())
EPOCH, GATEWAY_EPOCH = "aaaaaaaa", "bbbbbbbb"
NUMBERS = 12


def written(name: str, key: Ed25519PrivateKey, records: Sequence[Record], every: int = 4) -> Written:
    """A log with a tree head after each so many records, and at the end."""
    lines = [msgspec.json.encode(FileHead(1, key.public_key().public_bytes_raw().hex(), 0, (), None))]
    for number, record in enumerate(records, 1):
        lines.append(msgspec.json.encode(record))
        if number % every == 0 or number == len(records):
            lines.append(msgspec.json.encode(TreeHead(0, "", 1000.0 + number, "")))
    log = Written(name, key, tuple(lines), 0)
    return signed_again(log, lines)


def bytes_of(seq: int) -> str:
    return commitment(b"nonce", b"body %d" % seq)


def opened(role: str, epoch: str = "", seq: int = 0) -> Opened:
    own = EPOCH if role == "device" else GATEWAY_EPOCH
    return Opened(1000.0, epoch or own, role, "kiosk" if role == "device" else "", 1.0, seq)


def sent(seq: int, *, private: bool = False) -> Item:
    return Item(1000.0 + seq, seq, bytes_of(seq), f"d{seq}", "large", "eu", private, "")


def arrived(seq: int, *, number: int | None = None, durable: int = 0, time: float | None = None) -> Item:
    """The arrival of the device's request `number`, as number `seq` of the gateway."""
    claimed = seq if number is None else number
    claim = f"{DEVICE}-{EPOCH}-{claimed}-{durable}"
    at = 1000.5 + seq if time is None else time
    return Item(at, seq, bytes_of(claimed), f"r{seq}", "default/kiosk", "eu", False, claim)


def confirmed(seq: int, *, number: int | None = None, durable: int = 0) -> Confirmed:
    return Confirmed((f"{GATEWAY}-{GATEWAY_EPOCH}-{seq if number is None else number}-{durable}-{seq}",))


def device(last: int = NUMBERS, *, closed: bool = True, confirms: Sequence[int] | None = None) -> list[Record]:
    """What a device records that sent so many requests; `confirms`: those whose receipts it has."""
    records: list[Record] = [opened("device")]
    for seq in range(last):
        records.append(sent(seq))
        if confirms is None or seq in confirms:
            records.append(confirmed(seq))
    return [*records, Closed(2000.0, EPOCH)] if closed else records


def gateway(last: int = NUMBERS, *, closed: bool = True, durable: int = 0) -> list[Record]:
    records: list[Record] = [opened("gateway"), *(arrived(seq, durable=durable) for seq in range(last))]
    return [*records, Closed(2000.0, GATEWAY_EPOCH)] if closed else records


def pair(ours: Sequence[Record] | None = None, theirs: Sequence[Record] | None = None) -> list[Written]:
    """Both logs, by default of twelve requests and clean ends."""
    return [
        written("device", DEVICE_KEY, device() if ours is None else ours),
        written("gateway", GATEWAY_KEY, gateway() if theirs is None else theirs),
    ]
