"""The commands `causeway-cloud keys` (new, issue, rotate, revoke, show; `api`). They do not need a gateway."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

import click
import jwt
import msgspec
from rich.console import Console
from rich.table import Table

from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.process import option

from ..accounts.identity import issuing
from ..accounts.identity.config import MAX_TOKEN_LIFETIME_S, IdentityConfig
from ..accounts.identity.key_set import read_jwks
from ..accounts.identity.revocation import DEVICES_KEY, TOKENS_KEY, is_replicated, revoke_device, revoke_token
from ..accounts.identity.token_verifier import Claims
from ..admission import Priority
from ..config import Config
from ..core.principal import MODALITIES, SCOPES, Grants, Modality, Scope
from ..storage.encryption import rotate_keys
from ..storage.redis_client import PromotableReplicas
from .api_keys import api, priority_option
from .process import PATH, ConfigSource, redis_options, report_errors
from .usage import gateways_redis, replication_of_gateways_redis

_DEFAULTS = IdentityConfig()


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def keys() -> None:
    """Manage device tokens, API keys and the keys that encrypt jobs."""


keys.add_command(api)


@keys.command()
@option(
    "--private",
    "File for the private key, written with mode 0600. Do not copy this file to the gateways.",
    PATH,
    required=True,
)
@option("--keys", "JWKS file to which the public key is added.", PATH, to="key_file", required=True)
@report_errors
def new(private: Path, key_file: Path) -> None:
    """Create a signing key and print its id. Gateways read the changed JWKS file within a second."""
    click.echo(issuing.new_key(private, key_file).kid)


@keys.command()
@option("--private", "File with the signing key, made by `keys new`.", PATH, required=True)
@option("--tenant", "Tenant of the device.", required=True)
@option("--device", "Name of the device.", required=True)
@option(
    "--scope",
    "Scope that the token permits; may be repeated.",
    click.Choice(SCOPES),
    ("chat", "jobs"),
    to="scopes",
    multiple=True,
)
@priority_option
@option("--critical", "Permit requests with the header `x-causeway-critical: true`.", is_flag=True)
@option(
    "--model",
    "Model that the token may use; may be repeated; default: all models of the tenant.",
    to="models",
    multiple=True,
)
@option(
    "--modality",
    "Kind of content that messages with the token may have; may be repeated; default: all kinds.",
    click.Choice(MODALITIES),
    to="modalities",
    multiple=True,
)
@option(
    "--region",
    "Region in which gateways (by their key identity.region) accept the token; may be repeated; default: all.",
    to="regions",
    multiple=True,
)
@click.option(
    "--lifetime-s",
    type=click.FloatRange(min=0, min_open=True),
    default=30 * 86400.0,
    show_default="30 days",
    help="Lifetime of the token in seconds.",
)
@option("--issuer", "Issuer of the token: the value of identity.issuer at the gateways.", default=_DEFAULTS.issuer)
@option(
    "--audience", "Audience of the token: the value of identity.audience at the gateways.", default=_DEFAULTS.audience
)
@report_errors
def issue(
    private: Path,
    tenant: str,
    device: str,
    scopes: tuple[Scope, ...],
    priority: Priority,
    critical: bool,
    models: tuple[str, ...],
    modalities: tuple[Modality, ...],
    regions: tuple[str, ...],
    lifetime_s: float,
    issuer: str,
    audience: str,
) -> None:
    """Make a token for a device and print it on stdout. The token's id, for `keys revoke`, is printed on stderr."""
    key = issuing.read_private(private)
    grants = Grants(
        priority=priority,
        critical=critical,
        models=models or None,
        modalities=modalities or None,
        regions=regions or None,
    )
    token, claims = issuing.issue(
        key,
        tenant=tenant,
        device=device,
        scopes=scopes,
        grants=grants,
        issuer=issuer,
        audience=audience,
        now=time.time(),
        lifetime_s=lifetime_s,
    )
    click.echo(f"The token {claims.jti} is valid until {_date(claims.exp)}.", err=True)
    click.echo(token)


@keys.command()
@click.argument("file", type=PATH)
@option(
    "--after-s",
    "Seconds until the new key is used for encryption. All gateways and workers must have the file by then.",
    click.FloatRange(min=0),
    600.0,
)
@report_errors
def rotate(file: Path, after_s: float) -> None:
    """Make a key that encrypts jobs, add the key to FILE (the gateways' `jobs.encryption_key_file`), and print the id
    of the key.

    The first key of a new file encrypts at once. No key is removed: older ones decrypt what they have encrypted.
    """
    key = rotate_keys(file, after_s, time.time())
    click.echo(f"The new key encrypts jobs from {_date(key.seals_from)} on.", err=True)
    click.echo(key.id)


@keys.command()
@redis_options
@option("--token-id", "Revoke the token with this id.")
@option("--device", "Revoke all tokens issued until now for this device, written as tenant/device.")
@option(
    "--key",
    "Revoke a signing key and all tokens that it signed. The command removes the key from the file in --keys.",
    to="kid",
)
@option("--keys", "JWKS file from which --key is removed.", PATH, to="key_file")
def revoke(
    source: ConfigSource, token_id: str | None, device: str | None, kid: str | None, key_file: Path | None
) -> None:
    """Revoke a token, all tokens of a device, or a signing key. Within seconds, gateways refuse the revoked tokens."""
    if (token_id is not None) + (device is not None) + (kid is not None) != 1:
        raise click.UsageError("Give exactly one of --token-id, --device and --key.")
    if kid is not None:
        if key_file is None:
            raise click.UsageError("--key needs --keys.")
        issuing.remove_key(key_file, kid)
        left = len(read_jwks(key_file).keys)
        click.echo(
            f"Removed the key {kid} from {key_file}. Keys left in the file: {left}. Within a second, gateways that "
            "read this file refuse all tokens that the removed key signed."
        )
        return
    if device is not None and not all(device.partition("/")):
        raise click.UsageError("Write --device as tenant/device.")
    now = time.time()
    asyncio.run(_revoke(source.load(), token_id, device, now))
    what = f"token {token_id}" if token_id is not None else f"all tokens of {device} issued until {_date(now)}"
    click.echo(f"Revoked {what}. Gateways refuse {'it' if token_id is not None else 'them'} within seconds.")


async def _revoke(config: Config, token_id: str | None, device: str | None, now: float) -> None:
    replicas, timeout_s = replication_of_gateways_redis(config)
    async with gateways_redis(config) as client:
        if token_id is not None:
            # The token's expiry is not known here; no gateway accepts a token with a longer lifetime.
            await revoke_token(client, token_id, now + MAX_TOKEN_LIFETIME_S, now)
        elif device is not None:
            await revoke_device(client, device, now)
        required = await PromotableReplicas(client).required(replicas)
        if required and not await is_replicated(client, required, timeout_s):
            raise click.ClickException(
                f"The revocation was written, but fewer than {required} replicas confirmed it in {timeout_s:g} s, so "
                "a failover could lose it. Run the command again."
            )


@keys.command()
@click.argument("token", required=False)
@option("--keys", "JWKS file whose keys are listed.", PATH, to="key_file")
@redis_options
def show(source: ConfigSource, token: str | None, key_file: Path | None) -> None:
    """Show the claims of a token (without verifying them), the keys of a JWKS file, or the revocations in Redis."""
    if token is not None:
        _show_token(token)
    if key_file is not None:
        table = Table("key id", "algorithm")
        for key in read_jwks(key_file).keys:
            table.add_row(key.kid, key.alg)
        Console().print(table)
    if token is None and (source.is_given or key_file is None):
        asyncio.run(_show_revoked(source.load()))


def _show_token(token: str) -> None:
    """Print a token's claims. Raises ConfigError."""
    try:
        decoded = jwt.decode_complete(token, options={"verify_signature": False})
        claims = msgspec.convert(decoded["payload"], Claims)
    except (jwt.InvalidTokenError, msgspec.ValidationError) as error:
        raise ConfigError(f"The token is not a Causeway token: {error}") from error
    table = Table("claim", "value", title="not verified")
    for name, value in (
        ("key", str(decoded["header"].get("kid"))),
        ("id", claims.jti),
        ("tenant", claims.tenant),
        ("device", claims.sub),
        ("scope", claims.scope),
        ("priority", claims.priority),
        ("critical", str(claims.critical).lower()),
        ("models", _listed(claims.models)),
        ("modalities", _listed(claims.modalities)),
        ("regions", _listed(claims.regions)),
        ("issuer", claims.iss),
        ("audience", str(claims.aud)),
        ("valid", f"{_date(claims.nbf)} to {_date(claims.exp)}"),
    ):
        table.add_row(name, value)
    Console().print(table)


async def _show_revoked(config: Config) -> None:
    async with gateways_redis(config) as client:
        tokens = cast("list[tuple[bytes, float]]", await client.zrange(TOKENS_KEY, 0, -1, withscores=True))
        devices = cast("dict[bytes, bytes]", await client.hgetall(DEVICES_KEY))
    table = Table("revoked", "", "")
    for jti, expiry in tokens:
        table.add_row("token", jti.decode(), f"until {_date(expiry)}")
    for name, revoked_at in sorted(devices.items()):
        table.add_row("device", name.decode(), f"issued before {_date(float(revoked_at))}")
    Console().print(table)


def _listed(names: Sequence[str] | None) -> str:
    return "all" if names is None else ", ".join(names)


def _date(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
