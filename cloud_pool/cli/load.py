"""The command `causeway-cloud load`."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import click
import msgspec
from rich.console import Console
from rich.table import Table

from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.process import format_option, option

from ..load.client import LoadClient, Sample
from ..load.report import Percentiles, Summary, summarize, write_page
from ..load.traces import Conversation, arrivals, made, read_trace, schedule

_PATH = click.Path(path_type=Path)
_SOME = click.IntRange(1)
_POSITIVE = click.FloatRange(0, min_open=True)


class LoadSettings(msgspec.Struct, frozen=True):
    """Options of the command. Times are seconds; without `users` the loop is open."""

    url: str
    model: str
    users: int | None
    rate: float | None
    duration_s: float
    turns: int
    words: int
    think_s: float
    max_tokens: int
    stream: bool
    timeout_s: float
    seed: int
    key_env: str
    trace: Path | None


@click.command("load")
@click.argument("url")
@option("--model", "Model that the requests ask for.", default="auto")
@option("--users", "Closed loop: number of users. Each user has one request in progress at a time.", _SOME)
@option("--rate", "Open loop: mean number of conversations that begin per second, at random times.", _POSITIVE)
@option("--duration-s", "Time in which new requests are sent, in seconds.", _POSITIVE, 30.0)
@option(
    "--trace", "File of conversations to replay. Each line is a JSON object with `turns`, `think_s` and `at_s`.", _PATH
)
@option("--turns", "Number of turns of each generated conversation.", _SOME, 1)
@option("--words", "Number of words of each generated turn.", _SOME, 16)
@option("--think-s", "Pause between an answer and the next generated turn, in seconds.", click.FloatRange(0), 0.0)
@option("--max-tokens", "Maximum number of tokens of each answer.", _SOME, 64)
@option("--stream/--no-stream", "--stream: ask for streamed answers. --no-stream: ask for whole answers.", default=True)
@option("--timeout-s", "Time after which a request counts as failed, in seconds.", _POSITIVE, 60.0)
@option("--seed", "Seed of the random numbers for texts and times.", int, 1)
@option("--key-env", "Name of the environment variable that contains the API key.", default="")
@option("--report", "HTML file to which a report with plots is written.", _PATH)
@format_option
def load_command(report: Path | None, *, as_json: bool, **settings: object) -> None:
    """Send load to the server at URL, such as http://127.0.0.1:8100/v1, and print what the clients measured.

    Give --users, --rate, or a trace with times. Exit code: 0 all requests were answered, 1 some failed, 2 usage error.
    """
    chosen = msgspec.convert(settings, LoadSettings)
    try:
        trace = read_trace(chosen.trace) if chosen.trace else ()
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    timed = bool(trace) and trace[0].at_s is not None
    if (chosen.users is not None) + (chosen.rate is not None) + timed != 1:
        raise click.UsageError("Give exactly one of --users, --rate, and a --trace whose lines have `at_s`.")
    try:
        samples = asyncio.run(_run(chosen, trace))
    except ValueError as error:  # of the session's base URL: what a request raises becomes a failure
        raise click.UsageError(f"{chosen.url}: {error}. Name a server such as http://127.0.0.1:8100/v1.") from error
    summary = summarize(samples)
    if report is not None:
        shown = {name: value for name, value in msgspec.structs.asdict(chosen).items() if value is not None}
        write_page(report, f"Load on {chosen.url}", shown, samples)
    if as_json:
        click.echo(msgspec.json.encode(summary))
    else:
        _print(summary)
    raise SystemExit(bool(summary.faults) or not samples)


async def _run(chosen: LoadSettings, trace: tuple[Conversation, ...]) -> list[Sample]:
    rng = random.Random(chosen.seed)
    key = os.environ.get(chosen.key_env, "")
    body: dict[str, object] = {"model": chosen.model, "max_tokens": chosen.max_tokens, "stream": chosen.stream}
    if chosen.stream:
        body["stream_options"] = {"include_usage": True}
    async with aiohttp.ClientSession(
        base_url=chosen.url.rstrip("/") + "/",
        headers={"authorization": f"Bearer {key}"} if key else {},
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None),
    ) as session:
        loop = asyncio.get_running_loop()
        began = loop.time()
        client = LoadClient(session, body, chosen.timeout_s, lambda: loop.time() - began)
        if chosen.users is not None:
            await client.users(chosen.users, _conversations(chosen, trace, rng), chosen.duration_s)
        else:
            due = schedule(trace, chosen.duration_s)
            if chosen.rate is not None:
                conversations = _conversations(chosen, trace, rng)
                due = [(at_s, next(conversations)) for at_s in arrivals(rng, chosen.rate, chosen.duration_s)]
            await client.arrive(due, chosen.duration_s)
    return client.samples


def _conversations(chosen: LoadSettings, trace: tuple[Conversation, ...], rng: random.Random) -> Iterator[Conversation]:
    if trace:
        return itertools.cycle(trace)
    return (made(rng, chosen.turns, chosen.words, chosen.think_s) for _ in itertools.count())


def _print(summary: Summary) -> None:
    console = Console(highlight=False)
    table = Table("seconds", "p50", "p90", "p99", "worst", box=None)
    for name in ("first_token", "total", "between_tokens", "sent_late"):
        found: Percentiles | None = getattr(summary, name)
        if found is not None:
            table.add_row(name.replace("_", " "), *(f"{value:.3f}" for value in msgspec.structs.astuple(found)))
    console.print(table)
    failed = ", ".join(f"{count} x {name}" for name, count in summary.faults.items()) or "none"
    console.print(
        f"{summary.requests} requests in {summary.seconds:.1f} s: {summary.requests_per_s:.2f} whole answers/s, "
        f"{summary.output_tokens_per_s:.1f} output tokens/s; failed: {failed}"
    )
