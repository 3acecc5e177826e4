"""The command `causeway-edge jobs`: list the daemon's jobs, retry dead letters, purge ended jobs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from causeway_sdk import CausewayAPIError, CausewayError
from causeway_server.router.jobs.job import JobState
from causeway_server.router.serving.process import option

from .options import connect, daemon_options

if TYPE_CHECKING:
    from causeway_sdk import Causeway, Job

DONE, REFUSED, UNREACHABLE = 0, 1, 3
_PAGE = 100


@click.group()
def jobs() -> None:
    """List, retry and purge this client's jobs on the running daemon.

    Exit codes: 0 done, 1 refused, 2 usage error, 3 unreachable.
    """


@jobs.command("list")
@daemon_options
@option("--status", "List only jobs with this status.", click.Choice([state.value for state in JobState]))
@option("--limit", "Maximum number of jobs in the list. The newest jobs come first.", click.IntRange(min=1), 100)
def list_(url: str, api_key: str, as_json: bool, status: str | None, limit: int) -> None:
    """List the jobs, newest first, each with its id, status, number of attempts and last error."""

    def run(causeway: Causeway) -> list[Job]:
        found: list[Job] = []
        after = ""
        while len(found) < limit and (page := causeway.jobs(limit=_PAGE, after=after)):
            found += [job for job in page if status in (None, job.status)]
            after = page[-1].id
        return found[:limit]

    _print(_ask(url, api_key, run), as_json=as_json)


@jobs.command()
@daemon_options
@click.argument("job")
def show(url: str, api_key: str, as_json: bool, job: str) -> None:
    """Print the job JOB with its webhook and its answer."""
    (shown,) = _ask(url, api_key, lambda causeway: [causeway.job(job)])
    _print([shown], as_json=as_json)
    if shown.webhook and not as_json:
        click.echo(f"webhook {shown.webhook_status or 'after its end'}: {shown.webhook}")
    if shown.answer is not None and not as_json:
        click.echo(shown.answer.text)


@jobs.command()
@daemon_options
@click.argument("job")
def retry(url: str, api_key: str, as_json: bool, job: str) -> None:
    """Queue the dead letter JOB again, with all attempts and a new deadline. A dead letter is a job that used up its
    attempts.
    """
    _print(_ask(url, api_key, lambda causeway: [causeway.retry(job)]), as_json=as_json)


@jobs.command()
@daemon_options
@click.argument("job")
def purge(url: str, api_key: str, as_json: bool, job: str) -> None:
    """Delete the job JOB with its request and its answer. The job must have ended."""
    _print(_ask(url, api_key, lambda causeway: [causeway.purge(job)]), as_json=as_json)


def _ask(url: str, api_key: str, run: Callable[[Causeway], list[Job]]) -> list[Job]:
    """Run `run` with a client of the daemon, and return its jobs. Exits if the daemon refuses or cannot be reached."""
    try:
        with connect(url, api_key) as causeway:
            return run(causeway)
    except CausewayError as error:
        click.echo(f"causeway-edge: {error}", err=True)
        sys.exit(REFUSED if isinstance(error, CausewayAPIError) else UNREACHABLE)


def _print(jobs: list[Job], *, as_json: bool) -> None:
    for job in jobs:
        if as_json:
            click.echo(json.dumps(asdict(job)))
            continue
        click.echo(
            "  ".join(part for part in (job.id, f"{job.status:9}", f"attempts {job.attempts}", job.code) if part)
        )
