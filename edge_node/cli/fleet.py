"""`causeway-edge fleet`: join a fleet, leave it, import a bundle, and print the box's status."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import suppress
from pathlib import Path

import click

from router.errors import ConfigError
from router.serving.process import ask

from ..config.schema import Config
from .options import PATH, config_options, read_prompt, usage_error

DONE, REFUSED, UNREACHABLE = 0, 1, 3
RESTART = "restart the daemon: systemctl restart causeway-edge"
NO_FLEET = "this box is in no fleet"


@click.group()
def fleet() -> None:
    """The fleet that this box belongs to: it brings policies, models and settings, and the token for the cloud."""


@fleet.command()
@config_options
@click.argument("control_plane", metavar="CONTROL_PLANE_URL")
@click.option("--token", default="-", envvar="CAUSEWAY_JOIN_TOKEN", help="The join token; `-` reads stdin.")
@click.option("--name", default="", help="The device id that the box wants; without it the control plane chooses.")
@click.option("--label", "labels", multiple=True, metavar="KEY=VALUE", help="Such as role=kiosk; repeatable.")
@click.option("--site", default="", help="Where the box stands: few boxes of a site change at once.")
@click.option("--ca-file", type=PATH, help="PEM file of the authority that signed the control plane's certificate.")
def join(
    config: Config,
    control_plane: str,
    token: str,
    name: str,
    labels: tuple[str, ...],
    site: str,
    ca_file: Path | None,
) -> None:
    """Make a device key and enrol it with a join token; then restart the daemon.

    Exit code: 0 joined, 1 refused, 2 usage error, 3 the control plane is unreachable: try again.
    """
    from ..agent.link.control_plane import FleetError, FleetUnreachable
    from ..agent.link.identity import JoinRequest, as_owner, join

    pairs = [label.partition("=") for label in labels]
    if bad := [label for label, pair in zip(labels, pairs, strict=True) if not pair[1]]:
        usage_error(f"--label {bad[0]}: write KEY=VALUE")
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
        click.echo(f"causeway-edge: not joined: {error}", err=True)
        sys.exit(UNREACHABLE if isinstance(error, FleetUnreachable) else REFUSED)
    click.echo(f"joined {identity.fleet} as {identity.device} (tenant {identity.tenant}, cohort {identity.cohort})")
    click.echo(RESTART)


@fleet.command()
@config_options
@click.option("--yes", is_flag=True, help="Do not ask.")
def leave(config: Config, yes: bool) -> None:
    """Remove identity, key and bundles; the box answers from its own files again. Stop the daemon before.

    It asks before. The control plane keeps the device until an operator revokes it. Exit code: 0 left, 1 the answer is
    no, 2 usage error, or there is no terminal to ask at and no --yes.
    """
    from ..agent.link.identity import FOLDER, as_owner, read_identity
    from ..agent.link.identity import leave as leave_fleet
    from ..storage.state_folder import StateFolderLock

    with as_owner(Path(config.state_dir)) as state_dir:
        folder, device = StateFolderLock(state_dir), "DEVICE"
        if not (state_dir / FOLDER).exists():
            click.echo(f"{NO_FLEET}, so there is nothing to leave")
            return
        with suppress(ConfigError):  # a damaged identity is left as well
            if (identity := read_identity(state_dir / FOLDER)) is not None:
                device = identity.device
        try:
            folder.acquire()
            if not yes:
                click.echo("to return, the box has to join anew, under another name")
            ask("causeway-edge", f"Remove the identity, the key and the bundles of {device}?", yes=yes)
            leave_fleet(state_dir)
        except ConfigError as error:
            usage_error(str(error))
        finally:
            folder.release()
    click.echo(f"left; an operator revokes it at the control plane: causeway-fleet revoke {device}")


@fleet.command("import")
@config_options
@click.argument("medium", metavar="FILE", type=click.Path(path_type=Path, exists=True))
def import_(config: Config, medium: Path) -> None:
    """Take a bundle from a USB stick: a folder, tar or zip of what the fleet publishes (`tuf/` and `blobs/`).

    It is verified as from the network. The daemon takes it within a minute, or at its next start. Exit code: 0
    imported, 1 refused, 2 usage error.
    """
    from ..agent.link.identity import as_owner
    from .fleet_status import import_bundle

    with as_owner(Path(config.state_dir)) as state_dir:
        sys.exit(import_bundle(state_dir, medium.absolute()))


@fleet.command()
@config_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(config: Config, as_json: bool) -> None:
    """Print this box's identity, its bundle and its problems, as the daemon wrote them last.

    Exit code: 0 in a fleet, 1 in none or with problems, 2 usage error.
    """
    from .fleet_status import print_status

    sys.exit(print_status(Path(config.state_dir), as_json=as_json))
