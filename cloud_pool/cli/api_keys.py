"""The commands `causeway-cloud keys api`: API keys of any tenant, for operators. They need the gateways' Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import TypeVar

import click
import msgspec
from rich.console import Console
from rich.table import Table

from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.process import option

from ..accounts.identity.api_keys import DAY_S, ApiKey, ApiKeyStore, NewApiKey, Rotation
from ..admission import RANK
from ..core.principal import ANYONE
from .process import ConfigSource, redis_options
from .usage import gateways_redis

_T = TypeVar("_T")
priority_option = option(
    "--priority",
    "Highest priority that a request with the key or token may have.",
    click.Choice(tuple(RANK)),
    "standard",
)
_LIFETIME = click.option(
    "--lifetime-s",
    type=click.FloatRange(min=60),
    default=90 * DAY_S,
    show_default="90 days",
    help="Time until the key expires, in seconds.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def api() -> None:
    """Manage the API keys of tenants, as their administrators do at /v1/keys."""


@api.command()
@click.argument("tenant")
@click.argument("name")
@option(
    "--scope",
    "Scope of the key; may be repeated.",
    click.Choice(("chat", "jobs")),
    ("chat",),
    to="scopes",
    multiple=True,
)
@priority_option
@option("--model", "Model that the key may use; may be repeated; default: all models.", to="models", multiple=True)
@option(
    "--usd-per-day",
    "Budget of the key per UTC day, in USD; default: no budget.",
    click.FloatRange(min=0),
    0.0,
    show_default=False,
)
@_LIFETIME
@redis_options
def create(source: ConfigSource, tenant: str, name: str, lifetime_s: float, **fields: object) -> None:
    """Make an API key and print it on stdout. The id of the key is printed on stderr."""
    fields["models"] = fields["models"] or None
    try:
        asked = msgspec.convert({**fields, "name": name, "expires_in_s": lifetime_s}, NewApiKey)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{error}. Names have 1 to 64 letters, digits, `.`, `_` and `-`.") from error
    _print(*_with_store(source, lambda store: store.create(tenant, asked, ANYONE.grants)))


@api.command()
@click.argument("tenant")
@click.argument("key_id")
@click.option(
    "--overlap-s",
    type=click.FloatRange(min=0, max=30 * DAY_S),
    default=DAY_S,
    show_default="a day",
    help="Time for which the old secret is still accepted, in seconds.",
)
@_LIFETIME
@redis_options
def rotate(source: ConfigSource, tenant: str, key_id: str, overlap_s: float, lifetime_s: float) -> None:
    """Give an API key a new secret, and print the secret."""
    asked = Rotation(overlap_s, lifetime_s)
    _print(*_with_store(source, lambda store: store.rotate(tenant, key_id, asked, ANYONE.grants)))


@api.command()
@click.argument("tenant")
@click.argument("key_id")
@redis_options
def delete(source: ConfigSource, tenant: str, key_id: str) -> None:
    """Delete an API key. Within seconds, gateways refuse the deleted key."""
    _with_store(source, lambda store: store.delete(tenant, key_id))
    click.echo(f"Deleted the API key {key_id}. Gateways refuse the key within seconds.")


@api.command("list")
@click.argument("tenant")
@redis_options
def list_keys(source: ConfigSource, tenant: str) -> None:
    """List the API keys of a tenant."""

    async def read(store: ApiKeyStore) -> tuple[list[ApiKey], dict[str, int]]:
        return await store.list(tenant), await store.last_used()

    found, used = _with_store(source, read)
    table = Table("id", "name", "scopes", "USD a day", "expires", "last used")
    for key in found:
        last = _date(used[key.id]) if key.id in used else "never"
        budget = f"{key.usd_per_day:g}" if key.usd_per_day else "its tenant's"
        table.add_row(key.id, key.name, " ".join(key.scopes), budget, _date(key.secrets[0].until), last)
    Console().print(table)


def _with_store(source: ConfigSource, work: Callable[[ApiKeyStore], Awaitable[_T]]) -> _T:
    """Do work with the keys in Redis. Raises CausewayError."""
    config = source.load()

    async def run() -> _T:
        async with gateways_redis(config) as client:
            return await work(ApiKeyStore(client, config.identity))

    return asyncio.run(run())


def _print(key: ApiKey, secret: str) -> None:
    click.echo(f"The API key {key.id} is valid until {_date(key.secrets[0].until)}.", err=True)
    click.echo(secret)


def _date(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
