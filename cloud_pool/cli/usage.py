"""The command `causeway-cloud usage`: a tenant's usage on a day. Also the commands' access to the gateways' Redis."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import click
import msgspec
import redis.asyncio
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table

from causeway_server.router.errors import CausewayError, ConfigError
from causeway_server.router.serving.process import format_option, option

from ..accounts.tenants.usage import UsageRow, read_usage
from ..config import Config
from ..redis.connect import client_fault, open_redis
from ..storage.config import JobsConfig, with_shared_redis
from .process import OTHER_NAMES, ConfigSource, redis_options


@asynccontextmanager
async def gateways_redis(config: Config) -> AsyncIterator[redis.asyncio.Redis]:
    """Open a client for a `with` block. Raises ConfigError without a usable URL, CausewayError without an answer."""
    if not config.redis:
        raise ConfigError("Give --redis, or a --config that names the gateways' Redis.", where="redis")
    client = open_redis(config.redis)
    try:
        yield client
    except (RedisError, OSError) as error:
        raise CausewayError(client_fault(error, client)) from error
    finally:
        await client.aclose()


def replication_of_gateways_redis(config: Config) -> tuple[int, float]:
    """Return how many replicas must confirm a write, in how many seconds, as for an accepted job."""
    jobs = with_shared_redis(config.jobs, config.redis)
    if jobs.redis != config.redis:  # jobs have a Redis of their own
        jobs = JobsConfig(redis=config.redis)
    return jobs.replicas_to_wait_for, jobs.replica_timeout_s


_FORMAT = "%Y-%m-%d"


def _day(_context: click.Context, _option: click.Parameter, text: str | None) -> str:
    """Return the day in the form used in Redis. Raises BadParameter."""
    if text is None:
        return datetime.now(UTC).strftime(_FORMAT)
    try:
        return datetime.strptime(text.strip(), _FORMAT).replace(tzinfo=UTC).strftime(_FORMAT)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a day: write year-month-day, such as 2026-11-21.") from None


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("tenant")
@redis_options
@option("--day", "Day in UTC, such as 2026-11-21; default: today.", callback=_day)
@format_option
def usage_command(source: ConfigSource, tenant: str, day: str, as_json: bool) -> None:
    """Show the usage of a tenant on one day, and the cost."""
    rows = asyncio.run(_read(source.load(), tenant, day))
    if as_json:
        click.echo(msgspec.json.encode(rows).decode())
        return
    if not rows:
        click.echo(f"{tenant} has no recorded usage on {day} (UTC). {OTHER_NAMES}")
        return
    columns = ("tier", "route", "variant", "requests", "prompt", "cached", "completion", "audio (s)", "USD")
    table = Table(*columns, title=f"{tenant}, {day}")
    for row in rows:
        numbers = (row.requests, row.prompt_tokens, row.cached_tokens, row.completion_tokens, row.audio_ms / 1000)
        table.add_row(row.tier, row.route, row.variant, *(f"{number:g}" for number in numbers), f"{row.usd:.6f}")
    Console().print(table)


async def _read(config: Config, tenant: str, day: str) -> tuple[UsageRow, ...]:
    """Read the usage. Raises CausewayError."""
    async with gateways_redis(config) as client:
        return await read_usage(client, tenant, day)
