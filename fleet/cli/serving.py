"""`causeway-fleet serve`."""

from __future__ import annotations

from pathlib import Path

import click

from router.errors import CausewayError
from router.serving.commands import run_fast
from router.serving.logs import start_log

_Folder = click.Path(path_type=Path, file_okay=False)


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False, exists=True))
@click.option("--keys", type=_Folder, required=True, help="Folder with the private keys of the online roles.")
@click.option("--data", type=_Folder, required=True, help="Folder of this server: its token key, SQLite's database.")
@click.option(
    "--listen", default="127.0.0.1:8090", show_default=True, metavar="HOST:PORT", help="Address; port 0: any."
)
@click.option("--database", default="", metavar="URL", help="postgresql://USER:PASSWORD@HOST/NAME; default: SQLite.")
@click.option("--issuer", default="causeway", show_default=True, help="Claim `iss` of the boxes' tokens.")
@click.option(
    "--max-files",
    type=click.IntRange(min=64),
    default=65_536,
    show_default=True,
    help="Files that connections may have open; a parked poll takes one, another connection two.",
)
def serve(folder: Path, keys: Path, data: Path, listen: str, database: str, issuer: str, max_files: int) -> None:
    """Serve the control plane of the fleet in FOLDER. Prints `ready url=…` on stdout.

    Put a TLS proxy in front of it. Exit code: 0 stopped by a signal, 1 it cannot start, 2 bad arguments.
    """
    from ..app import ServeSettings
    from ..app import serve as run

    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise click.BadParameter(f"HOST:PORT, such as 0.0.0.0:8090, not {listen!r}", param_hint="--listen")
    start_log("info", "text")
    settings = ServeSettings(folder, keys, data, database, issuer, host.strip("[]"), int(port), max_files)
    try:
        run_fast(run(settings))
    except CausewayError as error:
        raise click.ClickException(error.message) from error
