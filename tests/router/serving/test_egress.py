"""The writer of an egress ledger: its files, what it does when the disk fails, and what is left after a kill."""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from causeway_server.fleet.cli.commands import main
from causeway_server.fleet.cli.egress import read_folder
from causeway_server.router.config import EgressLedgerConfig
from causeway_server.router.errors import ConfigError
from causeway_server.router.ledger.log import Item, Log
from causeway_server.router.ledger.proofs import extends, includes
from causeway_server.router.ledger.reconcile import reconcile
from causeway_server.router.ledger.tree import Tree
from causeway_server.router.serving.egress import ledger as egress
from causeway_server.router.serving.egress.ledger import EgressLedger
from tests.bed.ledger import read, run
from tests.waiting import until

OFTEN = EgressLedgerConfig(enabled=True, commit_s=0.01, max_bytes=1 << 20)
BODY = b'{"model":"large"}'


def ledger(folder: Path, role: str = "device", config: EgressLedgerConfig = OFTEN) -> EgressLedger:
    return EgressLedger(folder / role, role, config, folder / role / "ledger.key", "kiosk" if role == "device" else "")


@pytest.fixture
def device(tmp_path: Path) -> Iterator[EgressLedger]:
    made = ledger(tmp_path)
    made.start()
    yield made
    made.close()


def logs_of(folder: Path, role: str = "device") -> Log:
    [(_, log)] = read_folder(folder / role)
    return log


def send(device: EgressLedger, count: int = 1) -> list[str]:
    return [device.sent(BODY, f"d{number}", "large", "eu", private=False) for number in range(count)]


def test_a_request_and_its_arrival_match(tmp_path: Path, device: EgressLedger) -> None:
    gateway = ledger(tmp_path, "gateway")
    gateway.start()
    [claim] = send(device)
    receipt = gateway.arrived(claim, BODY, "r0", "default/kiosk", "eu", private=False)
    assert gateway.arrived(claim, b"other bytes", "r1", "default/kiosk", "eu", private=False)
    device.confirmed(receipt)
    device.close()
    gateway.close()
    report = reconcile(read(tmp_path))
    assert (report.counts["matched"], report.counts["tampered"]) == (1, 1)
    assert "(r1): the two have different bytes" in report.found[0]


def test_the_log_says_nothing_of_the_bytes(tmp_path: Path, device: EgressLedger) -> None:
    """Equal requests have unequal commitments, whose nonces are in no file."""
    claims = send(device, 2)
    device.close()
    first, second = logs_of(tmp_path).items.values()
    assert first.commitment != second.commitment
    text = b"".join(path.read_bytes() for path in (tmp_path / "device").rglob("*") if path.is_file())
    assert all(claim.rpartition("-")[2].encode() not in text for claim in claims)
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tmp_path / "device").rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "header", ["", "x", "-", "\xff" * 99, "0-0-0-0-0", "a" * 16 + "-" + "b" * 8 + "-0-0-xyz", "-" * 9]
)
def test_an_arrival_with_a_malformed_claim_has_none(tmp_path: Path, header: str) -> None:
    gateway = ledger(tmp_path, "gateway")
    gateway.start()
    assert gateway.arrived(header, BODY, "r0", "default/kiosk", "", private=True) == ""
    gateway.close()
    [item] = logs_of(tmp_path, "gateway").items.values()
    assert (item.claim, item.commitment, item.private) == ("", "", True)


@pytest.mark.parametrize("header", ["", "x", "-1", "\xff-1", "0-0-0-0-0", "a-²"])
def test_a_malformed_receipt_is_ignored(tmp_path: Path, device: EgressLedger, header: str) -> None:
    device.confirmed(header)
    device.close()
    assert (logs_of(tmp_path).receipts, logs_of(tmp_path).faults) == ([], [])


def test_a_further_start_continues_the_log(tmp_path: Path) -> None:
    for _ in range(3):
        again = ledger(tmp_path)
        again.start()
        send(again, 2)
        again.close()
    log = logs_of(tmp_path)
    assert (len(log.items), len(log.epochs), log.faults) == (6, 3, [])
    assert all(epoch.is_closed for epoch in log.epochs.values())


def test_what_a_crash_left_half_written_is_cut_off(tmp_path: Path, device: EgressLedger) -> None:
    send(device)
    device.close()
    [path] = (tmp_path / "device").glob("*/*.log")
    whole = path.read_bytes()
    path.write_bytes(whole + b'["item",1764460801.5,1,"e3b0')
    again = ledger(tmp_path)
    again.start()
    again.close()
    assert path.read_bytes().startswith(whole)
    assert (logs_of(tmp_path).faults, len(logs_of(tmp_path).items)) == ([], 1)


def test_a_changed_log_is_set_aside(tmp_path: Path, device: EgressLedger) -> None:
    send(device)
    device.close()
    [path] = (tmp_path / "device").glob("*/*.log")
    path.write_bytes(path.read_bytes().replace(b'"large"', b'"small"'))
    again = ledger(tmp_path)
    again.start()
    again.close()
    assert [found.name for found in path.parent.glob("changed-*/*.log")] == [path.name]
    assert (logs_of(tmp_path).faults, logs_of(tmp_path).items) == ([], {})


def test_two_writers_are_refused(tmp_path: Path, device: EgressLedger) -> None:
    with pytest.raises(ConfigError, match="Another process writes to"):
        ledger(tmp_path).start()


@pytest.mark.parametrize("secret", [None, b"a passphrase"])
def test_a_key_that_cannot_be_used_is_refused_with_what_to_do(tmp_path: Path, secret: bytes | None) -> None:
    """An empty file, and a key with a passphrase. Without the file another log begins."""
    file, pem = tmp_path / "device" / "ledger.key", b""
    if secret is not None:
        form = BestAvailableEncryption(secret)
        pem = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, form)
    file.parent.mkdir()
    file.write_bytes(pem)
    with pytest.raises(ConfigError, match="Restore a copy of it, or move it away"):
        ledger(tmp_path, "device").start()
    file.unlink()
    other = ledger(tmp_path, "device")
    other.start()
    assert (other.problem, other.close()) == ("", None)


def test_requests_go_on_without_a_ledger_if_the_folder_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "device").write_text("")
    device = ledger(tmp_path)
    device.start()
    assert send(device) == [""]
    assert device.arrived("", BODY, "r0", "default/kiosk", "", private=False) == ""
    assert "cannot be used" in device.problem
    device.close()


class Disk:
    """The module `os`, with a disk that may be full once the bytes are written."""

    is_full = False
    tries = 0

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def fsync(self, file: int) -> None:
        self.tries += 1
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(file)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    made = Disk()
    monkeypatch.setattr(egress, "os", made)
    return made


async def test_a_full_disk_loses_nothing_that_fits_into_memory(
    tmp_path: Path, device: EgressLedger, disk: Disk
) -> None:
    disk.is_full = True
    send(device, 5)
    await until(lambda: "cannot be written" in device.problem)
    disk.is_full = False
    await until(lambda: not device.problem)
    device.close()
    assert (len(logs_of(tmp_path).items), logs_of(tmp_path).faults, device.lost) == (5, [], 0)


async def test_numbers_beyond_the_memory_are_recorded_as_lost(
    tmp_path: Path, device: EgressLedger, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(egress, "_MOST", 3)
    disk.is_full = True
    await until(lambda: send(device) and "cannot be written" in device.problem)
    kept = 3
    await until(lambda: send(device) and device.lost > kept)
    disk.is_full = False
    await until(lambda: not device.problem)
    send(device)
    device.close()
    log = logs_of(tmp_path)
    [epoch] = log.epochs.values()
    assert log.faults == []
    assert len(log.items) + sum(len(numbers) for numbers in epoch.lost) == epoch.next
    assert sum(len(numbers) for numbers in epoch.lost) == device.lost > kept


async def test_receipts_that_come_while_the_disk_is_full_are_one_record(
    tmp_path: Path, device: EgressLedger, disk: Disk
) -> None:
    """Not one for each attempt to write: those would fill the memory."""
    disk.is_full = True
    send(device)
    await until(lambda: "cannot be written" in device.problem)
    for number in range(5):
        device.confirmed(f"receipt-{number}")
        tries = disk.tries
        await until(lambda tries=tries: disk.tries > tries + 1)  # type: ignore[misc]
    disk.is_full = False
    await until(lambda: not device.problem)
    device.close()
    written = b"".join(path.read_bytes() for path in (tmp_path / "device").glob("*/*.log"))
    assert written.count(b'["confirmed"') == 1
    assert all(f"receipt-{number}".encode() in written for number in range(5))


async def test_the_oldest_files_go_and_what_is_left_can_be_proved(tmp_path: Path, device: EgressLedger) -> None:
    files = tmp_path / "device"
    for _ in range(20):
        newest = max(path.name for path in files.glob("*/*.log"))
        send(device, 600)
        await until(lambda newest=newest: max(path.name for path in files.glob("*/*.log")) > newest)  # type: ignore[misc]
    device.close()
    log = logs_of(tmp_path)
    assert sum(path.stat().st_size for path in files.glob("*/*.log")) < 1.3 * OFTEN.max_bytes
    assert (log.faults, log.start.size > 0) == ([], True)
    assert log.head is not None
    tree, size = Tree(log.start, log.leaves), log.frontier.size
    assert log.head.root == tree.root(size).hex()
    old = log.start.size
    assert extends(old, log.start.root(), size, tree.root(size), tree.consistency(old, size))


def test_a_proof_is_small_and_checked_by_the_auditors_page(tmp_path: Path, device: EgressLedger) -> None:
    send(device, 300)
    device.close()
    printed = CliRunner().invoke(main, ["audit", "proof", str(tmp_path / "device"), "d123", "--since", "100"])
    assert printed.exit_code == 0, printed.output
    proof = json.loads(printed.output)
    path = [bytes.fromhex(text) for text in proof["inclusion"]]
    head, record = proof["head"], proof["record"].encode()
    assert includes(record, proof["index"], head["size"], bytes.fromhex(head["root"]), path)
    assert msgspec.json.decode(record, type=Item).id == "d123"
    log = logs_of(tmp_path)
    old = Tree(log.start, log.leaves).root(100)
    steps = [bytes.fromhex(text) for text in proof["consistency"]]
    assert extends(100, old, head["size"], bytes.fromhex(head["root"]), steps)
    del proof["consistency"]
    assert len(json.dumps(proof)) < 2000
    missing = CliRunner().invoke(main, ["audit", "proof", str(tmp_path / "device"), "d999"])
    assert (missing.exit_code, "No signed record of d999" in missing.output) == (1, True)


def test_an_audit_notes_the_heads_and_finds_a_log_that_was_rolled_back(tmp_path: Path, device: EgressLedger) -> None:
    heads, folder = tmp_path / "heads.json", str(tmp_path / "device")
    send(device, 3)
    device.close()
    [path] = (tmp_path / "device").glob("*/*.log")
    command = ["audit", "egress", folder, "--heads", str(heads)]
    assert CliRunner().invoke(main, command).exit_code == 0
    content = path.read_bytes()
    path.write_bytes(content[: content.find(b"\n", content.find(b'\n{"size":') + 1) + 1])
    noted = heads.read_bytes()
    done = CliRunner().invoke(main, command)
    assert (done.exit_code, "rolled back" in done.output) == (1, True)
    assert heads.read_bytes() == noted


@pytest.mark.parametrize(("more", "says"), [((), "no egress ledger"), (("twice",), "given twice")])
def test_an_audit_of_nothing_is_refused(tmp_path: Path, device: EgressLedger, more: tuple[str, ...], says: str) -> None:
    device.close()
    (tmp_path / "empty").mkdir()
    folders = [str(tmp_path / "device")] * 2 if more else [str(tmp_path / "empty")]
    done = CliRunner().invoke(main, ["audit", "egress", *folders, "--heads", str(tmp_path / "heads.json")])
    assert (done.exit_code > 0, says in done.output) == (True, True)


@pytest.mark.slow
def test_killed_writers_leave_logs_that_an_audit_believes(tmp_path: Path) -> None:
    """A device and a gateway as processes, of which one is killed, twice."""
    run(tmp_path, random.Random(5), 60, 2, pause_s=0.001, commit_s=0.05)
    report = reconcile(read(tmp_path))
    assert report.found == []
    assert report.counts["matched"] > 0
    assert len(report.gaps) <= 4
