"""The command `causeway-train distill`: a teacher's endpoint into a pretrained student."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from causeway_server.models.cli.options import existing_file, folder, mebibytes, threads_option, to_option

from ..export.quantize import QUANTISATIONS

_RUN = "Folder for answers, checkpoints and log; a second call resumes."
_COUNT, _SHARE = click.IntRange(1), click.FloatRange(0, 1)


@click.command()
@click.option(
    "--student", type=existing_file, required=True, help="GGUF of the llama or Qwen family, quantised or not."
)
@click.option("--teacher", "url", required=True, help="OpenAI endpoint of the teacher, such as https://host/v1.")
@click.option("--teacher-model", required=True, help="Name of the teacher at its endpoint.")
@click.option("--teacher-key-env", default="", help="Environment variable that holds the endpoint's API key.")
@click.option("--system", type=existing_file, help="File with a system message that the teacher gets, the student not.")
@click.option(
    "--prompts",
    "files",
    multiple=True,
    required=True,
    type=existing_file,
    help='JSON lines with {"prompt": ...}, and "answer" with "metric" if there is a reference. May be repeated.',
)
@click.option("--run", type=folder, required=True, help=_RUN)
@to_option
@click.option("--name", required=True, help="Name of the model.")
@click.option("--samples", type=_COUNT, default=1, show_default=True, help="Answers of the teacher to each prompt.")
@click.option(
    "--agreement",
    type=_SHARE,
    default=0.6,
    show_default=True,
    help="Share of the samples that must agree on an answer without reference.",
)
@click.option(
    "--parallel", type=_COUNT, default=4, show_default=True, help="Prompts that the teacher is asked at a time."
)
@click.option("--longest", type=_COUNT, default=512, show_default=True, help="Tokens of a prompt with its answer.")
@click.option("--minutes", type=float, default=60.0, show_default=True, help="Training time over all resumptions.")
@click.option("--epochs", type=float, default=3.0, show_default=True, help="Passes over the answers.")
@click.option("--rank", type=_COUNT, default=16, show_default=True, help="Rank of the adapter.")
@click.option(
    "--first-layer", type=click.IntRange(0), default=0, show_default=True, help="First layer that has an adapter."
)
@click.option("--learning-rate", type=float, default=1e-3, show_default=True, help="Peak learning rate.")
@click.option("--batch-rows", type=_COUNT, default=32, show_default=True, help="Answers in a batch.")
@click.option(
    "--soft-weight",
    type=_SHARE,
    default=0.5,
    show_default=True,
    help="Weight of the teacher's probabilities against its answer, where it gives them for the student's tokens.",
)
@click.option("--report-minutes", type=float, default=3.0, show_default=True, help="Minutes between checkpoints.")
@click.option(
    "--quantisation",
    type=click.Choice(list(QUANTISATIONS)),
    default="Q4_K_M",
    show_default=True,
    help="Format of the student's weights.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of random choices.")
@threads_option(2)
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
    """Distil a teacher behind an OpenAI endpoint into a pretrained student.

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


COMMANDS: tuple[click.Command, ...] = (distill,)
