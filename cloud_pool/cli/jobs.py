"""The commands `causeway-cloud dlq` and `causeway-cloud jobs`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec

from causeway_server.router.errors import ConfigError, JobStoreUnavailable
from causeway_server.router.serving.process import ask, format_option, option

from ..config import Config
from ..storage.config import with_shared_redis
from ..storage.job_store import JobStore
from .process import PROGRAM, ConfigSource, redis_options, refuse, report_errors

if TYPE_CHECKING:
    from ..storage.stores import JobStores

_AUDIT_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_HELP = {"help_option_names": ["-h", "--help"]}
T = TypeVar("T")


@click.group(context_settings=_HELP)
@click.pass_context
@redis_options
def dlq(context: click.Context, source: ConfigSource) -> None:
    """Manage dead letters, the jobs that have used up their attempts. Their content is never shown."""
    context.obj = source


@dlq.command("list")
@option("--limit", "Maximum number of dead letters to list.", click.IntRange(1, 10_000), 100)
@click.pass_obj
@report_errors
def list_dead_letters(source: ConfigSource, limit: int) -> None:
    """List dead letters, the newest first.

    The columns are time, job, owner, tier, number of attempts, and code of the last error.
    """
    letters = _run(source.load(), lambda stores: stores.jobs.dead_letters(limit))
    if not letters:
        click.echo("There are no dead letters.", err=True)
    for letter in letters:
        died_at = datetime.fromtimestamp(letter.died / 1000, tz=UTC).isoformat(timespec="seconds")
        click.echo("\t".join((died_at, letter.id, letter.owner, letter.tier, str(letter.attempts), letter.code)))


@dlq.command("retry")
@click.argument("jobs", nargs=-1)
@option("--all", "Queue all dead letters that `dlq list` shows by default.", to="every", is_flag=True)
@click.pass_obj
@report_errors
def retry(source: ConfigSource, jobs: tuple[str, ...], every: bool) -> None:
    """Queue the jobs of dead letters again, each with all its attempts and a new deadline. Jobs of a batch cannot be
    queued again: send their lines in a new batch.
    """
    _for_each_job(source.load(), jobs, every, "queued again", lambda store, job: store.retry(job))


@dlq.command("purge")
@click.argument("jobs", nargs=-1)
@option(
    "--all",
    "Delete all dead letters that `dlq list` shows by default. The command asks for confirmation.",
    to="every",
    is_flag=True,
)
@option("--yes", "Do not ask for confirmation.", is_flag=True)
@click.pass_obj
@report_errors
def purge(source: ConfigSource, jobs: tuple[str, ...], every: bool, yes: bool) -> None:
    """Delete dead letters together with their requests."""
    if every and not jobs:
        ask(PROGRAM, "Delete all dead letters, with their requests, permanently?", yes=yes)
    _for_each_job(source.load(), jobs, every, "purged", lambda store, job: store.purge(job))


@click.group(context_settings=_HELP)
def jobs() -> None:
    """Check the jobs in Redis as a whole."""


@jobs.command("reconcile")
@redis_options
@format_option
@click.argument("files", nargs=-1, type=_AUDIT_FILE)
def reconcile_command(source: ConfigSource, as_json: bool, files: tuple[Path, ...]) -> None:
    """List jobs and batches that were accepted but that Redis has lost, for example in a failover.

    FILES are the audit files of all gateways, rotated ones included, and of workers to see the last runs; default: the
    file of the configuration. Exits with status 1 if a job or batch is missing.
    """
    from ..jobs.reconciliation import Reconciliation, reconcile

    config = source.load()

    async def work(stores: JobStores) -> Reconciliation:
        audit_files = files or tuple(Path(name) for name in (config.audit_file,) if name not in ("", "-"))
        if not audit_files:
            raise ConfigError(
                "Name the audit files on the command line, because the configuration names none.", where="audit_file"
            )
        return await reconcile(stores.database, config.jobs, audit_files)

    result = _run(config, work)
    if as_json:
        click.echo(msgspec.json.encode(result).decode())
    else:
        for lost in result.lost:
            at = datetime.fromtimestamp(lost.accepted_at, tz=UTC).isoformat(timespec="milliseconds")
            click.echo("\t".join((at, lost.id, f"{lost.tenant}/{lost.device}", lost.tier or "-", lost.last_run or "-")))
        checked = result.acknowledged - result.too_old
        summary = f"{checked} acceptances checked, {len(result.lost)} lost, {result.too_old} too old to decide"
        click.echo(f"{summary}, {result.unreadable_lines} unreadable lines.", err=True)
        if not result.acknowledged:
            click.echo(
                "The files contain no accepted job. Are they the audit files (`audit_file`) of all gateways?", err=True
            )
    if result.lost:
        raise SystemExit(1)


def _for_each_job(
    config: Config, jobs: tuple[str, ...], every: bool, done: str, act: Callable[[JobStore, str], Awaitable[bool]]
) -> None:
    """Apply `act` and print a line per job. Exit with status 1 if it failed for one of them."""
    if bool(jobs) == every:
        refuse("Name the jobs, or use --all.")

    async def act_on_all(stores: JobStores) -> list[tuple[str, bool]]:
        names = [letter.id for letter in await stores.jobs.dead_letters()] if every else list(jobs)
        return [(job, await act(stores.jobs, job)) for job in names]

    results = _run(config, act_on_all)
    if not results:
        click.echo("There are no dead letters.", err=True)
    for job, succeeded in results:
        left = "left unchanged: the job is not a dead letter, or its batch has already counted it"
        click.echo(f"{job}\t{done if succeeded else left}")
    if not all(succeeded for _, succeeded in results):
        raise SystemExit(1)


def _run(config: Config, work: Callable[[JobStores], Awaitable[T]]) -> T:
    """Run `work` with the job stores. Raises CausewayError."""
    from ..storage.stores import JobStores

    async def run() -> T:
        settings = with_shared_redis(config.jobs, config.redis)
        if not settings.redis:
            raise ConfigError("Give --redis, or a --config that names the Redis of the jobs.", where="redis")
        stores = JobStores.open(settings)
        try:
            return await work(stores)
        except JobStoreUnavailable as error:
            refuse(stores.database.explain(error))
        finally:
            await stores.close()

    return asyncio.run(run())
