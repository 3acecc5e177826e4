"""The `causeway-models` command group.

The commands that train the assistants need the extra `train` (torch); all others run without it.
"""

from __future__ import annotations

import click

from ..catalog.artifact import ArtifactError
from . import assistant, calibrate, catalog, evaluate, pull, semantic, signals


class _Group(click.Group):
    """Prints expected errors as one line instead of a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ArtifactError as error:
            raise click.ClickException(str(error)) from error
        except ModuleNotFoundError as error:
            if error.name in ("torch", "tokenizers"):
                raise click.ClickException(f"{error.name} is not installed: pip install 'causeway[train]'") from error
            if error.name in ("huggingface_hub", "httpx2"):
                raise click.ClickException(f"{error.name} is not installed: pip install 'causeway[hub]'") from error
            raise


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Pull, add, check, train, measure and publish models and router signals."""


for _module in (catalog, pull, evaluate, assistant, signals, calibrate, semantic):
    for _command in _module.COMMANDS:
        main.add_command(_command)
