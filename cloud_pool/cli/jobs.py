"""`causeway-cloud worker` and `causeway-cloud dlq`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

import click

from router.errors import CausewayError, ConfigError

from ..config.loader import Flags, load_config
from ..jobs.config import with_shared_redis
from ..jobs.lua.scripts import SCRIPTS
from ..jobs.store.job_store import JobStore
from ..jobs.store.redis_client import RedisClient
from ..observability.logs import start_log
from .main import LogLevel, refuse, until_stopped

_PATH = click.Path(path_type=Path)
T = TypeVar("T")


@click.command()
@click.option("--config", "path", type=_PATH, help="The gateways' YAML file; flags win over it.")
@click.option("--redis", envvar="CAUSEWAY_REDIS", help="URL of the Redis that gateways and workers share.")
@click.option("--triton", help="host:port of Triton's gRPC, for every tier.")
@click.option("--tier", "tiers", multiple=True, help="A tier to work for; repeatable.")
@click.option("--model-dir", "model_dirs", multiple=True, type=_PATH, help="Searched for artifacts first; repeatable.")
@click.option("--metrics-host", default="127.0.0.1", show_default=True)
@click.option("--metrics-port", type=click.IntRange(0, 65535), help="Serve /metrics there; 0: any free one.")
@click.option("--log", type=click.Choice(["debug", "info", "warning", "error"]))
def worker(
    path: Path | None,
    redis: str | None,
    triton: str | None,
    tiers: tuple[str, ...],
    model_dirs: tuple[Path, ...],
    metrics_host: str,
    metrics_port: int | None,
    log: LogLevel | None,
) -> None:
    """Run jobs from Redis on the tiers. Prints `ready worker=…` on stdout; SIGTERM drains."""
    from ..jobs.worker.app import run

    flags = Flags(
        redis=redis,
        triton=triton,
        tiers=tiers,
        model_dirs=tuple(str(folder.absolute()) for folder in model_dirs),
        log=log,
    )
    try:
        config = load_config(path, flags)
        start_log(config.log, config.log_format)
        at = None if metrics_port is None else (metrics_host, metrics_port)
        until_stopped(lambda stop: run(config, stop, at, lambda: load_config(path, flags)))
    except ConfigError as error:
        refuse(error.message)


@click.group()
@click.option("--config", "path", type=_PATH, help="The gateways' YAML file.")
@click.option("--redis", envvar="CAUSEWAY_REDIS", help="URL of the Redis that gateways and workers share.")
@click.pass_context
def dlq(context: click.Context, path: Path | None, redis: str | None) -> None:
    """Dead letters: jobs whose attempts are used up. What they asked is not shown."""
    context.obj = path, redis


@dlq.command("list")
@click.option("--limit", type=click.IntRange(1, 10_000), default=100, show_default=True)
@click.pass_obj
def list_dead_letters(place: tuple[Path | None, str | None], limit: int) -> None:
    """Newest first: when, job, owner, tier, attempts, last fault."""
    for letter in _run_with_store(place, lambda store: store.dead_letters(limit)):
        at = datetime.fromtimestamp(letter.died / 1000, tz=UTC).isoformat(timespec="seconds")
        click.echo("\t".join((at, letter.id, letter.owner, letter.tier, str(letter.attempts), letter.code)))


@dlq.command("retry")
@click.argument("jobs", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All that `list` shows by default.")
@click.pass_obj
def retry(place: tuple[Path | None, str | None], jobs: tuple[str, ...], every: bool) -> None:
    """Queue them again, with all their attempts and a new deadline. A batch's line is not: send a new batch."""
    _for_each_job(place, jobs, every, "queued again", lambda store, job: store.retry(job))


@dlq.command("purge")
@click.argument("jobs", nargs=-1)
@click.option("--all", "every", is_flag=True, help="All that `list` shows by default.")
@click.pass_obj
def purge(place: tuple[Path | None, str | None], jobs: tuple[str, ...], every: bool) -> None:
    """Delete them, with all that they asked."""
    _for_each_job(place, jobs, every, "purged", lambda store, job: store.purge(job))


def _for_each_job(
    place: tuple[Path | None, str | None],
    jobs: tuple[str, ...],
    every: bool,
    done: str,
    act: Callable[[JobStore, str], Awaitable[bool]],
) -> None:
    if bool(jobs) == every:
        refuse("name the jobs, or say --all")

    async def all_of_them(store: JobStore) -> list[tuple[str, bool]]:
        names = [letter.id for letter in await store.dead_letters()] if every else list(jobs)
        return [(job, await act(store, job)) for job in names]

    found = _run_with_store(place, all_of_them)
    for job, worked in found:
        click.echo(f"{job}\t{done if worked else 'left: it is no dead letter, or its batch has counted it'}")
    if not all(worked for _, worked in found):
        raise SystemExit(1)


def _run_with_store(place: tuple[Path | None, str | None], work: Callable[[JobStore], Awaitable[T]]) -> T:
    path, redis = place

    async def worked() -> T:
        config = load_config(path, Flags(redis=redis))
        settings = with_shared_redis(config.jobs, config.redis)
        if not settings.redis:
            raise ConfigError("which Redis? Give --redis, or a --config that names it", where="redis")
        database = RedisClient(settings.redis, settings.key_prefix, SCRIPTS)
        try:
            return await work(JobStore(database, settings))
        finally:
            await database.close()

    try:
        return asyncio.run(worked())
    except CausewayError as error:
        refuse(error.message)
