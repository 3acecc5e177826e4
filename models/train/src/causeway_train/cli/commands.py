"""The `causeway-train` command group.

The commands that train the assistants and the semantic cache's judge need the extra `torch`; all others run without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import click

from causeway_server.models.cli.options import CommandGroup

from . import assistant, distill, evaluate, semantic, signals


class _Group(CommandGroup):
    extras: ClassVar[Mapping[str, str]] = {
        **CommandGroup.extras,
        "torch": "causeway-train[torch]",
        "tokenizers": "causeway-train[torch]",
    }


@click.group("causeway-train", cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Train, measure and publish models and router signals."""


for _module in (assistant, distill, evaluate, signals, semantic):
    for _command in _module.COMMANDS:
        main.add_command(_command)
