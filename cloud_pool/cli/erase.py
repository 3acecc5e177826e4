"""The command `causeway-cloud erase`, which erases all data of a tenant, device or user and makes a signed receipt."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.process import ask, option

from ..accounts.identity.issuing import read_private
from ..accounts.identity.key_set import read_jwks
from ..config import Config
from ..core.subject import ErasureSubject
from ..erasure import Receipt, opened, sign, verify
from .process import OTHER_NAMES, PATH, PROGRAM, ConfigSource, redis_options

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@option("--tenant", "Erase the data of a tenant, with all its devices and users.")
@option("--device", "Erase the data of a device, written as tenant/device.")
@option(
    "--user",
    "Erase the jobs of a user, written as tenant/user. These are the tenant's jobs whose requests name the user in the "
    "field `user`.",
)
@option("--sign", "File with the private key that signs the receipt, made by `keys new`.", _FILE, to="private")
@option("--receipt", "File for the receipt; default: stdout.", PATH, to="file")
@option("--dry-run", "Only print how much data would be erased.", is_flag=True)
@option("--yes", "Do not ask for confirmation.", is_flag=True)
@option("--verify", "Erase nothing; verify this receipt with the public key in --keys.", _FILE, to="signed")
@option("--keys", "JWKS file with the public key for --verify.", _FILE, to="key_file")
@redis_options
def erase(
    source: ConfigSource,
    tenant: str | None,
    device: str | None,
    user: str | None,
    private: Path | None,
    file: Path | None,
    dry_run: bool,
    yes: bool,
    signed: Path | None,
    key_file: Path | None,
) -> None:
    """Erase all data of a tenant, device or user, and print a signed receipt.

    Revoke the subject's tokens first. If a run was interrupted, the same command continues it.
    """
    if signed is not None:
        if key_file is None:
            raise ConfigError("--verify needs --keys, the JWKS file with the public key.", where="--keys")
        receipt = verify(signed.read_bytes(), read_jwks(key_file))
        click.echo(f"The receipt is valid: the erasure of {receipt.subject.name} finished at {receipt.finished}.")
        return
    subject = ErasureSubject.parse(tenant, device, user)
    if private is None and not dry_run:
        advice = "Name the private key that signs the receipt, from `causeway-cloud keys new`."
        raise ConfigError(advice, where="--sign")
    key = None if private is None or dry_run else read_private(private)
    config = source.load()
    counts = asyncio.run(_count(config, subject))
    for kind, count in counts.items():
        click.echo(f"{count}\t{kind}", err=True)
    if not any(counts.values()):
        click.echo(f"There is no data of {subject.name}. {OTHER_NAMES}", err=True)
    if key is None:
        return
    ask(PROGRAM, f"Erase all data of {subject.name} permanently?", yes=yes)
    if file is not None:
        file.open("ab").close()  # where no receipt can be written, nothing is erased
    document = sign(asyncio.run(_erase(config, subject)), key)
    if file is None:
        click.echo(document.decode(), nl=False)
    else:
        file.write_bytes(document)
    asyncio.run(_forget(config, subject))


async def _count(config: Config, subject: ErasureSubject) -> dict[str, int]:
    async with opened(config.jobs, config.redis, config.cache, config.identity) as erasure:
        return await erasure.count(subject)


async def _erase(config: Config, subject: ErasureSubject) -> Receipt:
    async with opened(config.jobs, config.redis, config.cache, config.identity) as erasure:
        return await erasure.erase(subject)


async def _forget(config: Config, subject: ErasureSubject) -> None:
    async with opened(config.jobs, config.redis, config.cache, config.identity) as erasure:
        await erasure.forget(subject)
