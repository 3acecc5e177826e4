"""`causeway-cloud usage`: what a tenant used on a day, by tier and route."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import click
import msgspec
import redis.asyncio
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table

from ..accounts.tenants.usage import UsageRow, read_usage
from .process import report_errors


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("tenant")
@click.option("--redis", "url", envvar="CAUSEWAY_REDIS", required=True, help="URL of the gateways' Redis.")
@click.option("--day", help="UTC, as 2026-11-21; default: today.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@report_errors(RedisError, OSError, ValueError)
def usage_command(tenant: str, url: str, day: str | None, as_json: bool) -> None:
    """Show what a tenant used on a day, and what it costs."""
    day = day or datetime.now(UTC).strftime("%Y-%m-%d")
    rows = asyncio.run(_read(url, tenant, day))
    if as_json:
        click.echo(msgspec.json.encode(rows).decode())
        return
    table = Table("tier", "route", "requests", "prompt", "completion", "USD", title=f"{tenant}, {day}")
    for row in rows:
        numbers = (row.requests, row.prompt_tokens, row.completion_tokens)
        table.add_row(row.tier, row.route, *map(str, numbers), f"{row.usd:.6f}")
    Console().print(table)


async def _read(url: str, tenant: str, day: str) -> tuple[UsageRow, ...]:
    """Raises RedisError, or ValueError for an invalid URL."""
    async with redis.asyncio.Redis.from_url(url) as client:
        return await read_usage(client, tenant, day)
