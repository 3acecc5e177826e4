"""`causeway-cloud usage`: what a tenant used on a day, by tier and route."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table

from ..accounts.tenants.usage import UsageRow, read_usage
from .gateways_redis import gateways_redis
from .process import OTHER_NAMES, report_errors

_FORMAT = "%Y-%m-%d"


def _day(_context: click.Context, _option: click.Parameter, text: str | None) -> str:
    """Return the day as it is written in Redis. Raises BadParameter."""
    if text is None:
        return datetime.now(UTC).strftime(_FORMAT)
    try:
        return datetime.strptime(text.strip(), _FORMAT).replace(tzinfo=UTC).strftime(_FORMAT)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a day: write year-month-day, such as 2026-11-21") from None


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("tenant")
@click.option("--config", "path", type=click.Path(path_type=Path), help="The gateways' YAML file.")
@click.option("--redis", "url", envvar="CAUSEWAY_REDIS", help="URL of the gateways' Redis.")
@click.option("--day", callback=_day, help="UTC, as 2026-11-21; default: today.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@report_errors(OSError)
def usage_command(tenant: str, path: Path | None, url: str | None, day: str, as_json: bool) -> None:
    """Show what a tenant used on a day, and what it costs."""
    rows = asyncio.run(_read(path, url, tenant, day))
    if as_json:
        click.echo(msgspec.json.encode(rows).decode())
        return
    if not rows:
        click.echo(f"{tenant} has no recorded usage on {day} (UTC). {OTHER_NAMES}")
        return
    table = Table("tier", "route", "requests", "prompt", "completion", "USD", title=f"{tenant}, {day}")
    for row in rows:
        numbers = (row.requests, row.prompt_tokens, row.completion_tokens)
        table.add_row(row.tier, row.route, *map(str, numbers), f"{row.usd:.6f}")
    Console().print(table)


async def _read(path: Path | None, url: str | None, tenant: str, day: str) -> tuple[UsageRow, ...]:
    """Raises CausewayError."""
    async with gateways_redis(path, url) as client:
        return await read_usage(client, tenant, day)
