"""Commands that measure models and router signals on files of rows: evaluate, evaluate-routing.

None of them needs torch.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from causeway_server.models.catalog.artifact import Artifact, ArtifactNotFound, find_artifact
from causeway_server.models.cli.options import folder, models_option, threads_option
from causeway_server.models.llama_cpp.protocol import adapter_files

from ..calibrate.routing_curves import chart
from ..evaluate.report import EvaluationReport
from ..evaluate.routing_table import RoutingSample, mix, points, table
from ..function_calls.call import score_answer
from ..function_calls.dataset import Row, is_held_out, is_validation_row, read_rows
from ..function_calls.intents import is_device_row
from .options import limit_option, rows_argument, spread_evenly

_run = click.option(
    "--run", type=folder, help="Folder in which the models' answers are kept. The next call reuses these answers."
)
_held = click.option(
    "--held-back/--all-rows",
    "held",
    default=False,
    help="--held-back: use only the rows that were held back from training. --all-rows: use all rows.",
)


@click.command()
@rows_argument
@click.option(
    "--model",
    "names",
    multiple=True,
    default=("assistant", "assistant-large"),
    show_default=True,
    help="Model to measure, as MODEL or MODEL+ADAPTER. May be repeated.",
)
@_held
@click.option("--source", help="Set of labels that the rows use (hwu64, snips2017, ...). Default: the file's name.")
@click.option(
    "--grammar/--no-grammar",
    default=False,
    help="--grammar: the model can generate only answers in the form of function calls. --no-grammar: answers are "
    "not constrained.",
)
@limit_option
@threads_option(2)
@click.option(
    "--format",
    "output_format",
    type=click.Choice(["human", "json"]),
    default="human",
    show_default=True,
    help="Format of the output: `human` (tables for people), or `json` (the report).",
)
@models_option
def evaluate(
    files: Sequence[Path],
    names: Sequence[str],
    held: bool,
    source: str | None,
    grammar: bool,
    limit: int | None,
    threads: int,
    output_format: str,
    extra_dirs: Sequence[Path],
) -> None:
    """Let models answer every row of FILES, and print the share of correct answers. FILES have JSON lines with text,
    intent and slots.
    """
    rows = [row for path in files for row in spread_evenly(_selected(read_rows(path, source or ""), held), limit)]
    reports = [_evaluated(name, rows, grammar, threads, extra_dirs, quiet=output_format == "json") for name in names]
    if output_format == "json":
        click.echo(msgspec.json.encode(reports).decode())
        return
    console = Console()
    console.print(_table(reports, "greedy, grammar on" if grammar else "greedy, no grammar"))
    for report in reports:
        if report.refusal_auroc is not None:
            console.print(f"{report.model}: refusal of out-of-domain requests, AUROC {report.refusal_auroc:.3f}")


@click.command("evaluate-routing")
@rows_argument
@_held
@click.option("--device", default="assistant", show_default=True, help="Name of the device's model.")
@click.option("--cloud", default="assistant-large", show_default=True, help="Name of the cloud's model.")
@click.option(
    "--share",
    "shares",
    multiple=True,
    type=click.FloatRange(0, 1),
    default=(0.5, 0.7, 0.8, 0.9, 1.0),
    show_default=True,
    help="Share, 0 to 1, of the requests that are in the domain of the device's model. May be repeated.",
)
@click.option(
    "--after",
    type=click.IntRange(1, 16),
    default=8,
    show_default=True,
    help="Number of tokens after which the handoff is decided.",
)
@click.option("--to", type=folder, help="Folder to which routing.md, routing.csv and routing.svg are also written.")
@_run
@threads_option(1)
@models_option
def evaluate_routing(
    files: Sequence[Path],
    held: bool,
    device: str,
    cloud: str,
    shares: Sequence[float],
    after: int,
    to: Path | None,
    run: Path | None,
    threads: int,
    extra_dirs: Sequence[Path],
) -> None:
    """Measure a pair of models (device and cloud). The report says how much of the cloud model's exact match the pair
    retains if the device answers a given share of the requests.

    Requests in the device's domain are weighted to make up each --share of the traffic. With --held-back, the rows
    that the signals were calibrated on are left out.
    """

    rows = [row for path in files for row in read_rows(path) if not held or _unseen(row)]
    with _answers_folder(run) as answers:
        samples = _samples(
            find_artifact(device, extra_dirs),
            find_artifact(cloud, extra_dirs),
            rows,
            after,
            answers,
            threads,
            extra_dirs,
        )
    names = list(samples[0].signals) if samples else []
    mixes = [mix(samples, share, names) for share in shares]
    text = table(mixes, len(samples))
    click.echo(text)
    if to is not None:
        to.mkdir(parents=True, exist_ok=True)
        shown = min(mixes, key=lambda one: abs(one.domain_share - 0.8))
        title = f"# Routing between {device} and {cloud}\n\n![curve](routing.svg)\n\n"
        (to / "routing.md").write_text(title + text, encoding="utf-8")
        (to / "routing.csv").write_text(points(mixes), encoding="utf-8")
        (to / "routing.svg").write_text(chart(shown.curves, shown.traffic), encoding="utf-8")


def _evaluated(
    name: str, rows: Sequence[Row], grammar: bool, threads: int, folders: Sequence[Path], *, quiet: bool
) -> EvaluationReport:
    from ..evaluate.assistant import evaluate as measure

    model, _, wanted = name.partition("+")
    artifact = find_artifact(model, folders)
    adapter = next((one for one in adapter_files(artifact) if one.name == wanted), None)
    if wanted and adapter is None:
        raise ArtifactNotFound(
            f"{model} has no adapter {wanted!r}. Its adapters: {', '.join(artifact.manifest.adapters)}"
        )
    with _progress(quiet) as progress:
        task = progress.add_task(name, total=len(rows))

        def tick(count: int) -> None:
            progress.advance(task, count)

        report = measure(artifact.path, rows, grammar=grammar, threads=threads, adapter=adapter, tick=tick)
    return msgspec.structs.replace(report, model=name)


def _table(reports: Sequence[EvaluationReport], title: str) -> Table:
    names = (Column("model", no_wrap=True), Column("rows of", no_wrap=True))
    table = Table(*names, "rows", "intent", "exact", "valid", "refused", title=title)
    for report in reports:
        for result in report.results:
            values = (result.intent, result.exact, result.valid, result.refused)
            shares = [f"{100 * share:.1f} %" for share in values]
            table.add_row(report.model, result.group, str(result.rows), *shares)
    return table


def _progress(quiet: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet)


def _samples(
    device: Artifact,
    cloud: Artifact,
    rows: Sequence[Row],
    after: int,
    folder: Path,
    threads: int,
    extra_dirs: Sequence[Path],
) -> list[RoutingSample]:
    from causeway_server.models.catalog.artifact import find_signal
    from causeway_server.models.signals.calibration import ConfidenceCalibrator
    from causeway_server.models.signals.quality import QualityEstimator

    from ..signals.calibration import confidence_at, probability_at
    from ..signals.graded_answers import answer_rows, grade

    quality = QualityEstimator(find_signal("edge.quality", device, extra_dirs).path)
    calibrator = ConfidenceCalibrator.load(find_signal("confidence", device, extra_dirs).path)
    device_answers, cloud_answers = (
        answer_rows(model, rows, folder, threads=threads, progress=_print_progress) for model in (device, cloud)
    )
    graded = grade(rows, device_answers, lambda row: is_device_row(row.source, row.intent))
    return [
        RoutingSample(
            device=score_answer(on_edge.text, row).exact,
            cloud=score_answer(in_cloud.text, row).exact,
            in_domain=one.in_domain,
            signals={
                "edge.quality + confidence": probability_at(calibrator, one, after, quality),
                "confidence": confidence_at(one, after)[0].score,
                "edge.quality": quality(row.text),
                "short prompts": -float(len(row.text)),
            },
        )
        for row, one, on_edge, in_cloud in zip(rows, graded, device_answers, cloud_answers, strict=True)
    ]


def _selected(rows: Sequence[Row], held: bool) -> Sequence[Row]:
    return [row for row in rows if is_validation_row(row)] if held else rows


def _unseen(row: Row) -> bool:
    """Return whether a row was held back both from training and from the calibration of the signals."""
    from ..signals.quality import HALVES

    return is_validation_row(row) and not is_held_out(row.text, HALVES, 0.5)


def _print_progress(text: str) -> None:
    click.echo(text, err=True)


@contextlib.contextmanager
def _answers_folder(run: Path | None) -> Iterator[Path]:
    """Yield `run`, or a temporary folder if there is none."""
    if run is not None:
        yield run
        return
    with tempfile.TemporaryDirectory() as temporary:
        yield Path(temporary)


COMMANDS: tuple[click.Command, ...] = (evaluate, evaluate_routing)
