"""The `causeway-models` command group.

The commands that train the assistants need the extra `train` (torch); all others run without it.
"""

from __future__ import annotations

import click

from . import assistant, calibrate, catalog, evaluate, pull, semantic, signals
from .options import CommandGroup


class _Group(CommandGroup):
    extras = {**CommandGroup.extras, "torch": "causeway[train]", "tokenizers": "causeway[train]"}


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Pull, add, check, train, measure and publish models and router signals."""


for _module in (catalog, pull, evaluate, assistant, signals, calibrate, semantic):
    for _command in _module.COMMANDS:
        main.add_command(_command)
