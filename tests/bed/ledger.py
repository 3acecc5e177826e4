"""Egress ledgers under kills and under tampering: what honest logs and changed ones look like to an auditor.

The honest part: a device and a gateway, each a process with the product's own ledger, pass requests over a Unix socket
one after the other; one of the two is killed with SIGKILL at a random moment, again and again, and the other one ends
when its peer is gone. The audit must find nothing that was tampered with, and no gap longer than an interval of
commits.

The other part: logs of such a run are changed at random, one change at a time, and each must be found where it was
made:

    drop, add, alter, reorder    a record, by somebody without the log's key, or with it: then all is signed again
    roll back                    to a tree head before that of the last audit, with or without the key

With the key, only what the other side knows or what was audited can be found: so the changes are of requests that both
sides have, or before the last audit; they exchange two requests; and they do not drop the last one before a kill, which
makes the marked gap longer by one request.

    python -m tests.bench ledger                                          1,000,000 requests, 100 kills, 10,000 changes
    python -m tests.bench ledger --requests 20000 --kills 10 --changes 500
"""

from __future__ import annotations

import argparse
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from causeway_server.fleet.cli.egress import read_folder, verify
from causeway_server.router.config import EgressLedgerConfig
from causeway_server.router.ledger.log import Item, Log, TreeHead, read_log
from causeway_server.router.ledger.proofs import leaf_hash, log_id, signed_text
from causeway_server.router.ledger.reconcile import NotedHead, Report, reconcile
from causeway_server.router.ledger.tree import Frontier, Tree
from causeway_server.router.serving.egress.ledger import EgressLedger
from tests.bench.rows import Row

from .figures import table

_LEG: Final = 100_000  # requests that are audited together
_WAIT_S: Final = 120.0
KINDS: Final = ("drop", "add", "alter", "reorder", "roll back")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--changes", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)


def main(options: argparse.Namespace) -> list[Row]:
    rng = random.Random(options.seed)
    legs = max(1, options.requests // _LEG)
    sums, longest, slowest = Counter[str](), 0.0, 0.0
    for leg in range(legs):
        with tempfile.TemporaryDirectory() as folder:
            kills = options.kills * (leg + 1) // legs - options.kills * leg // legs
            run(Path(folder), rng, options.requests // legs, kills)
            report = reconcile(read(Path(folder)))
        sums["kills"] += kills
        sums += Counter({name: count for name, count in report.counts.items() if count})
        sums["requests"] += sum(report.counts[verdict] for verdict in ("matched", "unconfirmed", "undecided"))
        sums["gaps"] += len(report.gaps)
        for gap in report.gaps.values():
            longest, slowest = max(longest, gap.until - gap.since), gap.commit_s
        print(f"leg {leg + 1} of {legs}: {dict(sums)}, longest gap {longest:.3f} s", flush=True)
        for fault in report.found:
            print(fault)
    return [
        Row("requests", sums["requests"], "", options.requests, better="higher"),
        Row("requests that both ledgers have", sums["matched"], ""),
        Row("requests that a crash left undecided", sums["undecided"], ""),
        Row("requests called tampered", sums["tampered"] + sums["unlogged"] + sums["private"], "", 0.0),
        Row("gaps", sums["gaps"], "", 2.0 * options.kills),
        Row("longest gap", longest, "s", slowest or None),
        *_changes(rng, options.changes),
        *_cost(),
    ]


def _cost(requests: int = 20_000) -> Iterator[Row]:
    """What the ledger costs a request of 1.5 kB: this process's time in ten commits, its thread's included; and the
    hashes of a proof.
    """
    body, place = random.Random(1).randbytes(1500), "0123456789abcdef-01234567"
    for role in ("device", "gateway"):
        with tempfile.TemporaryDirectory() as folder:
            config = EgressLedgerConfig(enabled=True, commit_s=0.2)
            ledger = EgressLedger(Path(folder), role, config, Path(folder) / "ledger.key")
            ledger.start()
            before = time.process_time()
            for number in range(requests):
                if role == "device":
                    ledger.sent(body, "0b1c2d3e4f5a6b7c", "large", "eu-central", private=False)
                    ledger.confirmed(f"{place}-{number}-0-{number}")
                else:
                    ledger.arrived(
                        f"{place}-{number}-0-{'ab' * 16}", body, "0b1c2d3e", "shops/kiosk", "eu", private=False
                    )
                if number % (requests // 10) == 0:
                    time.sleep(0.2)
            ledger.close()
            spent_us = (time.process_time() - before) * 1e6 / requests
            [(_, log)] = read_folder(Path(folder))
        yield Row(f"processor time of a request at the {role}", spent_us, "us", 10.0)
        proof = Tree(log.start, log.leaves).inclusion(requests // 2, log.frontier.size)
        yield Row(f"hashes of a proof at the {role}", len(proof), "", 64.0)


# --- honest logs ------------------------------------------------------------------------------------------------------


def run(
    folder: Path, rng: random.Random, requests: int, kills: int, pause_s: float = 0.0, commit_s: float = 1.0
) -> None:
    """Let a device and a gateway pass at least so many requests, and kill one of them so often; the last ones end
    cleanly.
    """
    sent = 0
    each = requests // (kills + 1)
    for number in range(kills + 1):
        is_last = number == kills
        count = max(1, requests - sent if is_last else int(each * rng.uniform(0.5, 1.5)))
        sent += _pass(folder, rng, count, pause_s, commit_s, kill=not is_last)


def _pass(folder: Path, rng: random.Random, count: int, pause_s: float, commit_s: float, *, kill: bool) -> int:
    address = str(folder / "socket")
    Path(address).unlink(missing_ok=True)
    processes = []
    for role in ("gateway", "device"):
        # A device that is to be killed goes on until it is.
        limit = 10**9 if kill else count
        command = [sys.executable, "-m", "tests.bed.ledger", role, str(folder / role), address]
        command += [str(limit), str(pause_s), str(commit_s)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert processes[-1].stdout is not None
        assert processes[-1].stdout.readline() == "ready\n"
    gateway, device = processes
    sent, lines = 0, device.stdout
    assert lines is not None
    for line in lines:  # the device's count, now and then
        sent = int(line)
        if kill and sent >= count:
            time.sleep(rng.uniform(0.0, commit_s))
            rng.choice(processes).send_signal(signal.SIGKILL)
            break
    for line in lines:
        sent = int(line)
    for process in (device, gateway):
        process.wait(_WAIT_S)
    return sent


def _process(role: str, folder: str, address: str, limit: int, pause_s: float, commit_s: float) -> None:
    """A device or a gateway, until its peer is gone."""
    config = EgressLedgerConfig(enabled=True, commit_s=commit_s)
    ledger = EgressLedger(Path(folder), role, config, Path(folder) / "ledger.key", "kiosk" if role == "device" else "")
    ledger.start()
    try:
        if role == "gateway":
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(address)
            listener.listen()
            print("ready", flush=True)
            with listener.accept()[0].makefile("rwb", 0) as stream:
                for number, line in enumerate(iter(stream.readline, b"")):
                    claim, _, body = line.decode().partition(" ")
                    receipt = ledger.arrived(claim, body.encode(), f"r{number}", "default/kiosk", "eu", private=False)
                    stream.write(f"{receipt}\n".encode())
            return
        print("ready", flush=True)
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(address)
        sent = 0
        with peer.makefile("rwb", 0) as stream:
            for number in range(limit):
                body = f"question {number}\n"
                sent += 1
                claim = ledger.sent(body.encode(), f"d{number}", "large", "eu", private=False)
                stream.write(f"{claim} {body}".encode())
                if not (receipt := stream.readline().decode().strip()):
                    break
                ledger.confirmed(receipt)
                if sent % 100 == 0:
                    print(sent, flush=True)
                time.sleep(pause_s)
        print(sent, flush=True)
    except (BrokenPipeError, ConnectionError):
        if role == "device":
            print(sent, flush=True)
    finally:
        ledger.close()


def read(folder: Path) -> list[Log]:
    return [log for role in ("device", "gateway") for _, log in read_folder(folder / role)]


# --- changed logs -----------------------------------------------------------------------------------------------------


class Written(NamedTuple):
    """A log as text, with its key. `noted`: the line of the tree head of the last audit."""

    name: str
    key: Ed25519PrivateKey
    lines: tuple[bytes, ...]
    noted: int

    def log(self) -> Log:
        return read_log([(self.name, b"\n".join((*self.lines, b"")))], verify)


class Change(NamedTuple):
    """A change at a line, numbered from 0. `place`: epoch and number of the request there. `other`: the line with which
    it is exchanged.
    """

    kind: str
    log: Written
    at: int
    with_key: bool
    place: str
    other: int

    @property
    def words(self) -> str:
        return f"{self.kind}{' with the key' * self.with_key}, {self.log.name} line {self.at + 1} ({self.place})"

    def is_located(self, found: Sequence[str]) -> bool:
        """Whether a finding names the place: the request, or lines that end and begin within one of it."""
        return any(self._is_named(text) for text in found)

    def _is_named(self, text: str) -> bool:
        if self.kind == "roll back":
            return "rolled back" in text or "audit before" in text or "cut off" in text
        if self.place and self.log.name in text and re.search(rf"\b{self.place.rpartition('-')[2]}\b", text):
            return True  # the number here, or the one that should be
        span = re.search(rf"{re.escape(self.log.name)}:(\d+)(?:-(\d+))?:", text)
        if span is not None:
            lines = range(int(span[1]) - 1, int(span[2] or span[1]) + 2)
            return self.at + 1 in lines or (self.kind == "reorder" and self.other + 1 in lines)
        if f"{_own_place(self.log, self.at).replace('-', ' ends before ')}, " in text:
            return True  # what was dropped with the key was the last record before a kill
        return bool(self.place) and self.place in text


def signed_again(log: Written, lines: Sequence[bytes]) -> Written:
    """Sign lines as their log's owner does."""
    tree, again = Frontier(), [lines[0]]
    identity = log_id(bytes.fromhex(msgspec.json.decode(lines[0])["key"]))
    for line in lines[1:]:
        if line.startswith(b'{"size"'):
            root, now = tree.root().hex(), msgspec.json.decode(line, type=TreeHead).time
            signature = log.key.sign(signed_text(identity, tree.size, root, now)).hex()
            again.append(msgspec.json.encode(TreeHead(tree.size, root, now, signature)))
        else:
            tree.add(leaf_hash(line))
            again.append(line)
    return log._replace(lines=tuple(again))


def changed(change: Change, rng: random.Random) -> Written:
    """Make the change."""
    log, at = change.log, change.at
    lines = [*log.lines]
    if change.kind == "roll back":
        return log._replace(lines=tuple(lines[: at + 1]))
    if change.kind == "drop":
        del lines[at]
    elif change.kind == "add":
        lines.insert(at, _altered(lines[at], rng, change.with_key))
    elif change.kind == "alter":
        lines[at] = _altered(lines[at], rng, change.with_key)
    else:
        lines[at], lines[change.other] = lines[change.other], lines[at]
    return signed_again(log, lines) if change.with_key else log._replace(lines=tuple(lines))


def _altered(line: bytes, rng: random.Random, with_key: bool) -> bytes:
    """Return the line with another commitment, or without the key with any other byte."""
    if with_key:
        item = msgspec.json.decode(line, type=Item)
        return msgspec.json.encode(msgspec.structs.replace(item, commitment=rng.randbytes(32).hex()))
    at, other = rng.randrange(len(line)), rng.choice(b"abcdefghij0123456789")
    while other == line[at]:
        other = rng.choice(b"abcdefghij0123456789")
    return line[:at] + bytes([other]) + line[at + 1 :]


def draw(rng: random.Random, logs: Sequence[Written], matched: Mapping[str, frozenset[int]]) -> Change:
    """Draw a change outside marked gaps. `matched`: by the log's name, the lines of requests that both sides have."""
    kind, log, with_key = rng.choice(KINDS), rng.choice(logs), rng.random() < 0.5
    if kind == "roll back":
        heads = [at for at, line in enumerate(log.lines[: log.noted]) if line.startswith(b'{"size"')]
        return Change(kind, log, rng.choice(heads), with_key, "", 0)
    records = [at for at, line in enumerate(log.lines) if line.startswith(b'["')]
    at = rng.choice(sorted(matched[log.name]) if with_key else records)
    following = next((log.lines[line] for line in records if line > at), b"")
    if with_key and kind == "drop" and following.startswith(b'["open"'):
        return draw(rng, logs, matched)  # the last one before a kill: the marked gap is one request longer
    return Change(kind, log, at, with_key, _place_of(log, at), another(log, at, rng, b'["item"' if with_key else b'["'))


def another(log: Written, at: int, rng: random.Random, kind: bytes = b'["') -> int:
    """Return another line that is a record, of a kind."""
    return rng.choice([line for line, text in enumerate(log.lines) if text.startswith(kind) and line != at])


def _place_of(log: Written, at: int) -> str:
    """Return epoch and number of the device's request at a line; "" if there is none."""
    if (own := _own_place(log, at)) and (claim := msgspec.json.decode(log.lines[at], type=Item).claim):
        return "-".join(claim.split("-")[1:3])
    return own


def _own_place(log: Written, at: int) -> str:
    """Return epoch and number of the log's own request at a line; "" if there is none."""
    try:
        item = msgspec.json.decode(log.lines[at], type=Item)
    except msgspec.MsgspecError:
        return ""
    epochs = [line for line in log.lines[:at] if line.startswith(b'["open"')]
    return f"{msgspec.json.decode(epochs[-1])[2]}-{item.seq}"


def found_in(change: Change, logs: Sequence[Written], rng: random.Random, noted: Mapping[str, NotedHead]) -> Report:
    """Make a change and audit."""
    return reconcile([(changed(change, rng) if log is change.log else log).log() for log in logs], noted)


def prepared(folder: Path) -> tuple[list[Written], dict[str, frozenset[int]], dict[str, NotedHead]]:
    """Return the logs of a run as text, the lines of requests that both have, and the heads of an audit half-way."""
    logs: list[Written] = []
    for role in ("device", "gateway"):
        [(files, _)] = read_folder(folder / role)
        [path] = files
        lines = tuple(path.read_bytes().split(b"\n")[:-1])
        key = load_pem_private_key((folder / role / "ledger.key").read_bytes(), None)
        assert isinstance(key, Ed25519PrivateKey)
        heads = [at for at, line in enumerate(lines) if line.startswith(b'{"size"')]
        logs.append(Written(role, key, lines[: heads[-1] + 1], heads[len(heads) // 2]))
    places = [
        {_place_of(log, at): at for at, line in enumerate(log.lines) if line.startswith(b'["item"')} for log in logs
    ]
    both = places[0].keys() & places[1].keys()
    matched = {log.name: frozenset(found[place] for place in both) for log, found in zip(logs, places, strict=True)}
    noted = {}
    for log in logs:
        at_audit = log._replace(lines=log.lines[: log.noted + 1]).log()
        noted[at_audit.id] = NotedHead(at_audit.frontier.size, at_audit.frontier.root().hex())
    return logs, matched, noted


def _changes(rng: random.Random, changes: int) -> Iterator[Row]:
    made, found, located, missed = Counter[str](), Counter[str](), Counter[str](), list[str]()
    while sum(made.values()) < changes:
        with tempfile.TemporaryDirectory() as folder:
            run(Path(folder), rng, 100, 2, pause_s=0.001, commit_s=0.02)
            logs, matched, noted = prepared(Path(folder))
        honest = reconcile([log.log() for log in logs], noted)
        assert not honest.counts["tampered"], honest.found
        for _ in range(min(500, changes - sum(made.values()))):
            change = draw(rng, logs, matched)
            report = found_in(change, logs, rng, noted)
            kind = change.kind + " with the key" * change.with_key
            made[kind] += 1
            if report.counts["tampered"]:
                found[kind] += 1
                located[kind] += change.is_located(report.found)
            if not change.is_located(report.found):
                missed.append(f"{change.words}: {report.found}")
    print(
        table(("change", "made", "found", "located"), [[k, str(made[k]), str(found[k]), str(located[k])] for k in made])
    )
    print("\n".join(missed[:10]))
    yield Row("changes", sum(made.values()), "", changes, better="higher")
    yield Row("changes that were not found", sum(made.values()) - sum(found.values()), "", 0.0)
    yield Row("changes that were not located", sum(made.values()) - sum(located.values()), "", 0.0)


if __name__ == "__main__":
    _process(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5]), float(sys.argv[6]))
