"""`causeway-edge fleet status` and `import`: from and to the files of the state folder, without network and daemon."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import msgspec

from router.bundle.refusals import UpdateRefused
from router.errors import ConfigError

from ..agent.disk import Disk
from ..agent.journal import JOURNAL, Journal
from ..agent.link.connection import LinkRecord, read_record
from ..agent.link.identity import FOLDER, Identity, read_identity
from ..agent.link.medium import ImportFailed, import_medium
from .options import usage_error

WELL, NOT_WELL, UNREADABLE = 0, 1, 2
IMPORTED, REFUSED = 0, 1


def print_status(state_dir: Path, *, as_json: bool) -> int:
    """Print the status and return the exit code."""
    try:
        identity = read_identity(state_dir / FOLDER)
    except ConfigError as error:
        click.echo(f"causeway-edge: {error}", err=True)
        return UNREADABLE
    record = read_record(state_dir / FOLDER)
    if as_json:
        click.echo(msgspec.json.encode(_document(identity, record)).decode())
    else:
        for line in _lines(identity, record, _reasons(state_dir / FOLDER)):
            click.echo(line)
    return WELL if identity is not None and (record is None or not record.problems) else NOT_WELL


def _document(identity: Identity | None, record: LinkRecord | None) -> dict[str, object]:
    if identity is None:
        return {"joined": False}
    shown = {name: getattr(identity, name) for name in ("device", "tenant", "cohort", "fleet", "url", "joined")}
    return shown | {"joined": True, "joined_at": identity.joined, "link": record}


def _reasons(folder: Path) -> Mapping[str, str]:
    """Why each quarantined bundle is not tried again, as the agent's journal says."""
    return Journal(folder / JOURNAL, Disk()).last.quarantined


def _lines(identity: Identity | None, record: LinkRecord | None, reasons: Mapping[str, str]) -> Iterator[str]:
    if identity is None:
        yield "this box is in no fleet: causeway-edge fleet join"
        return
    yield f"fleet      {identity.fleet} at {identity.url}"
    yield f"device     {identity.device}, tenant {identity.tenant}, cohort {identity.cohort}"
    yield f"joined     {_when(identity.joined)}"
    if record is None:
        yield "link       the daemon has not run since: restart it"
        return
    report = record.report
    yield f"runs       {f'bundle {report.running}' if report.running else 'its own files'}, {report.state}"
    if report.wanted and report.wanted != report.running:
        yield f"wanted     bundle {report.wanted}"
    if report.code:
        yield f"last       {report.code}: {report.reason}"
    for bundle in report.quarantined:
        reason = f": {reasons[bundle]}" if bundle in reasons else ""
        yield f"refused    bundle {bundle} is not tried again{reason}"
    yield f"last seen  {_when(record.last_seen) if record.last_seen else 'never'} or later, boot {record.boot}"
    for problem in record.problems:
        yield f"problem    {problem}"


def _when(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))


def import_bundle(state_dir: Path, medium: Path) -> int:
    """Import and print what will happen; return the exit code."""
    folder = state_dir / FOLDER
    try:
        identity = read_identity(folder)
    except ConfigError as error:
        usage_error(str(error))
    if identity is None:
        usage_error("this box is in no fleet, so it trusts no signatures: causeway-edge fleet join, once")
    record = read_record(folder)
    running = None if record is None else record.report.running
    try:
        imported = import_medium(folder, medium, identity, running)
    except UpdateRefused as refusal:
        return _refused(f"{refusal.message} ({refusal.code})")
    except (ImportFailed, OSError) as error:
        return _refused(str(error))
    if imported.wanted is None:
        click.echo(f"imported: it has no bundle for {identity.device} of the cohort {identity.cohort}")
    elif imported.wanted == running:
        click.echo(f"imported: this box runs bundle {running} already")
    else:
        click.echo(f"imported bundle {imported.wanted}, serial {imported.serial}, {imported.blobs} files")
        click.echo("the daemon takes it within a minute, or at its next start: causeway-edge fleet status")
    return IMPORTED


def _refused(reason: str) -> int:
    click.echo(f"causeway-edge: not imported: {reason}", err=True)
    return REFUSED
