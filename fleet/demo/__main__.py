"""`python -m fleet.demo`: see the package."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click

from .show import ProgramFailed, Show


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--boxes", type=click.IntRange(4, 200), default=20, show_default=True, help="Edge daemons to start.")
@click.option(
    "--folder",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(".run/fleet-demo"),
    show_default=True,
    help="Is made anew.",
)
@click.option("--listen", default="127.0.0.1:8090", show_default=True, help="Address of the control plane.")
@click.option("--once", is_flag=True, help="Stop after the two rollouts instead of serving until Ctrl-C.")
def main(boxes: int, folder: Path, listen: str, once: bool) -> None:
    """Start a control plane and boxes on this machine, roll out a good policy and then a bad one.

    Exit code: 0 the good policy reached every box and the bad one undid itself, 1 otherwise.
    """
    show = Show(folder.absolute(), boxes, listen)
    try:
        asyncio.run(show.run(once=once))
    except ProgramFailed as error:
        click.secho(str(error), fg="red", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


main()
