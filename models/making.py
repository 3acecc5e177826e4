"""The commands that make models: train, distill, export, quantize, publish, catalog, quality. Torch is imported
only when one of them needs it."""

from __future__ import annotations

from pathlib import Path

import click

from .dataset import INTENT_SOURCES, for_validation, read_rows
from .functions import CATALOG, catalog_of, save_catalog
from .gguf_file import read_gguf
from .publish import publish_signal
from .spec import find_artifact

_data = click.option(
    "--data", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True, help="Folder with intents/."
)


@click.command()
@click.argument("name", type=click.Choice(["assistant", "assistant-large"]))
@_data
@click.option(
    "--run", type=click.Path(file_okay=False, path_type=Path), required=True, help="Checkpoints and log; resumed."
)
@click.option("--minutes", type=float, default=30.0, show_default=True, help="Training time, over all resumptions.")
@click.option("--steps", type=click.IntRange(1), default=1_000_000, help="Stop earlier, after so many steps.")
@click.option("--layers", type=click.IntRange(1), help="Depth; 4 and 12 by default.")
@click.option("--width", type=click.IntRange(64), default=256, show_default=True)
@click.option("--grow-from", type=click.Path(exists=True, file_okay=False, path_type=Path), help="A shallower run.")
@click.option("--seed", type=int, default=1, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
def train(
    name: str,
    data: Path,
    run: Path,
    minutes: float,
    steps: int,
    layers: int | None,
    width: int,
    grow_from: Path | None,
    seed: int,
    threads: int,
) -> None:
    """Train one of the two assistants from scratch, or grow it from a shallower run."""
    from .train.run import shape_for
    from .train.run import train as start
    from .train.trainer import Plan

    plan = Plan(minutes=minutes, steps=steps, seed=seed, threads=threads)
    start(name, data, run, plan, shape=shape_for(name, layers, width), grow_from=grow_from, say=click.echo)


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
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
def distill(
    data: Path,
    teacher: Path,
    run: Path,
    student: Path | None,
    minutes: float,
    steps: int,
    weight: float,
    seed: int,
    threads: int,
) -> None:
    """Teach the device's model from the large one: its probabilities on every token, and its answers to unlabelled
    text.
    """
    from .train.run import distill as start
    from .train.trainer import Plan

    plan = Plan(minutes=minutes, steps=steps, seed=seed, threads=threads, teacher_weight=weight)
    start(data, run, plan, teacher=teacher, student=student, say=click.echo)


@click.command()
@click.argument("run", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("gguf", type=click.Path(dir_okay=False, path_type=Path))
def export(run: Path, gguf: Path) -> None:
    """Write a run's network, tokenizer and chat template as an F32 GGUF."""
    from .train.run import export_run

    export_run(run, gguf)
    click.echo(f"{gguf}: {_mib(gguf.stat().st_size)}")


@click.command()
@click.argument("source", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("target", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--to", default="Q4_0", show_default=True, help="Q4_0, Q8_0, Q4_K_M, Q5_K_M, Q6_K or F16.")
@click.option("--embedding-too", is_flag=True, help="The tied embedding at Q4_0 as well (Q6_K otherwise).")
def quantize(source: Path, target: Path, to: str, embedding_too: bool) -> None:
    """Quantise a GGUF with llama.cpp."""
    from .quantize import quantize as convert

    convert(source, target, to, embedding_too=embedding_too)
    about = read_gguf(target)
    kinds = ", ".join(f"{kind} {count / 1e6:.2f} M" for kind, count in about.tensor_kinds.items())
    click.echo(f"{target}: {_mib(about.size_bytes)}, parameters by kind: {kinds}")


@click.command()
@click.argument("gguf", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--name", required=True)
@click.option("--to", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder of models.")
@click.option("--report", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="From evaluate --json.")
@click.option("--command", default="", help="How it was made, for the manifest.")
@click.option("--seed", type=int)
@click.option("--note", default="")
def publish(gguf: Path, name: str, to: Path, report: Path | None, command: str, seed: int | None, note: str) -> None:
    """Make an artifact of a GGUF trained here: weights, manifest and card with the measured figures."""
    from .publish import publish_assistant

    artifact = publish_assistant(gguf, name, to, report=report, command=command, seed=seed, note=note)
    click.echo(f"{artifact.path}: {_mib(artifact.manifest.size_bytes)}")


@click.command()
@_data
@click.option("--to", type=click.Path(dir_okay=False, path_type=Path), default=CATALOG, show_default=True)
def catalog(data: Path, to: Path) -> None:
    """Write the catalogue of functions and arguments that the data's intents make."""
    rows = [row for name in INTENT_SOURCES for row in read_rows(data / "intents" / f"{name}.jsonl")]
    made = catalog_of(row for row in rows if not for_validation(row))
    save_catalog(made, to)
    click.echo(f"{to}: {len(made)} functions, {sum(len(one.arguments) for one in made)} arguments")


@click.command()
@_data
@click.option(
    "--run", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True, help="The student's."
)
@click.option("--model", default="assistant", show_default=True, help="The published model that the run became.")
@click.option("--name", default="edge-quality", show_default=True)
@click.option("--to", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder of models.")
@click.option("--seed", type=int, default=6, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True)
def quality(data: Path, run: Path, model: str, name: str, to: Path, seed: int, threads: int) -> None:
    """Train the signal edge.quality on what the device's model gets right and wrong."""
    from .train.quality import train_quality

    judged = find_artifact(model, (to,))
    weights = run / "quality.onnx"
    fit = train_quality(data, run, weights, seed=seed, threads=threads, say=click.echo)
    metrics = {"auroc": fit.auroc, "ece": fit.ece, "right": fit.right, "rows": fit.rows}
    artifact = publish_signal(weights, name, to, judged, {key: round(value, 4) for key, value in metrics.items()})
    click.echo(f"{artifact.path}: {artifact.manifest.metrics}")


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


COMMANDS: tuple[click.Command, ...] = (train, distill, export, quantize, publish, catalog, quality)
