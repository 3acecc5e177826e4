"""The command group, options and formatting that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import click

from causeway_server.router.serving.process import ProgramGroup, option

from ..catalog.artifact import ArtifactError

T = TypeVar("T", bound=Callable[..., Any] | click.Command)

folder = click.Path(file_okay=False, path_type=Path)
existing_folder = click.Path(exists=True, file_okay=False, path_type=Path)
file = click.Path(dir_okay=False, path_type=Path)
existing_file = click.Path(exists=True, dir_okay=False, path_type=Path)

models_option = option(
    "--models",
    "Folder that is searched for models before the default folders. May be repeated.",
    folder,
    to="extra_dirs",
    multiple=True,
)
to_option = option("--to", "Folder of models to which the result is published.", folder, required=True)


class CommandGroup(ProgramGroup):
    """A command group that prints expected errors as one line instead of a traceback."""

    extras: ClassVar[Mapping[str, str]] = {
        "huggingface_hub": "causeway-router[hub]",
        "httpx2": "causeway-router[hub]",
        "causeway_train": "causeway-train",
    }
    """The extra or distribution to install for each missing package."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ArtifactError as error:
            raise click.ClickException(str(error)) from error
        except ModuleNotFoundError as error:
            if (extra := self.extras.get(error.name or "")) is None:
                raise
            raise click.ClickException(f"{error.name} is not installed: pip install '{extra}'") from error


def threads_option(default: int) -> Callable[[T], T]:
    return option("--threads", "Number of CPU threads.", click.IntRange(1), default)


def mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB" if size_bytes < 2**30 else f"{size_bytes / 2**30:.1f} GiB"
