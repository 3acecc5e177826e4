"""The `causeway-models` command group."""

from __future__ import annotations

import click

from . import calibrate, catalog, pull
from .options import CommandGroup


@click.group("causeway-models", cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Pull, add, check and calibrate models."""


for _module in (catalog, pull, calibrate):
    for _command in _module.COMMANDS:
        main.add_command(_command)
