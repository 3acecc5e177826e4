"""The command `causeway-cloud plan`: replicas, waiting time and cost of a load, from one measurement."""

from __future__ import annotations

import asyncio
import math
import sys
from pathlib import Path

import aiohttp
import click
import msgspec
from rich.console import Console
from rich.table import Table

from causeway_server.router.errors import ConfigError
from causeway_server.router.serving.process import format_option, option

from ..planning import (
    CapacityPlan,
    ExpectedLoad,
    Lengths,
    MeasuredEndpoint,
    PlanTargets,
    ReplicaMeasurement,
    ReplicaProfile,
    ThroughputPoint,
    lengths_of,
    measure,
    plan,
)


class _LengthsType(click.ParamType[Lengths]):
    """The option type of a length: `300`, `300:0.8` (mean and spread), or a file with one length per line."""

    name = "LENGTHS"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> Lengths:
        text = str(value)
        try:
            if Path(text).is_file():
                return lengths_of([float(line) for line in Path(text).read_text().split()])
            mean, _, cv = text.partition(":")
            return Lengths(float(mean), float(cv) if cv else 1.0)
        except (ValueError, OSError, ConfigError):
            self.fail(f"{text!r}: write MEAN, MEAN:SPREAD, or a file with one length per line.", param, ctx)


class _PointType(click.ParamType[ThroughputPoint]):
    """The option type of a throughput: `8=310` is 310 tokens per second of eight sequences together."""

    name = "SEQUENCES=TOKENS/S"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> ThroughputPoint:
        if isinstance(value, ThroughputPoint):
            return value
        sequences, _, rate = str(value).partition("=")
        try:
            return ThroughputPoint(int(sequences), float(rate))
        except ValueError:
            self.fail(f"{value!r}: write SEQUENCES=TOKENS/S, such as 8=310.", param, ctx)


@click.command(name="plan", context_settings={"help_option_names": ["-h", "--help"]})
@option("--peak-rps", "Requests per second at the peak.", float, required=True)
@option("--prompt", "Prompt tokens: MEAN, MEAN:SPREAD (deviation/mean), or a file.", _LengthsType(), required=True)
@option("--completion", "Answer tokens, in the same forms.", _LengthsType(), required=True)
@option("--prefill", "Prompt tokens per second of one replica.", float)
@option(
    "--decode",
    "Answer tokens per second of one replica, as SEQUENCES=TOKENS/S; repeatable.",
    _PointType(),
    to="points",
    multiple=True,
)
@option("--overhead-ms", "Fixed time per request.", float, 0.0, show_default=False)
@option("--measure", "Instead, measure a replica at this OpenAI URL, which ends in /v1.", to="url")
@option("--model", "Model name, for --measure.", default="assistant-large")
@option("--token", "Bearer token, for --measure.", default="", envvar="CAUSEWAY_TOKEN")
@option(
    "--sequences", "Concurrent sequences for --measure; repeatable.", click.IntRange(min=1), (1, 4, 16), multiple=True
)
@option(
    "--slots",
    "Concurrent sequences of a replica; 0: those of its fastest measured point.",
    click.IntRange(min=0),
    0,
    show_default=False,
)
@option("--utilisation", "Target utilisation at the peak.", float, 0.7)
@option("--spare", "Replicas that may be lost without overload.", click.IntRange(min=0), 1)
@option("--zones", "Number of zones. Above 1, any one zone may be lost.", click.IntRange(min=1), 1)
@option("--usd-per-hour", "Cost of one replica per hour in US dollars.", float, 0.0, show_default=False)
@format_option
def plan_command(
    peak_rps: float,
    prompt: Lengths,
    completion: Lengths,
    prefill: float | None,
    points: tuple[ThroughputPoint, ...],
    overhead_ms: float,
    url: str | None,
    model: str,
    token: str,
    sequences: tuple[int, ...],
    slots: int,
    utilisation: float,
    spare: int,
    zones: int,
    usd_per_hour: float,
    as_json: bool,
) -> None:
    """Compute how many replicas a load needs, and what they cost."""
    try:
        if url is not None:
            measured = asyncio.run(_measured(url, token, model, sequences))
        elif prefill is None or not points:
            raise click.UsageError("--prefill and --decode, or --measure, are required.")
        else:
            measured = ReplicaMeasurement(prefill, points, overhead_ms / 1000.0)
        replica = ReplicaProfile(**msgspec.structs.asdict(measured), slots=slots, usd_per_hour=usd_per_hour)
        targets = PlanTargets(utilisation=utilisation, spare_replicas=spare, zones=zones)
        capacity = plan(ExpectedLoad(peak_rps=peak_rps, prompt=prompt, completion=completion), replica, targets)
    except ConfigError as error:
        click.echo(f"causeway-cloud: {error.message}", err=True)
        sys.exit(2)
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode({"measured": measured, "plan": capacity})).decode())
    else:
        _show(capacity, measured, zones)


async def _measured(url: str, token: str, model: str, sequences: tuple[int, ...]) -> ReplicaMeasurement:
    """Measure a replica. Raises ConfigError."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    async with aiohttp.ClientSession(headers=headers) as session:
        return await measure(MeasuredEndpoint(session, url, model), sequences)


def _show(capacity: CapacityPlan, measured: ReplicaMeasurement, zones: int) -> None:
    table = Table("", "", show_header=False)
    points = ", ".join(f"{point.tokens_per_s:.0f} at {point.sequences}" for point in measured.decode)
    rates = f"prefill {measured.prefill_tokens_per_s:.0f} tokens/s; decode {points}"
    rates += f"; {_time(measured.overhead_s)} per request"
    spread = f", {capacity.per_zone} in each of {zones} zones" if zones > 1 else ""
    mean = _time(capacity.wait_mean_s)
    for name, value in (
        ("a replica, measured", rates),
        (
            "a request",
            f"{capacity.request_s * 1000:.1f} ms of a replica's time: at most {capacity.replica_rps:.2f} requests/s",
        ),
        ("replicas", f"[bold]{capacity.replicas}[/bold]{spread} ({capacity.needed} without redundancy)"),
        ("concurrency of the tier", f"{capacity.slots}, the slots of one replica"),
        (
            "utilisation at the peak",
            f"{capacity.utilisation:.0%}, or {capacity.utilisation_after_loss:.0%} after a loss",
        ),
        ("waiting at the peak", f"{capacity.wait_probability:.1%} wait; mean {mean}, p99 {_time(capacity.wait_p99_s)}"),
        ("cost", f"{capacity.usd_per_hour:.2f} USD/h, {capacity.usd_per_month:.0f} USD/month"),
        ("a million tokens", f"{capacity.usd_per_million_tokens:.2f} USD, at peak load all day"),
    ):
        table.add_row(name, value)
    Console().print(table)


def _time(seconds: float) -> str:
    return "unbounded" if math.isinf(seconds) else f"{seconds * 1000:.0f} ms"
