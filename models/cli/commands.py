"""The `causeway-models` command group."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

import click

from . import catalog, compare, prices, pull
from .options import CommandGroup

_TRAINING = "causeway_train"
_OF_TRAINING = ("calibrate", "candidates")
"""Commands of the distribution causeway-train, which a device and a gateway do without."""


class _Commands(CommandGroup):
    """The commands of this distribution, and those that causeway-train adds if it is installed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        added = _OF_TRAINING if find_spec(_TRAINING) is not None else ()
        return sorted({*super().list_commands(ctx), *added})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in _OF_TRAINING:
            command: click.Command = getattr(import_module(f"{_TRAINING}.cli.calibrate"), cmd_name)
            return command
        return super().get_command(ctx, cmd_name)


@click.group("causeway-models", cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Pull, add, check, compare, price and calibrate models."""


for _module in (catalog, compare, pull, prices):
    for _command in _module.COMMANDS:
        main.add_command(_command)
