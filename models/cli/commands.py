"""`causeway-models`: make, measure, check and add models. The training steps need the extra `train`; the others do
not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table

from ..catalog import fit as memory
from ..catalog.artifact import SHIPPED, ArtifactError, find_artifact, list_artifacts, verify_artifact
from ..catalog.gguf import read_gguf
from ..evaluate.report import EvaluationReport
from ..function_calls.dataset import Row, is_validation_row, read_rows
from ..publish.add import add_model
from . import learn, make, measure

OWN_MODELS = Path(os.environ.get("XDG_DATA_HOME", "~/.local/share")).expanduser() / "causeway" / "models"
console = Console()

_extra = click.option(
    "--models", "extra", multiple=True, type=click.Path(file_okay=False, path_type=Path), help="More folders of models."
)


class _Commands(click.Group):
    """Errors of ours are told in one line, not as a traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except ArtifactError as error:
            raise click.ClickException(str(error)) from error
        except ModuleNotFoundError as error:
            if error.name in ("torch", "tokenizers"):
                raise click.ClickException(f"{error.name} is not installed: pip install 'causeway[train]'") from error
            raise


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Make, measure, check and add models."""


@main.command("list")
@_extra
def list_command(extra: Sequence[Path]) -> None:
    """The models that can be named in a policy."""
    table = Table(
        *(Column(name, no_wrap=True) for name in ("name", "kind", "bits", "weights", "size", "licence")), box=None
    )
    for artifact in list_artifacts(_folders(extra)):
        about = artifact.manifest
        table.add_row(
            artifact.name,
            about.architecture if about.format == "gguf" else about.format,
            about.quantisation,
            f"{about.parameters / 1e6:.1f} M" if about.parameters else "",
            _mib(about.size_bytes),
            about.licence,
        )
    console.print(table)
    console.print(f"looked in: {', '.join(map(str, (*_folders(extra), SHIPPED)))}", soft_wrap=True, style="dim")


@main.command()
@click.argument("names", nargs=-1)
@_extra
def verify(names: Sequence[str], extra: Sequence[Path]) -> None:
    """Re-hash the weights of all models, or of those named; exit 1 if one is altered or missing."""
    folders = _folders(extra)
    chosen = [find_artifact(name, folders) for name in names] if names else list_artifacts(folders)
    broken = 0
    for artifact in chosen:
        try:
            verify_artifact(artifact)
            console.print(f"[green]ok[/]      {artifact.name}  {artifact.manifest.sha256[:16]}")
        except ArtifactError as error:
            broken += 1
            console.print(f"[red]broken[/]  {artifact.name}  {error}")
    if broken:
        raise SystemExit(1)


@main.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--name", help="How policies name it; from the file's name by default.")
@click.option("--to", type=click.Path(file_okay=False, path_type=Path), default=OWN_MODELS, show_default=True)
@click.option("--device", type=click.Choice(sorted(memory.DEVICES)), default="this-machine", show_default=True)
@click.option("--context", type=click.IntRange(1), default=2048, show_default=True, help="Tokens per sequence.")
@click.option("--batch", type=click.IntRange(1), default=4, show_default=True, help="Sequences at once.")
@click.option("--force", is_flag=True, help="Add it even if it does not fit the device's memory.")
@click.option("--calls", is_flag=True, help="It answers with calls, as the models that ship do: hold it to their form.")
def add(
    file: Path, name: str | None, to: Path, device: str, context: int, batch: int, force: bool, calls: bool
) -> None:
    """Check a GGUF or ONNX FILE that you bring, and make it usable by name."""
    added = add_model(
        file,
        to,
        name=name,
        device=memory.DEVICES[device],
        context=context,
        batch=batch,
        force=force,
        answers="calls" if calls else "text",
    )
    for note in added.notes:
        console.print(f"[yellow]note[/]  {note}")
    console.print(f"added {added.artifact.name}: {added.artifact.path}")


@main.command("fit")
@click.argument("model")
@click.option("--context", type=click.IntRange(1), default=2048, show_default=True, help="Tokens per sequence.")
@click.option("--batch", type=click.IntRange(1), default=4, show_default=True, help="Sequences at once.")
@_extra
def fit_command(model: str, context: int, batch: int, extra: Sequence[Path]) -> None:
    """How much memory MODEL (a name or a GGUF file) needs, and which devices hold it."""
    path = Path(model) if Path(model).is_file() else find_artifact(model, _folders(extra)).path
    need = memory.estimate_memory(read_gguf(path), context=context, batch=batch)
    console.print(
        f"{model}: weights {_mib(need.weights_bytes)}, KV cache {_mib(need.cache_bytes)}, "
        f"buffers {_mib(need.buffers_bytes)}, together {_mib(need.total_bytes)}"
    )
    table = Table("device", "usable memory", "fits", "largest batch at this context")
    for device in memory.DEVICES.values():
        most = memory.largest_batch(read_gguf(path), device, context)
        table.add_row(device.name, _mib(device.usable_bytes), "yes" if most >= batch else "no", str(most))
    console.print(table)


@main.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--model", "names", multiple=True, default=("assistant", "assistant-large"), show_default=True)
@click.option("--held-back/--all-rows", default=False, help="Only the rows that training holds back.")
@click.option("--source", help="Whose labels these are (hwu64, snips2017, …); the file's name by default.")
@click.option("--grammar/--no-grammar", default=False, help="Force answers to be a call in JSON.")
@click.option("--limit", type=click.IntRange(1), help="At most so many rows of each file, spread evenly.")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@_extra
def evaluate(
    files: Sequence[Path],
    names: Sequence[str],
    held_back: bool,
    source: str | None,
    grammar: bool,
    limit: int | None,
    threads: int,
    as_json: bool,
    extra: Sequence[Path],
) -> None:
    """Answer every row of FILES (JSON lines: text, intent, slots) with llama.cpp and print how many are right."""
    rows = [row for path in files for row in _chosen(read_rows(path, source or ""), held_back, limit)]
    reports = [_measured(name, rows, grammar, threads, _folders(extra), quiet=as_json) for name in names]
    if as_json:
        click.echo(msgspec.json.encode(reports).decode())
        return
    console.print(_table(reports, "greedy, grammar on" if grammar else "greedy, no grammar"))
    for report in reports:
        if report.refusal_auroc is not None:
            console.print(f"{report.model}: turns away others rather than its own, AUROC {report.refusal_auroc:.3f}")


def _measured(
    name: str, rows: Sequence[Row], grammar: bool, threads: int, folders: Sequence[Path], *, quiet: bool
) -> EvaluationReport:
    from ..evaluate.assistant import evaluate as measure

    artifact = find_artifact(name, folders)
    with _progress(quiet) as progress:
        task = progress.add_task(name, total=len(rows))

        def tick(count: int) -> None:
            progress.advance(task, count)

        report = measure(artifact.path, rows, grammar=grammar, threads=threads, tick=tick)
    return msgspec.structs.replace(report, model=name)


def _table(reports: Sequence[EvaluationReport], title: str) -> Table:
    table = Table(
        Column("model", no_wrap=True),
        Column("rows of", no_wrap=True),
        "rows",
        "intent",
        "exact",
        "valid",
        "refused",
        title=title,
    )
    for report in reports:
        for one in report.results:
            shares = [f"{100 * share:.1f} %" for share in (one.intent, one.exact, one.valid, one.refused)]
            table.add_row(report.model, one.group, str(one.rows), *shares)
    return table


def _folders(extra: Sequence[Path]) -> tuple[Path, ...]:
    return (*extra, OWN_MODELS)


def _chosen(rows: Sequence[Row], held_back: bool, limit: int | None) -> Sequence[Row]:
    kept = [row for row in rows if is_validation_row(row)] if held_back else list(rows)
    if limit is None or len(kept) <= limit:
        return kept
    return [kept[index * len(kept) // limit] for index in range(limit)]


def _progress(quiet: bool) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=quiet)


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count < 2**30 else f"{count / 2**30:.1f} GiB"


for _command in (*make.COMMANDS, *learn.COMMANDS, *measure.COMMANDS):
    main.add_command(_command)
