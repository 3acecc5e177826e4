"""The commands that make models: train, distill, export, importance, quantize, compare, publish, catalog. Torch is
imported only when one of them needs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click
import msgspec

from ..catalog.gguf import read_gguf
from ..function_calls.catalog import CATALOG, catalog_of, save_catalog
from ..function_calls.dataset import INTENT_SOURCES, Row, is_validation_row, read_rows
from ..function_calls.intents import is_device_row
from .learn import MINILM

_data = click.option(
    "--data", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True, help="Folder with intents/."
)

_importance = click.option(
    "--importance", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="From the command importance."
)


def _pace(command: Callable[..., None]) -> Callable[..., None]:
    """The options of how fast to learn, which train and distill share."""
    options = (
        click.option("--tokens", type=click.IntRange(64), default=6144, show_default=True, help="Padded, per batch."),
        click.option("--matrix-lr", type=float, default=0.01, show_default=True, help="Muon's, for matrices."),
        click.option("--vector-lr", type=float, default=1.5e-3, show_default=True, help="AdamW's, for the rest."),
        click.option("--dropout", type=click.FloatRange(0, 0.9), default=0.1, show_default=True),
        click.option(
            "--pointing",
            type=click.FloatRange(0),
            default=0.3,
            show_default=True,
            help="Weight of the lesson where to look.",
        ),
        click.option(
            "--tagging",
            type=click.FloatRange(0),
            default=0.5,
            show_default=True,
            help="Weight of the lesson which word belongs to which argument.",
        ),
        click.option(
            "--averaged", type=click.FloatRange(0, 1), default=0.998, show_default=True, help="Decay of the mean."
        ),
        click.option("--refusals", type=click.IntRange(0), default=6000, show_default=True, help="In an epoch."),
        click.option("--repeats", type=click.IntRange(1), default=2, show_default=True, help="Of HWU64 in an epoch."),
        click.option("--report-minutes", type=click.FloatRange(0.01), default=3.0, show_default=True),
        click.option("--threads", type=click.IntRange(1), default=2, show_default=True),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _sizes_asked_for(layers: int | None, width: int | None) -> dict[str, int]:
    return {name: size for name, size in (("layers", layers), ("width", width)) if size is not None}


@click.command()
@click.argument("name", type=click.Choice(["assistant", "assistant-large"]))
@_data
@click.option(
    "--run", type=click.Path(file_okay=False, path_type=Path), required=True, help="Checkpoints and log; resumed."
)
@click.option("--minutes", type=float, default=30.0, show_default=True, help="Training time, over all resumptions.")
@click.option("--steps", type=click.IntRange(1), default=1_000_000, help="Stop earlier, after so many steps.")
@click.option("--layers", type=click.IntRange(1), help="Depth; that of --from or --grow-from, or else 4 and 12.")
@click.option("--width", type=click.IntRange(64), help="In the same way, or else 256.")
@click.option("--grow-from", type=click.Path(exists=True, file_okay=False, path_type=Path), help="A shallower run.")
@click.option(
    "--from",
    "start",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A GGUF made here, to go on from; --layers adds to its own.",
)
@click.option(
    "--read-twice/--read-once", default=True, show_default=True, help="The utterance, where --from or nothing says it."
)
@click.option(
    "--encoder",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="ONNX, to learn meanings from, without --minilm.",
)
@click.option(
    "--minilm",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Published files, to make a tutor of that hints at functions and meanings.",
)
@click.option(
    "--hinted", type=click.IntRange(0), default=60_000, show_default=True, help="Of the tutor's hints, in an epoch."
)
@click.option(
    "--share", type=click.FloatRange(0.01, 1), default=1.0, show_default=True, help="Of the large model's rows."
)
@click.option("--seed", type=int, default=1, show_default=True)
@_pace
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
    read_twice: bool,
    encoder: Path | None,
    minilm: Path | None,
    hinted: int,
    share: float,
    seed: int,
    **pace: float,
) -> None:
    """Train one of the two assistants from scratch, or go on from a published one or from a shallower run."""
    from ..train.assistant.run import shape_for
    from ..train.assistant.run import train as begin
    from ..train.assistant.trainer import TrainingPlan

    plan = msgspec.convert(
        {"minutes": minutes, "steps": steps, "seed": seed, "hinted": hinted, "share": share, **pace}, TrainingPlan
    )
    begin(
        name,
        data,
        run,
        plan,
        shape=_sizes_asked_for(layers, width) if start or grow_from else shape_for(name, layers, width or 256),
        grow_from=grow_from,
        start=start,
        read_twice=read_twice,
        encoder=encoder,
        minilm=minilm,
        say=click.echo,
    )


@click.command()
@_data
@click.option(
    "--teacher", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True, help="Its run."
)
@click.option(
    "--run", type=click.Path(file_okay=False, path_type=Path), required=True, help="The student's run; resumed."
)
@click.option("--student", type=click.Path(exists=True, file_okay=False, path_type=Path), help="A run to start from.")
@click.option("--minutes", type=float, default=30.0, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=1_000_000, help="Stop earlier, after so many steps.")
@click.option("--weight", type=click.FloatRange(0, 1), default=0.7, show_default=True, help="Teacher against labels.")
@click.option("--seed", type=int, default=2, show_default=True)
@_pace
def distill(
    data: Path,
    teacher: Path,
    run: Path,
    student: Path | None,
    minutes: float,
    steps: int,
    weight: float,
    seed: int,
    **pace: float,
) -> None:
    """Teach the device's model from the large one: its probabilities on every token, and its answers to unlabelled
    text.
    """
    from ..train.assistant.run import distill as start
    from ..train.assistant.trainer import TrainingPlan

    plan = msgspec.convert(
        {"minutes": minutes, "steps": steps, "seed": seed, "teacher_weight": weight, **pace}, TrainingPlan
    )
    start(data, run, plan, teacher=teacher, student=student, say=click.echo)


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("gguf", type=click.Path(dir_okay=False, path_type=Path))
def export(run: Path, gguf: Path) -> None:
    """Write a run's network, tokenizer and chat template as an F32 GGUF."""
    from ..train.assistant.run import export_run

    export_run(run, gguf)
    click.echo(f"{gguf}: {_mib(gguf.stat().st_size)}")


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
@_data
@click.option("--examples", type=click.IntRange(1), default=4000, show_default=True)
@click.option("--seed", type=int, default=1, show_default=True)
def importance(run: Path, target: Path, data: Path, examples: int, seed: int) -> None:
    """Write how much each column of a run's matrices matters on training examples (.npz), for quantize."""
    from ..train.assistant.run import importance_of

    importance_of(run, data, target, examples, seed)
    click.echo(f"{target}: {_mib(target.stat().st_size)}")


@click.command()
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), required=True, help="For the variants.")
@click.option("--held-back/--all-rows", default=True, show_default=True, help="Only rows that training holds back.")
@click.option("--everywhere", is_flag=True, help="Also rows outside the device's domains.")
@click.option("--limit", type=click.IntRange(1), help="At most so many rows of each file.")
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
@_importance
def compare(
    source: Path,
    files: Sequence[Path],
    work: Path,
    held_back: bool,
    everywhere: bool,
    limit: int | None,
    threads: int,
    importance: Path | None,
) -> None:
    """Exact match and perplexity of the F32 GGUF SOURCE on the rows of FILES, at F32, Q8_0, Q4_0 and Q4_K_M."""
    from ..train.export.compare_precisions import PrecisionResult
    from ..train.export.compare_precisions import compare as measure

    def say(one: PrecisionResult) -> None:
        name = f"{one.kind} weighed" if one.importance else one.kind
        click.echo(
            f"{name:15}{one.size_bytes:>12,} bytes  exact {100 * one.exact:.1f} %  intent {100 * one.intent:.1f} %  "
            f"valid {100 * one.valid:.1f} %  perplexity {one.perplexity:.4f}"
        )

    rows = [row for path in files for row in _of(path, held_back, everywhere)[:limit]]
    click.echo(f"{len(rows)} rows")
    work.mkdir(parents=True, exist_ok=True)
    measure(source, rows, work, importance=importance, threads=threads, say=say)


@click.command()
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--to", default="Q4_0", show_default=True, help="Q4_0, Q8_0, Q4_K_M, Q5_K_M, Q6_K or F16.")
@click.option("--embedding-too", is_flag=True, help="The tied embedding at Q4_0 as well (Q6_K otherwise).")
@_importance
def quantize(source: Path, target: Path, to: str, embedding_too: bool, importance: Path | None) -> None:
    """Quantise a GGUF with llama.cpp."""
    from ..train.export.quantize import quantize as convert

    convert(source, target, to, embedding_too=embedding_too, importance=importance)
    about = read_gguf(target)
    kinds = ", ".join(f"{kind} {count / 1e6:.2f} M" for kind, count in about.tensor_types.items())
    click.echo(f"{target}: {_mib(about.size_bytes)}, parameters by kind: {kinds}")


@click.command()
@click.argument("first", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("second", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--share", type=click.FloatRange(0, 1), default=0.5, show_default=True, help="Of the second.")
def average(first: Path, second: Path, target: Path, share: float) -> None:
    """Average the weights of two F32 GGUFs, the second of which went on from the first."""
    from ..train.export.averaging import average as mix

    mix(first, second, target, share)
    click.echo(f"{target}: {share:g} of {second}, {1.0 - share:g} of {first}")


@click.command()
@click.argument("gguf", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--name", required=True)
@click.option("--to", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder of models.")
@click.option("--report", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="From evaluate --json.")
@click.option("--command", default="", help="How it was made, for the manifest.")
@click.option("--seed", type=int)
@click.option("--note", default="")
@click.option("--minilm", is_flag=True, help="It learnt from all-MiniLM-L6-v2 (train --encoder, --minilm).")
def publish(
    gguf: Path, name: str, to: Path, report: Path | None, command: str, seed: int | None, note: str, minilm: bool
) -> None:
    """Make an artifact of a GGUF trained here: weights, manifest and card with the measured figures."""
    from ..publish.publish import publish_assistant

    also = (MINILM,) if minilm else ()
    artifact = publish_assistant(gguf, name, to, report=report, command=command, seed=seed, note=note, also=also)
    click.echo(f"{artifact.path}: {_mib(artifact.manifest.size_bytes)}")


@click.command()
@_data
@click.option("--to", type=click.Path(dir_okay=False, path_type=Path), default=CATALOG, show_default=True)
def catalog(data: Path, to: Path) -> None:
    """Write the catalogue of functions and arguments that the data's intents make."""
    rows = [row for name in INTENT_SOURCES for row in read_rows(data / "intents" / f"{name}.jsonl")]
    made = catalog_of(row for row in rows if not is_validation_row(row))
    save_catalog(made, to)
    click.echo(f"{to}: {len(made)} functions, {sum(len(one.arguments) for one in made)} arguments")


def _of(path: Path, held_back: bool, everywhere: bool) -> list[Row]:
    kept = [row for row in read_rows(path) if is_validation_row(row) or not held_back]
    return [row for row in kept if everywhere or is_device_row(row.source, row.intent)]


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


COMMANDS: tuple[click.Command, ...] = (
    train,
    distill,
    export,
    average,
    importance,
    quantize,
    compare,
    publish,
    catalog,
)
