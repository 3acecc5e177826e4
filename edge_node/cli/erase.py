"""The command `causeway-edge erase`: the erasure of a client's data by the running daemon."""

from __future__ import annotations

import sys
from typing import Any

import click
import msgspec

from causeway_sdk import CausewayAPIError, CausewayError
from causeway_server.router.serving.process import ask, option

from .options import connect, daemon_options


@click.command()
@daemon_options
@option("--client", "Name of the client, as decision records show it.", required=True)
@option("--yes", "Proceed without asking for confirmation.", is_flag=True)
def erase(url: str, api_key: str, as_json: bool, client: str, *, yes: bool) -> None:
    """Erase everything that the device stores about a client, and print the signed receipt.

    A daemon with API keys needs one with the right `erasure`. Exit codes: 0 erased, 1 refused, 2 usage error, 3
    unreachable.
    """
    ask("causeway-edge", f"Erase all data of {client} on this device permanently?", yes=yes)
    try:
        with connect(url, api_key) as causeway:
            signed = causeway.erase(client)
    except CausewayError as error:
        click.echo(f"causeway-edge: {error}", err=True)
        sys.exit(1 if isinstance(error, CausewayAPIError) else 3)
    if as_json:
        click.echo(msgspec.json.encode(signed))
        return
    receipt: Any = signed["receipt"]
    for kind, count in receipt["erased"].items():
        click.echo(f"{count}\t{kind}")
    for what, why in receipt["left"].items():
        click.echo(f"left: {what} ({why})")
