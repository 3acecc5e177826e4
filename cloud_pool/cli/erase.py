"""The command `causeway-cloud erase`, which erases all data of a tenant, device or user and makes a signed receipt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import click
from redis.exceptions import RedisError

from causeway_server.router.errors import CausewayError, ConfigError, JobStoreUnavailable
from causeway_server.router.serving.process import ask

from ..accounts.identity.issuing import read_private
from ..accounts.identity.key_set import read_jwks
from ..config import Config
from ..erasure import Erasure, ErasureSubject, Receipt, Retained, gateway_kinds, job_kinds, sign, verify
from ..redis.config import shown_address
from ..redis.connect import open_redis, redis_fault
from ..storage.config import with_shared_redis
from ..storage.stores import JobStores
from .process import OTHER_NAMES, PATH, PROGRAM, ConfigSource, redis_options

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_ALWAYS_LEFT = (
    Retained("backups, and copies outside Causeway", "Causeway does not know them: delete them, or let them expire"),
    Retained("audit files, logs and traces", "ids and times, no content: they expire as you rotate these files"),
    Retained("revocations of tokens", "kept, so that no revoked token works again"),
    Retained("effects of streams", "keys are one-way digests: they expire after `streams.effect_ttl_s`"),
)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--tenant", help="Erase a tenant: all its devices and users.")
@click.option("--device", help="Erase a device, as tenant/device.")
@click.option("--user", help="Erase the jobs of a user, as tenant/user, which are the requests that name it as `user`.")
@click.option("--sign", "private", type=_FILE, help="Private key that signs the receipt, from `keys new`.")
@click.option("--receipt", "file", type=PATH, help="File for the receipt; default: stdout.")
@click.option("--dry-run", is_flag=True, help="Print the amount of data, and change nothing.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--keep-cache", is_flag=True, help="Do not erase the shared cache, whose entries expire by themselves.")
@click.option("--verify", "signed", type=_FILE, help="Instead of erasing, verify this receipt with --keys.")
@click.option("--keys", "key_file", type=_FILE, help="JWKS file with the public key, for --verify.")
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
    keep_cache: bool,
    signed: Path | None,
    key_file: Path | None,
) -> None:
    """Erase all data of a tenant, device or user. Prints a signed receipt.

    Revoke the subject's tokens first. If a run was interrupted, the same command continues it.
    """
    if signed is not None:
        if key_file is None:
            raise ConfigError("--verify needs --keys, the JWKS file with the public key.", where="--keys")
        receipt = verify(signed.read_bytes(), read_jwks(key_file))
        click.echo(f"The receipt is valid: {receipt.subject.name}, finished {receipt.finished}.")
        return
    subject = ErasureSubject.parse(tenant, device, user)
    if private is None and not dry_run:
        advice = "Name the private key that signs the receipt, from `causeway-cloud keys new`."
        raise ConfigError(advice, where="--sign")
    key = None if private is None or dry_run else read_private(private)
    config = source.load()
    counts = asyncio.run(_count(config, subject, keep_cache))
    for kind, count in counts.items():
        click.echo(f"{count}\t{kind}", err=True)
    if not any(counts.values()):
        click.echo(f"There is no data of {subject.name}. {OTHER_NAMES}", err=True)
    if key is None:
        return
    ask(PROGRAM, f"Erase all data of {subject.name} permanently?", yes=yes)
    if file is not None:
        file.open("ab").close()  # where no receipt can be written, nothing is erased
    document = sign(asyncio.run(_erase(config, subject, keep_cache)), key)
    if file is None:
        click.echo(document.decode(), nl=False)
    else:
        file.write_bytes(document)
    asyncio.run(_forget(config, subject))


async def _count(config: Config, subject: ErasureSubject, keep_cache: bool) -> dict[str, int]:
    async with _opened(config, keep_cache) as erasure:
        return await erasure.count(subject)


async def _erase(config: Config, subject: ErasureSubject, keep_cache: bool) -> Receipt:
    left = list(_ALWAYS_LEFT)
    if keep_cache:
        left.append(
            Retained(
                "the shared cache", "kept by --keep-cache until `cache.ttl_s` + `cache.stale_if_error_s` have passed"
            )
        )
    if subject.device or subject.user:
        left.append(Retained("usage", "it is counted by tenant, tier and day, not by device or user"))
    if subject.user:
        left.append(Retained("files and batches", "a file has lines of many users: erase the device"))
    async with _opened(config, keep_cache) as erasure:
        return await erasure.erase(subject, left)


async def _forget(config: Config, subject: ErasureSubject) -> None:
    async with _opened(config, True) as erasure:
        await erasure.forget(subject)


@asynccontextmanager
async def _opened(config: Config, keep_cache: bool) -> AsyncIterator[Erasure]:
    """Open the stores of a configuration for a `with` block.

    Raises:
        ConfigError: No Redis of jobs is configured, or an address is unusable.
        CausewayError: A Redis does not answer, or answers with an error.
    """
    settings = with_shared_redis(config.jobs, config.redis)
    if not settings.redis:
        reason = "Name the Redis of jobs, which stores the progress (--redis or --config); it must not be a cluster."
        raise ConfigError(reason, where="jobs.redis")
    addresses = [config.redis or settings.redis]
    if not keep_cache:
        addresses.append(config.cache.redis or addresses[0])
    async with AsyncExitStack() as closing:
        stores = JobStores.open(settings)
        closing.push_async_callback(stores.close)
        clients = []
        for address, where in zip(addresses, ("redis", "cache.redis"), strict=False):
            clients.append(open_redis(address, where))
            closing.push_async_callback(clients[-1].aclose)
        shared, cache = clients[0], None if keep_cache else clients[1]
        kinds = [*job_kinds(stores), *gateway_kinds(shared, cache, config.cache.key_prefix)]
        try:
            await stores.database.ensure_layout()
            yield Erasure(stores.database, kinds)
        except JobStoreUnavailable as error:
            raise CausewayError(stores.database.explain(error)) from error
        except (RedisError, OSError) as error:
            shown = " or ".join(dict.fromkeys(map(shown_address, addresses)))
            raise CausewayError(redis_fault(error, shown)) from error
