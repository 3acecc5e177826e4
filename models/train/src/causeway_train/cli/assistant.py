"""Commands that train the assistants: train, distill-assistant, export, average, importance, importance-gguf, quantize,
compare, publish, catalog.

torch is imported only when one of them needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click
import msgspec

from causeway_server.models.catalog.gguf import read_gguf
from causeway_server.models.cli.catalog import context_option
from causeway_server.models.cli.compare import gate_options, make_gate
from causeway_server.models.cli.options import (
    existing_file,
    existing_folder,
    file,
    folder,
    mebibytes,
    threads_option,
    to_option,
)

from ..function_calls.catalog import CATALOG, catalog_of, save_catalog
from ..function_calls.dataset import INTENT_SOURCES, Row, is_validation_row, read_rows
from ..function_calls.intents import is_device_row
from .options import data_option, rows_argument
from .signals import MINILM

_importance = click.option(
    "--importance", type=existing_file, help="File with an importance matrix, as the command `importance` writes it."
)
_steps = click.option(
    "--steps", type=click.IntRange(1), default=1_000_000, help="Number of steps after which the training stops."
)
_minutes = click.option(
    "--minutes", type=float, default=30.0, show_default=True, help="Total training time in minutes, over all calls."
)
_run = click.option(
    "--run",
    type=folder,
    required=True,
    help="Folder for checkpoints and the log. A second call with this folder resumes the run.",
)
_WEIGHT, _COUNT = click.FloatRange(0), click.IntRange(0)


def _schedule(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of the training schedule, which train and distill share."""
    options = (
        ("--batch-tokens", click.IntRange(64), 6144, "Number of tokens in a batch, including padding."),
        ("--matrix-lr", float, 0.01, "Learning rate of the optimiser Muon, which trains the matrices."),
        (
            "--vector-lr",
            float,
            1.5e-3,
            "Learning rate of the optimiser AdamW, which trains all weights other than matrices.",
        ),
        ("--dropout", click.FloatRange(0, 0.9), 0.1, "Dropout rate of the residual channels."),
        ("--attention-weight", _WEIGHT, 0.3, "Weight of the supervised-attention loss in the total loss."),
        ("--tagging-weight", _WEIGHT, 0.5, "Weight of the slot-tagging loss in the total loss."),
        ("--ema-decay", click.FloatRange(0, 1), 0.998, "Decay, per step, of the moving average of the weights."),
        ("--refusals", _COUNT, 6000, "Number of examples, in each epoch, that teach the model to refuse a request."),
        (
            "--hwu64-repeats",
            click.IntRange(1),
            2,
            "Number of times that each row of the data set HWU64 occurs in an epoch.",
        ),
        ("--report-minutes", click.FloatRange(0.01), 3.0, "Time between two checkpoints and reports, in minutes."),
    )
    for name, kind, default, text in reversed(options):
        command = click.option(name, type=kind, default=default, show_default=True, help=text)(command)
    return threads_option(2)(command)


@click.command()
@click.argument("name", type=click.Choice(["assistant", "assistant-large"]))
@data_option
@_run
@_minutes
@_steps
@click.option(
    "--layers",
    type=click.IntRange(1),
    help="Number of layers. Default: the number in --from or --grow-from; without these options, 4 "
    "(assistant) or 12 (assistant-large).",
)
@click.option(
    "--width",
    type=click.IntRange(64),
    help="Width of the network. Default: the width in --from or --grow-from; without these options, 256.",
)
@click.option(
    "--grow-from",
    type=existing_folder,
    help="Folder of a run with fewer layers. The weights of this run initialise the new network.",
)
@click.option(
    "--from",
    "start",
    type=existing_file,
    help="GGUF file that causeway-train exported. The weights of this file initialise the new network. --layers "
    "may be greater than the number of layers in this file.",
)
@click.option(
    "--repeat-prompt/--single-prompt",
    default=True,
    show_default=True,
    help="--repeat-prompt: the chat template repeats the last message. --single-prompt: the chat "
    "template does not repeat the last message. The option applies to a new run and to --from.",
)
@click.option(
    "--encoder",
    type=existing_file,
    help="ONNX file of the sentence encoder for the embedding loss. Used without --minilm.",
)
@click.option(
    "--minilm",
    type=existing_folder,
    help="Folder with the published files of MiniLM. First the command trains MiniLM on the rows, to recognise "
    "functions. Then the network learns from MiniLM's soft labels and embeddings.",
)
@click.option(
    "--soft-labels",
    type=_COUNT,
    default=60_000,
    show_default=True,
    help="Number of texts with soft labels in an epoch. Used with --minilm.",
)
@click.option(
    "--row-share",
    type=click.FloatRange(0.01, 1),
    default=1.0,
    show_default=True,
    help="Share, 0 to 1, of the rows that an epoch uses. Applies to assistant-large only.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed for random choices.")
@_schedule
def train(
    name: str,
    data: Path,
    run: Path,
    minutes: float,
    steps: int,
    layers: int | None,
    width: int | None,
    grow_from: Path | None,
    start: Path | None,
    repeat_prompt: bool,
    encoder: Path | None,
    minilm: Path | None,
    soft_labels: int,
    row_share: float,
    seed: int,
    **schedule: float,
) -> None:
    """Train one of the two assistant models. The training begins from scratch, from a published GGUF file, or from a
    run with fewer layers.
    """
    from ..assistant.run import shape_for
    from ..assistant.run import train as start_training
    from ..assistant.trainer import TrainingPlan

    settings = {"minutes": minutes, "steps": steps, "seed": seed, "soft_labels": soft_labels, "row_share": row_share}
    sizes = {key: size for key, size in (("layers", layers), ("width", width)) if size is not None}
    start_training(
        name,
        data,
        run,
        msgspec.convert({**settings, **schedule}, TrainingPlan),
        shape=sizes if start or grow_from else shape_for(name, layers, width or 256),
        grow_from=grow_from,
        start=start,
        repeat_prompt=repeat_prompt,
        encoder=encoder,
        minilm=minilm,
        progress=click.echo,
    )


@click.command("distill-assistant")
@data_option
@click.option(
    "--teacher", type=existing_folder, required=True, help="Folder of the run in which the teacher was trained."
)
@_run
@click.option("--student", type=existing_folder, help="Folder of a run whose network initialises the student.")
@_minutes
@_steps
@click.option(
    "--weight",
    type=click.FloatRange(0, 1),
    default=0.7,
    show_default=True,
    help="Weight, 0 to 1, of the teacher's probabilities; the rest is the weight of the labels.",
)
@click.option("--seed", type=int, default=2, show_default=True, help="Seed for random choices.")
@_schedule
def distill_assistant(
    data: Path,
    teacher: Path,
    run: Path,
    student: Path | None,
    minutes: float,
    steps: int,
    weight: float,
    seed: int,
    **schedule: float,
) -> None:
    """Train the device's model on the large model, the teacher (distillation). The device's model learns from the
    teacher's probabilities for every token, and from the teacher's answers to unlabelled texts (pseudo-labels).
    """
    from ..assistant.run import distill as start_training
    from ..assistant.trainer import TrainingPlan

    settings = {"minutes": minutes, "steps": steps, "seed": seed, "teacher_weight": weight}
    plan = msgspec.convert({**settings, **schedule}, TrainingPlan)
    start_training(data, run, plan, teacher=teacher, student=student, progress=click.echo)


@click.command()
@click.argument("run", type=existing_folder)
@click.argument("gguf", type=file)
def export(run: Path, gguf: Path) -> None:
    """Write the network, the tokenizer and the chat template of the training run in the folder RUN to the F32 file
    GGUF.
    """
    from ..assistant.run import export_run

    export_run(run, gguf)
    click.echo(f"{gguf}: {mebibytes(gguf.stat().st_size)}")


@click.command()
@click.argument("run", type=existing_folder)
@click.argument("target", type=file)
@data_option
@click.option(
    "--examples",
    type=click.IntRange(1),
    default=4000,
    show_default=True,
    help="Number of training examples that are used.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed for random choices.")
def importance(run: Path, target: Path, data: Path, examples: int, seed: int) -> None:
    """Write the importance matrix of the training run in the folder RUN to TARGET (.npz), for the command `quantize`.
    The matrix has the mean squared input of each column of each weight matrix.
    """
    from ..assistant.run import write_importance

    write_importance(run, data, target, examples, seed)
    click.echo(f"{target}: {mebibytes(target.stat().st_size)}")


@click.command("importance-gguf")
@click.argument("source", type=existing_file)
@click.argument("target", type=file)
@click.option(
    "--prompts",
    "files",
    multiple=True,
    required=True,
    type=existing_file,
    help="File of prompts in the same form as for `causeway-models compare`. May be repeated.",
)
@threads_option(2)
def importance_gguf(source: Path, target: Path, files: Sequence[Path], threads: int) -> None:
    """Write the importance matrix of the GGUF file SOURCE to TARGET (.npz), for the command `quantize`. llama.cpp
    measures the matrix on the texts of the prompts.
    """
    import numpy as np

    from causeway_server.models.comparison.prompts import read_prompts

    from ..export.activations import importance_of

    texts = [f"{one.question} {one.answer or ''}" for one in read_prompts(files)]
    np.savez(target, allow_pickle=False, **importance_of(source, texts, threads=threads))
    click.echo(f"{target}: {mebibytes(target.stat().st_size)}")


@click.command()
@click.argument("source", type=existing_file)
@rows_argument
@click.option("--work", type=folder, required=True, help="Folder to which the quantised variants are written.")
@click.option(
    "--held-back/--all-rows",
    default=True,
    show_default=True,
    help="--held-back: use only the rows that were held back from training. --all-rows: use all rows.",
)
@click.option("--all-domains", is_flag=True, help="Also use rows that are outside the domain of the device's model.")
@click.option("--limit", type=click.IntRange(1), help="Maximum number of rows that the command uses from each file.")
@threads_option(2)
@_importance
def compare(
    source: Path,
    files: Sequence[Path],
    work: Path,
    held_back: bool,
    all_domains: bool,
    limit: int | None,
    threads: int,
    importance: Path | None,
) -> None:
    """Measure exact match and perplexity of the model SOURCE on the rows in FILES. SOURCE is an F32 GGUF file. The
    model is measured in the formats F32, Q8_0, Q4_0 and Q4_K_M.
    """
    from ..export.compare_precisions import PrecisionResult
    from ..export.compare_precisions import compare as measure

    def print_result(result: PrecisionResult) -> None:
        name = f"{result.kind} imatrix" if result.importance else result.kind
        click.echo(
            f"{name:15}{result.size_bytes:>12,} bytes  exact {100 * result.exact:.1f} %  "
            f"intent {100 * result.intent:.1f} %  valid {100 * result.valid:.1f} %  perplexity {result.perplexity:.4f}"
        )

    rows = [row for path in files for row in _selected(path, held_back, all_domains)[:limit]]
    click.echo(f"{len(rows)} rows")
    work.mkdir(parents=True, exist_ok=True)
    measure(source, rows, work, importance=importance, threads=threads, on_result=print_result)


@click.command()
@click.argument("source", type=existing_file)
@click.argument("target", type=file)
@click.option(
    "--to", default="Q4_0", show_default=True, help="Format of the weights: Q4_0, Q8_0, Q4_K_M, Q5_K_M, Q6_K or F16."
)
@click.option(
    "--embedding-too", is_flag=True, help="Quantise the tied embedding to Q4_0, too. Default: Q6_K for this embedding."
)
@_importance
def quantize(source: Path, target: Path, to: str, embedding_too: bool, importance: Path | None) -> None:
    """Quantise the GGUF file SOURCE with llama.cpp, and write the result to TARGET."""
    from ..export.quantize import quantize as convert

    convert(source, target, to, embedding_too=embedding_too, importance=importance)
    gguf = read_gguf(target)
    kinds = ", ".join(f"{kind} {count / 1e6:.2f} M" for kind, count in gguf.tensor_types.items())
    click.echo(f"{target}: {mebibytes(gguf.size_bytes)}, parameters by type: {kinds}")


@click.command()
@click.argument("first", type=existing_file)
@click.argument("second", type=existing_file)
@click.argument("target", type=file)
@click.option(
    "--share",
    type=click.FloatRange(0, 1),
    default=0.5,
    show_default=True,
    help="Share of SECOND in the average, 0 to 1. FIRST has the rest.",
)
def average(first: Path, second: Path, target: Path, share: float) -> None:
    """Average the weights of the F32 GGUF files FIRST and SECOND, and write the result to TARGET. SECOND must have been
    trained from FIRST.
    """
    from ..export.averaging import average as write_average

    write_average(first, second, target, share)
    click.echo(f"{target}: {second} has the share {share:g} in the average, {first} the share {1.0 - share:g}")


@click.command()
@click.argument("gguf", type=existing_file)
@click.option("--name", required=True, help="Name of the model.")
@to_option
@click.option("--report", type=existing_file, help="File with the output of `evaluate --format json`.")
@click.option("--command", default="", help="Command that made the model, as the manifest shows it.")
@click.option("--seed", type=int, help="Seed of the training, as the manifest shows it.")
@click.option("--note", default="", help="Remark that is added to the manifest and the card.")
@click.option(
    "--minilm",
    is_flag=True,
    help="Attribute MiniLM as a source. Use this option for a model that was trained with --minilm or --encoder.",
)
@gate_options
@context_option
def publish(
    gguf: Path,
    name: str,
    to: Path,
    report: Path | None,
    command: str,
    seed: int | None,
    note: str,
    minilm: bool,
    against: str | None,
    prompt_files: Sequence[Path],
    limits: Sequence[str],
    context: int,
) -> None:
    """Publish the file GGUF, which causeway-train trained, as an artifact: the weights, a manifest, and a card with the
    measured figures.
    """
    from ..publish import publish_assistant

    teachers = (MINILM,) if minilm else ()
    gate = make_gate(against, prompt_files, limits, (to,), context)
    artifact = publish_assistant(
        gguf, name, to, report=report, command=command, seed=seed, note=note, teachers=teachers, gate=gate
    )
    click.echo(f"{artifact.path}: {mebibytes(artifact.manifest.size_bytes)}")


@click.command()
@data_option
@click.option("--to", type=file, default=CATALOG, show_default="the shipped catalogue", help="File to write.")
def catalog(data: Path, to: Path) -> None:
    """Write the catalogue of the functions and arguments that the intents in the data define."""
    rows = [row for name in INTENT_SOURCES for row in read_rows(data / "intents" / f"{name}.jsonl")]
    entries = catalog_of(row for row in rows if not is_validation_row(row))
    save_catalog(entries, to)
    click.echo(f"{to}: {len(entries)} functions, {sum(len(one.arguments) for one in entries)} arguments")


def _selected(path: Path, held_back: bool, all_domains: bool) -> list[Row]:
    rows = [row for row in read_rows(path) if is_validation_row(row) or not held_back]
    return [row for row in rows if all_domains or is_device_row(row.source, row.intent)]


COMMANDS: tuple[click.Command, ...] = (
    train,
    distill_assistant,
    export,
    average,
    importance,
    importance_gguf,
    quantize,
    compare,
    publish,
    catalog,
)
