"""Options that several `causeway-train` commands share."""

from __future__ import annotations

from collections.abc import Sequence

import click

from causeway_server.models.cli.options import existing_file, existing_folder

from ..function_calls.dataset import Row

data_option = click.option(
    "--data",
    type=existing_folder,
    required=True,
    help="Folder of training data, with the files intents/*.jsonl and routing/*.jsonl.",
)
rows_argument = click.argument("files", nargs=-1, required=True, type=existing_file)
limit_option = click.option(
    "--limit",
    type=click.IntRange(1),
    help="Maximum number of rows that the command uses from each file. The rows are spread evenly over the file.",
)


def spread_evenly(rows: Sequence[Row], limit: int | None) -> Sequence[Row]:
    """Return at most `limit` rows, evenly spaced over `rows`, so that every source is represented."""
    if limit is None or len(rows) <= limit:
        return rows
    return [rows[index * len(rows) // limit] for index in range(limit)]
