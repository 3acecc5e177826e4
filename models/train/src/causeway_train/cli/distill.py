"""Commands that train a pretrained student: `distill` on a teacher's answers, `train-adapter` on labelled rows."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import msgspec

from causeway_server.models.cli.options import existing_file, folder, mebibytes, threads_option, to_option

from ..export.quantize import QUANTISATIONS
from .options import data_option

_RUN = "Folder for answers, checkpoints and the log. A second call with this folder resumes the run."
_COUNT, _SHARE = click.IntRange(1), click.FloatRange(0, 1)


_student = click.option(
    "--student",
    type=existing_file,
    required=True,
    help="GGUF file of the student, a model of the llama or Qwen family, quantised or not.",
)


def _schedule(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of an adapter's shape and training."""
    options: tuple[tuple[str, click.ParamType | type, float, str], ...] = (
        ("--minutes", float, 60.0, "Total training time in minutes, over all calls."),
        ("--epochs", float, 3.0, "Number of passes over the answers."),
        ("--rank", _COUNT, 16, "Rank of the adapter."),
        (
            "--first-layer",
            click.IntRange(0),
            0,
            "First layer that gets an adapter. Lower layers are computed only once for each answer.",
        ),
        ("--learning-rate", float, 1e-3, "Highest learning rate of the adapter's matrices A."),
        (
            "--b-ratio",
            float,
            1.0,
            "Learning rate of the adapter's matrices B, as a multiple of the learning rate of the matrices A.",
        ),
        ("--batch-rows", _COUNT, 32, "Number of answers in a batch."),
        ("--report-minutes", float, 3.0, "Time between two checkpoints, in minutes."),
        ("--seed", int, 1, "Seed for random choices."),
    )
    for name, kind, default, text in reversed(options):
        command = click.option(name, type=kind, default=default, show_default=True, help=text)(command)
    return threads_option(2)(command)


@click.command()
@_student
@click.option("--teacher", "url", required=True, help="URL of the teacher's OpenAI endpoint, such as https://host/v1.")
@click.option("--teacher-model", required=True, help="Name of the teacher's model at its endpoint.")
@click.option("--teacher-key-env", default="", help="Name of the environment variable that has the endpoint's API key.")
@click.option(
    "--system",
    type=existing_file,
    help="File with a system message that is sent to the teacher, but is not part of the student's prompts.",
)
@click.option(
    "--prompts",
    "files",
    multiple=True,
    required=True,
    type=existing_file,
    help='File of prompts: JSON lines with {"prompt": ...}, and also "answer" and "metric" if a prompt has '
    "a reference answer. May be repeated.",
)
@click.option("--run", type=folder, required=True, help=_RUN)
@to_option
@click.option("--name", required=True, help="Name of the model.")
@click.option(
    "--samples",
    type=_COUNT,
    default=1,
    show_default=True,
    help="Number of answers that the teacher gives to each prompt (samples).",
)
@click.option(
    "--agreement",
    type=_SHARE,
    default=0.6,
    show_default=True,
    help="Share of the teacher's samples that must agree on an answer if the prompt has no reference answer.",
)
@click.option(
    "--parallel",
    type=_COUNT,
    default=4,
    show_default=True,
    help="Number of prompts that are sent to the teacher at the same time.",
)
@click.option(
    "--longest",
    type=_COUNT,
    default=512,
    show_default=True,
    help="Maximum number of tokens of a prompt with its answer.",
)
@click.option(
    "--soft-weight",
    type=_SHARE,
    default=0.5,
    show_default=True,
    help="Weight, 0 to 1, of the teacher's probabilities; the rest is the weight of the teacher's answer. "
    "For a token without probabilities from the teacher, only the teacher's answer counts.",
)
@click.option(
    "--quantisation",
    type=click.Choice(list(QUANTISATIONS)),
    default="Q4_K_M",
    show_default=True,
    help="Format of the published student's weights.",
)
@_schedule
def distill(
    student: Path,
    url: str,
    teacher_model: str,
    teacher_key_env: str,
    system: Path | None,
    files: Sequence[Path],
    run: Path,
    to: Path,
    name: str,
    samples: int,
    agreement: float,
    parallel: int,
    longest: int,
    quantisation: str,
    **schedule: float,
) -> None:
    """Train a pretrained student on the answers of a teacher, a model behind an OpenAI endpoint (distillation).

    The teacher answers the prompts. Answers that the reference or the teacher's own samples agree with train a LoRA
    adapter, on every token also with the teacher's probabilities where it gives them. The adapter is merged into the
    student, which is quantised with an importance matrix, compared with the student on a tenth of the prompts, held
    back, calibrated beside the teacher and published with a card. The adapter alone stays in the run's folder.
    """
    from causeway_server.models.comparison.prompts import read_prompts

    from ..distill.run import DistillPlan
    from ..distill.run import distill as start
    from ..distill.teacher import TeacherSettings
    from ..distill.trainer import AdapterPlan

    plan = DistillPlan(
        student=student,
        url=url,
        teacher=TeacherSettings(teacher_model, samples, system.read_text(encoding="utf-8") if system else ""),
        key=os.environ.get(teacher_key_env, ""),
        run=run,
        to=to,
        name=name,
        quantisation=quantisation,
        longest=longest,
        least_agreement=agreement,
        parallel=parallel,
        adapter=msgspec.convert(schedule, AdapterPlan),
        command=shlex.join(["causeway-train", *sys.argv[1:]]),
    )
    artifact = start(plan, read_prompts(files), click.echo)
    click.echo(f"published {artifact.path}: {mebibytes(artifact.manifest.size_bytes)}")


@click.command("train-adapter")
@_student
@data_option
@click.option(
    "--run",
    type=folder,
    required=True,
    help="Folder for checkpoints and the log. A second call with this folder resumes the run.",
)
@click.option("--name", default="commands", show_default=True, help="Name of the adapter.")
@click.option(
    "--hwu64-repeats",
    type=_COUNT,
    default=2,
    show_default=True,
    help="Number of examples that the command makes from each row of the data set HWU64.",
)
@click.option(
    "--refusals",
    type=click.IntRange(0),
    default=1000,
    show_default=True,
    help="Number of examples that teach the model to refuse a request.",
)
@_schedule
def train_adapter(
    student: Path, data: Path, run: Path, name: str, hwu64_repeats: int, refusals: int, **schedule: float
) -> None:
    """Train an adapter for a pretrained student. With the adapter the student answers with the device's function calls.

    Each report writes RUN/adapter.gguf, for `causeway-models add-adapter MODEL RUN/adapter.gguf --calls`.
    """
    from ..data.corpus import Corpus
    from ..distill.adapter import write_adapter
    from ..distill.calls import call_examples
    from ..distill.network import Student
    from ..distill.run import ADAPTER
    from ..distill.trainer import AdapterPlan, AdapterTrainer, Progress

    plan = msgspec.convert(schedule, AdapterPlan)
    examples = call_examples(Corpus.read(data), student, hwu64_repeats=hwu64_repeats, refusals=refusals, seed=plan.seed)
    made = Student(student, plan.rank, plan.first_layer, seed=plan.seed)
    trainer = AdapterTrainer(made, plan, run, examples.vocabulary)
    click.echo(f"{len(examples.learned)} answers are learned")
    if trainer.resume():
        click.echo(f"The training resumes at step {trainer.step}.")

    def report(line: Progress) -> None:
        click.echo(line.text)
        with trainer.averaged():
            write_adapter(made, run / ADAPTER, name)

    trainer.run(examples.learned, examples.held, report)


COMMANDS: tuple[click.Command, ...] = (distill, train_adapter)
