"""`causeway-edge decisions export`: the records on disk as JSON lines."""

from __future__ import annotations

import time
from pathlib import Path
from typing import BinaryIO

import click
import msgspec

from router.policy.file import seconds

from ..config.schema import Config
from ..storage.decisions import read_stored
from .options import usage_error

PRINTED, FAILED = 0, 1


def export_decisions(config: Config, since: str, *, out: BinaryIO) -> int:
    """Write the records to `out`, one JSON object per line, and return the exit code.

    Args:
        config: Names the state folder.
        since: A duration such as 24h; "" for all records.
        out: Receives the lines.
    """
    oldest = 0.0 if not since else time.time() - _duration(since)
    encoder = msgspec.json.Encoder()
    try:
        stored = read_stored(Path(config.state_dir), since=oldest)
        out.writelines(encoder.encode(record) + b"\n" for record in stored.records)
        out.flush()
    except BrokenPipeError:
        return FAILED
    except FileNotFoundError as error:
        advice = "give the daemon's own --config or --state-dir"
        click.echo(f"causeway-edge: no decision records at {error.filename}: {advice}", err=True)
        return FAILED
    except OSError as error:
        click.echo(f"causeway-edge: the decision records cannot be read: {error}", err=True)
        return FAILED
    if unreadable := stored.unreadable():
        click.echo(f"causeway-edge: {unreadable} records of another version were left out", err=True)
    return PRINTED


def _duration(text: str) -> float:
    try:
        return seconds(text) or 0.0
    except ValueError:
        usage_error(f"--since must be a duration such as 30m, 24h or 7d, not {text[:32]!r}")
