"""Options and formatting that several `causeway-models` commands share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from ..function_calls.dataset import Row

T = TypeVar("T", bound=Callable[..., Any] | click.Command)

folder = click.Path(file_okay=False, path_type=Path)
existing_folder = click.Path(exists=True, file_okay=False, path_type=Path)
file = click.Path(dir_okay=False, path_type=Path)
existing_file = click.Path(exists=True, dir_okay=False, path_type=Path)

data_option = click.option(
    "--data", type=existing_folder, required=True, help="Folder with intents/*.jsonl and routing/*.jsonl."
)
models_option = click.option(
    "--models", "extra_dirs", multiple=True, type=folder, help="Search these folders for models first."
)
to_option = click.option("--to", type=folder, required=True, help="Folder of models to publish to.")
rows_argument = click.argument("files", nargs=-1, required=True, type=existing_file)
limit_option = click.option(
    "--limit", type=click.IntRange(1), help="Use at most this many rows of each file, spread evenly."
)


def threads_option(default: int) -> Callable[[T], T]:
    return click.option("--threads", type=click.IntRange(1), default=default, show_default=True, help="CPU threads.")


def spread_evenly(rows: Sequence[Row], limit: int | None) -> Sequence[Row]:
    """Return at most `limit` rows, evenly spaced over `rows`, so that every source is represented."""
    if limit is None or len(rows) <= limit:
        return rows
    return [rows[index * len(rows) // limit] for index in range(limit)]


def mebibytes(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:.1f} MiB" if size_bytes < 2**30 else f"{size_bytes / 2**30:.1f} GiB"
