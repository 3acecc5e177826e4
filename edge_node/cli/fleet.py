"""The command `causeway-edge fleet`: join a fleet, leave it, import a bundle, and print the device's status."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from causeway_server.router.bundle.refusals import UpdateRefused
from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.process import ask, format_option, option

from ..config.schema import Config
from .options import PATH, config_options, read_prompt, usage_error

if TYPE_CHECKING:
    from ..agent.link.connection import LinkRecord
    from ..agent.link.identity import Identity

REFUSED, UNREACHABLE = 1, 3
RESTART = "Start the daemon, or restart it: systemctl restart causeway-edge"
NO_FLEET = "This device is not in a fleet"


@click.group()
def fleet() -> None:
    """Manage this device's membership in a fleet.

    A fleet provides policies, models and settings, and the token for the cloud.
    """


@fleet.command()
@config_options
@click.argument("control_plane", metavar="CONTROL_PLANE_URL")
@option(
    "--token",
    "Join token. `-`: read the token from stdin.",
    default="-",
    show_default=False,
    envvar="CAUSEWAY_JOIN_TOKEN",
)
@option("--name", "Device id that the device requests. Default: the control plane chooses an id.", default="")
@option(
    "--label",
    "Label of the device, such as role=kiosk. May be repeated.",
    to="labels",
    multiple=True,
    metavar="KEY=VALUE",
)
@option("--site", "Site of the device. Rollouts change only a few devices of a site at the same time.", default="")
@option("--ca-file", "PEM file of the certificate authority that signed the control plane's certificate.", PATH)
def join(
    config: Config, control_plane: str, token: str, name: str, labels: tuple[str, ...], site: str, ca_file: Path | None
) -> None:
    """Enrol this device in the fleet of the control plane at CONTROL_PLANE_URL, with a join token.

    Makes a device key; restart the daemon afterwards. Exit code: 0 joined, 1 refused, 2 usage error, 3 the control
    plane is unreachable: try again.
    """
    from ..agent.link.control_plane import FleetError, FleetUnreachable
    from ..agent.link.identity import JoinRequest, as_owner, join

    pairs = [label.partition("=") for label in labels]
    if bad := [label for label, pair in zip(labels, pairs, strict=True) if not pair[1]]:
        usage_error(f"--label {bad[0]}: Write KEY=VALUE.")
    request = JoinRequest(
        url=control_plane,
        token=read_prompt(token, "join token").strip(),
        ca_file=str(ca_file.absolute()) if ca_file else "",
        name=name,
        labels={key: value for key, _, value in pairs},
        site=site,
    )
    try:
        with as_owner(Path(config.state_dir)) as state_dir:
            identity = asyncio.run(join(state_dir, request, time.time()))
    except ConfigError as error:
        usage_error(str(error))
    except FleetError as error:
        click.echo(f"causeway-edge: the device has not joined the fleet: {error}", err=True)
        sys.exit(UNREACHABLE if isinstance(error, FleetUnreachable) else REFUSED)
    click.echo(f"Joined {identity.fleet} as {identity.device} (tenant {identity.tenant}, cohort {identity.cohort}).")
    click.echo(RESTART)


@fleet.command()
@config_options
@option("--yes", "Proceed without asking for confirmation.", is_flag=True)
def leave(config: Config, yes: bool) -> None:
    """Leave the fleet, and delete the device's identity, key and bundles of this fleet.

    The device then answers from its own files. Stop the daemon first. The command asks for confirmation. The control
    plane keeps the device until an operator revokes it. Exit code: 0 left, 1 not confirmed, 2 usage error, or neither a
    terminal nor --yes.
    """
    from ..agent.link.identity import FOLDER, as_owner, read_identity
    from ..agent.link.identity import leave as leave_fleet
    from ..storage.state_folder import StateFolderLock

    with as_owner(Path(config.state_dir)) as state_dir:
        folder, device = StateFolderLock(state_dir), "DEVICE"
        if not (state_dir / FOLDER).exists():
            click.echo(f"{NO_FLEET}, so there is nothing to leave.")
            return
        with suppress(ConfigError):  # a damaged identity is removed as well
            if (identity := read_identity(state_dir / FOLDER)) is not None:
                device = identity.device
        try:
            folder.acquire()
            if not yes:
                click.echo("To return, the device must join again, under another name.")
            ask("causeway-edge", f"Remove the identity, the key and the bundles of {device}?", yes=yes)
            leave_fleet(state_dir)
        except ConfigError as error:
            usage_error(str(error))
        finally:
            folder.release()
    click.echo(
        f"Left the fleet. An operator must revoke the device at the control plane: causeway-fleet revoke {device}"
    )


@fleet.command("import")
@config_options
@click.argument("medium", metavar="FILE", type=click.Path(path_type=Path, exists=True))
def import_(config: Config, medium: Path) -> None:
    """Import a bundle without a network, for example from a USB stick. FILE is a folder, a tar file or a zip file.

    MEDIUM holds the fleet's published files (`tuf/` and `blobs/`), which are verified as from the network. The daemon
    installs the bundle within a minute, or at its next start. Exit code: 0 imported, 1 refused, 2 usage error.
    """
    from ..agent.link.connection import read_record
    from ..agent.link.identity import FOLDER, as_owner, read_identity
    from ..agent.link.offline_media import ImportFailed, import_medium

    with as_owner(Path(config.state_dir)) as state_dir:
        folder = state_dir / FOLDER
        try:
            identity = read_identity(folder)
        except ConfigError as error:
            usage_error(str(error))
        if identity is None:
            usage_error(f"{NO_FLEET}, so it trusts no signatures. Run `causeway-edge fleet join` once.")
        record = read_record(folder)
        running = None if record is None else record.report.running
        try:
            imported = import_medium(folder, medium.absolute(), identity, running)
        except (UpdateRefused, ImportFailed, OSError) as error:
            reason = f"{error.message} ({error.code})" if isinstance(error, UpdateRefused) else str(error)
            click.echo(f"causeway-edge: the medium was not imported: {reason}", err=True)
            sys.exit(REFUSED)
    if imported.wanted is None:
        click.echo(f"Imported the medium, which has no bundle for {identity.device} of the cohort {identity.cohort}.")
    elif imported.wanted == running:
        click.echo(f"Imported the medium. This device already runs its bundle {running}.")
    else:
        click.echo(f"Imported bundle {imported.wanted}, serial {imported.serial}, {imported.blobs} files.")
        click.echo(
            "The daemon installs the bundle within a minute, or at its next start. See `causeway-edge fleet status`."
        )


@fleet.command()
@config_options
@format_option
def status(config: Config, as_json: bool) -> None:
    """Print this device's identity in the fleet, its bundle and its problems.

    They are as the daemon last recorded them. Exit code: 0 in a fleet, 1 not in a fleet or with problems, 2 usage
    error.
    """
    from ..agent.link.connection import read_record
    from ..agent.link.identity import FOLDER, read_identity

    folder = Path(config.state_dir) / FOLDER
    try:
        identity = read_identity(folder)
    except ConfigError as error:
        usage_error(str(error))
    record = read_record(folder)
    if as_json:
        click.echo(msgspec.json.encode(_document(identity, record)).decode())
    else:
        for line in _lines(identity, record, folder):
            click.echo(line)
    if identity is None or (record is not None and record.problems):
        sys.exit(REFUSED)


def _document(identity: Identity | None, record: LinkRecord | None) -> dict[str, object]:
    if identity is None:
        return {"joined": False}
    shown = {name: getattr(identity, name) for name in ("device", "tenant", "cohort", "fleet", "url", "joined")}
    return shown | {"joined": True, "joined_at": identity.joined, "link": record}


def _lines(identity: Identity | None, record: LinkRecord | None, folder: Path) -> Iterator[str]:
    from ..agent.journal import JOURNAL, Journal
    from ..agent.store import Disk

    if identity is None:
        yield f"{NO_FLEET}: causeway-edge fleet join"
        return
    yield f"fleet      {identity.fleet} at {identity.url}"
    yield f"device     {identity.device}, tenant {identity.tenant}, cohort {identity.cohort}"
    yield f"joined     {_when(identity.joined)}"
    if record is None:
        yield "link       the daemon has not run since the device joined: restart it"
        return
    report = record.report
    yield f"runs       {(f'bundle {report.running}' if report.running else 'the factory files')}, {report.state}"
    if report.wanted and report.wanted != report.running:
        yield f"wanted     bundle {report.wanted}"
    if report.code:
        yield f"last       {report.code}: {report.reason}"
    reasons = Journal(folder / JOURNAL, Disk()).last.quarantined  # the reason by quarantined bundle
    for bundle in report.quarantined:
        reason = f": {reasons[bundle]}" if bundle in reasons else ""
        yield f"refused    bundle {bundle} is not tried again{reason}"
    yield f"last seen  {_when(record.last_seen) if record.last_seen else 'never'} or later, boot {record.boot}"
    for problem in record.problems:
        yield f"problem    {problem}"


def _when(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))
