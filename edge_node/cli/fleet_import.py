"""`causeway-edge fleet import`."""

from __future__ import annotations

from pathlib import Path

import click

from router.bundle.refusals import UpdateRefused
from router.errors import ConfigError

from ..agent.link.identity import FOLDER, read_identity
from ..agent.link.medium import ImportFailed, import_medium
from ..agent.link.record import read_record
from .options import usage_error

IMPORTED, REFUSED = 0, 1


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
