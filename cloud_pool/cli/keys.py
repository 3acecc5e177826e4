"""`causeway-cloud keys`: new, issue, revoke, show. Runs where tokens are issued; needs no gateway."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import ParamSpec, cast

import click
import jwt
import msgspec
import redis.asyncio
from redis.exceptions import RedisError
from rich.console import Console
from rich.table import Table

from router.errors import ConfigError

from ..accounts.identity import issuing
from ..accounts.identity.claims import Claims
from ..accounts.identity.config import MAX_TOKEN_LIFETIME_S, IdentityConfig
from ..accounts.identity.key_set import read_jwks
from ..accounts.identity.principal import SCOPES
from ..accounts.identity.revocation import DEVICES_KEY, TOKENS_KEY, revoke_device, revoke_token

_DEFAULTS = IdentityConfig()
_PATH = click.Path(path_type=Path)
_SECONDS_PER_DAY = 86400.0
P = ParamSpec("P")


def _report_errors(command: Callable[P, None]) -> Callable[P, None]:
    """What the operator did wrong is one line and status 2."""

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except (ConfigError, RedisError, OSError) as error:
            click.echo(f"causeway-cloud: {error}", err=True)
            sys.exit(2)

    return run


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def keys() -> None:
    """Devices' tokens: signing keys, issuing, revocation."""


@keys.command()
@click.option("--private", type=_PATH, required=True, help="Written here, mode 0600. Never give it to a gateway.")
@click.option("--keys", "key_file", type=_PATH, required=True, help="The public key is added to this JWKS file.")
@_report_errors
def new(private: Path, key_file: Path) -> None:
    """Make a signing key. Gateways read the key set again within a second."""
    click.echo(issuing.new_key(private, key_file).kid)


@keys.command()
@click.option("--private", type=_PATH, required=True, help="The signing key, from `keys new`.")
@click.option("--tenant", required=True)
@click.option("--device", required=True)
@click.option(
    "--scope", "scopes", multiple=True, type=click.Choice(SCOPES), default=("chat", "jobs"), show_default=True
)
@click.option("--days", type=click.FloatRange(min=0, min_open=True), default=30.0, show_default=True)
@click.option("--issuer", default=_DEFAULTS.issuer, show_default=True)
@click.option("--audience", default=_DEFAULTS.audience, show_default=True)
@_report_errors
def issue(
    private: Path, tenant: str, device: str, scopes: tuple[str, ...], days: float, issuer: str, audience: str
) -> None:
    """Print a device's token. Its id, for `keys revoke`, goes to stderr."""
    key = issuing.read_private(private)
    token, claims = issuing.issue(
        key,
        tenant=tenant,
        device=device,
        scopes=scopes,
        issuer=issuer,
        audience=audience,
        now=time.time(),
        lifetime_s=days * _SECONDS_PER_DAY,
    )
    click.echo(f"id {claims.jti}, until {_date(claims.exp)}", err=True)
    click.echo(token)


@keys.command()
@click.option("--redis", "url", envvar="CAUSEWAY_REDIS", help="redis://host:port/0, the one that the gateways use.")
@click.option("--token-id", help="One token; forgotten once it must have expired.")
@click.option("--device", help="tenant/device: all its tokens issued until now.")
@click.option("--key", "kid", help="A signing key, with all its tokens: taken out of --keys.")
@click.option("--keys", "key_file", type=_PATH, help="The JWKS file, for --key.")
@_report_errors
def revoke(url: str | None, token_id: str | None, device: str | None, kid: str | None, key_file: Path | None) -> None:
    """Refuse a token, a device or a key from now on (within seconds)."""
    if (token_id is not None) + (device is not None) + (kid is not None) != 1:
        raise click.UsageError("name one of --token-id, --device and --key")
    if kid is not None:
        if key_file is None:
            raise click.UsageError("--key needs --keys")
        issuing.remove_key(key_file, kid)
        return
    if url is None:
        raise click.UsageError("--redis names where the gateways look")
    if device is not None and not all(device.partition("/")):
        raise click.UsageError("--device is tenant/device")
    asyncio.run(_revoke(url, token_id, device, time.time()))


async def _revoke(url: str, token_id: str | None, device: str | None, now: float) -> None:
    async with redis.asyncio.Redis.from_url(url) as client:
        if token_id is not None:
            # Its end is not known here: no gateway takes a token that lives longer.
            await revoke_token(client, token_id, now + MAX_TOKEN_LIFETIME_S, now)
        elif device is not None:
            await revoke_device(client, device, now)


@keys.command()
@click.argument("token", required=False)
@click.option("--keys", "key_file", type=_PATH, help="List the keys of this JWKS file.")
@click.option("--redis", "url", envvar="CAUSEWAY_REDIS", help="List what is revoked there.")
@_report_errors
def show(token: str | None, key_file: Path | None, url: str | None) -> None:
    """What a token says (unverified), which keys there are, what is revoked."""
    if token is not None:
        _show_token(token)
    if key_file is not None:
        table = Table("key id", "algorithm")
        for key in read_jwks(key_file).keys:
            table.add_row(key.kid, key.alg)
        Console().print(table)
    if url is not None and token is None:
        asyncio.run(_show_revoked(url))


def _show_token(token: str) -> None:
    """Raises ConfigError."""
    try:
        found = jwt.decode_complete(token, options={"verify_signature": False})
        claims = msgspec.convert(found["payload"], Claims)
    except (jwt.InvalidTokenError, msgspec.ValidationError) as error:
        raise ConfigError(f"this is no token of ours: {error}") from error
    table = Table("claim", "value", title="not verified")
    for name, value in (
        ("key", str(found["header"].get("kid"))),
        ("id", claims.jti),
        ("tenant", claims.tenant),
        ("device", claims.sub),
        ("scope", claims.scope),
        ("issuer", claims.iss),
        ("audience", str(claims.aud)),
        ("valid", f"{_date(claims.nbf)} to {_date(claims.exp)}"),
    ):
        table.add_row(name, value)
    Console().print(table)


async def _show_revoked(url: str) -> None:
    async with redis.asyncio.Redis.from_url(url, decode_responses=True) as client:
        tokens = cast("list[tuple[str, float]]", await client.zrange(TOKENS_KEY, 0, -1, withscores=True))
        devices = cast("dict[str, str]", await client.hgetall(DEVICES_KEY))
    table = Table("revoked", "", "")
    for jti, ends in tokens:
        table.add_row("token", jti, f"until {_date(ends)}")
    for name, at in sorted(devices.items()):
        table.add_row("device", name, f"issued before {_date(float(at))}")
    Console().print(table)


def _date(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
