"""The commands `causeway-fleet audit egress | proof`, which read copies of egress ledgers and need no connection."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

import click
import msgspec

from causeway_server.router.ledger.log import Item, Log, read_log
from causeway_server.router.ledger.reconcile import NotedHead, Report, reconcile
from causeway_server.router.ledger.tree import Tree
from causeway_server.router.serving.folders import write_atomically
from causeway_server.router.serving.process import option

_Folder = click.Path(path_type=Path, exists=True, file_okay=False)


def verify(key: bytes, signature: bytes, data: bytes) -> bool:
    """Return whether an Ed25519 signature is valid (`router.ledger.log.Verify`). Needs `cryptography`."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def read_folder(folder: Path) -> list[tuple[list[Path], Log]]:
    """Return the logs in a folder, with their files: its own, else those of its folders. Raises UsageError."""
    found = sorted(folder.glob("*.log")) or sorted(folder.glob("*/*.log"))
    by_folder = [[*files] for _, files in groupby(found, lambda path: path.parent)]
    if not found:
        raise click.UsageError(
            f"{folder} has no egress ledger: there is no *.log file in it, nor in a folder inside it."
        )
    try:
        return [(files, read_log([(str(path), path.read_bytes()) for path in files], verify)) for files in by_folder]
    except (OSError, ValueError) as error:
        raise click.UsageError(str(error)) from error


@click.command()
@click.argument("folders", nargs=-1, required=True, metavar="DEVICE_LOG... GATEWAY_LOG...", type=_Folder)
@option(
    "--heads",
    "File with the tree heads (signed states of the ledgers) of the last audit. Keep this file away "
    "from the machines that are audited.",
    click.Path(path_type=Path, dir_okay=False),
    Path("egress-heads.json"),
)
def egress(folders: tuple[Path, ...], heads: Path) -> None:
    """Compare copies of the egress ledgers of devices and gateways. The report says what left the devices, what arrived
    at the gateways, and which ledgers were tampered with.

    Each argument is a folder `egress` of a state folder, in any order. Without faults the tree heads are noted for the
    next audit. Exit code: 0 no faults, 1 tampered with, private, arrived without the device's ledger, or undecided for
    longer than an interval of commits, 2 bad arguments.
    """
    logs = [log for folder in folders for _, log in read_folder(folder)]
    if len({log.id for log in logs}) < len(logs):
        raise click.UsageError("The same log is given twice. Give one copy of each log.")
    try:
        noted = msgspec.json.decode(heads.read_bytes(), type=dict[str, NotedHead]) if heads.exists() else {}
    except (OSError, msgspec.MsgspecError) as error:
        raise click.UsageError(f"{heads}: {error}") from error
    report = reconcile(logs, noted)
    _print(logs, report)
    is_long = any(gap.is_long for gap in report.gaps.values())
    if is_long or any(report.counts[verdict] for verdict in ("tampered", "private", "unlogged")):
        raise SystemExit(1)
    noted |= {log.id: NotedHead(log.frontier.size, log.frontier.root().hex()) for log in logs}
    write_atomically(heads, msgspec.json.format(msgspec.json.encode(noted)))


def _print(logs: list[Log], report: Report) -> None:
    for log in logs:
        click.echo(f"{log.role} {log.name or log.id}: {len(log.items)} requests, {log.frontier.size} records")
    for message in report.found:
        click.echo(message)
    for gap in report.gaps.values():
        how = f"{gap.until - gap.since:.3f} s{', longer than its interval of commits' * gap.is_long}"
        click.echo(f"undecided: {gap.count} requests, because a crash left a gap in {gap.log}-{gap.epoch} of {how}")
    fixed = ("matched", "unconfirmed", "undecided", "tampered", "unlogged", "private")
    for name in (*fixed, *(report.counts.keys() - {*fixed})):
        click.echo(f"{report.counts[name]:>9}  {name}")


@click.command()
@click.argument("folder", type=_Folder)
@click.argument("name", metavar="ID")
@option(
    "--since",
    "Also prove that the ledger's first SINCE records are unchanged, and that all later records were appended "
    "after them.",
    click.IntRange(min=1),
)
def proof(folder: Path, name: str, since: int | None) -> None:
    """Print the proof that the ledger in FOLDER has the record of ID, the id of a decision or a request. The proof is
    JSON, which `router/ledger/proofs.py` checks.

    Exit code: 0 printed, 1 there is no such record, 2 bad arguments.
    """
    for files, log in read_folder(folder):
        lines = [line for path in files for line in path.read_bytes().split(b"\n") if line.startswith(b'["')]
        found = next((at for at, line in enumerate(lines) if name in _names(line)), len(lines))
        index, tree = log.start.size + found, Tree(log.start, log.leaves)
        if log.head is None or not index < log.head.size <= tree.size:
            continue
        answer: dict[str, object] = {
            "record": lines[found].decode(),
            "index": index,
            "inclusion": [one.hex() for one in tree.inclusion(index, log.head.size)],
            "head": log.head,
            "key": log.key.hex(),
        }
        if since is not None:
            answer["consistency"] = [one.hex() for one in tree.consistency(since, log.head.size)]
        click.echo(msgspec.json.encode(answer))
        return
    raise click.ClickException(f"No signed record of {name} is in {folder}.")


def _names(line: bytes) -> tuple[str, ...]:
    """Return the id of a record's request, if it has one."""
    try:
        return (msgspec.json.decode(line, type=Item).id,)
    except msgspec.MsgspecError:
        return ()
