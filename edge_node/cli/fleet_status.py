"""`causeway-edge fleet status`: from the files of the state folder, without a network and without the daemon."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import click
import msgspec

from router.errors import ConfigError

from ..agent.boot import JOURNAL
from ..agent.disk import Disk
from ..agent.journal import Journal
from ..agent.link.identity import FOLDER, Identity, read_identity
from ..agent.link.record import LinkRecord, read_record

WELL, NOT_WELL, UNREADABLE = 0, 1, 2


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
