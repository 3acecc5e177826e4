"""The command `causeway-models calibrate`: it learns for a pair of models when the small one is good enough."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click

from causeway_server.models.catalog.artifact import Artifact, ArtifactNotFound, find_artifact
from causeway_server.models.cli.options import (
    existing_file,
    existing_folder,
    folder,
    models_option,
    threads_option,
    to_option,
)


@click.command()
@click.option("--small", required=True, help="Small model, which runs on the device.")
@click.option(
    "--large",
    required=True,
    help="Large model, which runs in the cloud: the name of a model on this machine, or of a model at --large-url.",
)
@click.option("--large-url", default="", help="URL of the large model's OpenAI endpoint, such as https://host/v1.")
@click.option("--large-key-env", default="", help="Name of the environment variable that has the endpoint's API key.")
@click.option(
    "--judge",
    default="",
    help="Model (the judge) that compares the answers of both models if a prompt has no reference answer.",
)
@click.option(
    "--judge-url",
    default="",
    help="URL of the judge's OpenAI endpoint. The API key of --large-key-env is used for this endpoint, too.",
)
@click.option(
    "--prompts",
    "files",
    multiple=True,
    type=existing_file,
    help='File of prompts: JSON lines with {"prompt": ...}, and also "answer" and "metric" if a prompt has '
    "a reference answer. May be repeated.",
)
@click.option(
    "--from-shadow",
    "state_dir",
    type=existing_folder,
    help="State folder of a daemon. The signals are fitted on the comparisons that the daemon recorded for "
    "shadow requests; no model is asked.",
)
@click.option(
    "--run-dir", type=folder, help="Folder in which the answers are kept. A second call continues with these answers."
)
@to_option
@click.option("--name", help="Name of the published artifact. Default: calibrated-SMALL.")
@click.option(
    "--sources",
    type=existing_file,
    help=(
        "File that lists the sources of the prompts, as JSON lines with "
        '{"name": ..., "licence": ..., "attribution": ...}. The manifest and the card name these sources.'
    ),
)
@click.option(
    "--keep",
    type=click.FloatRange(0, 1, min_open=True),
    help="Choose the threshold that keeps this share of the large model's quality.",
)
@click.option(
    "--cloud-share",
    type=click.FloatRange(0, 1),
    help="Choose the threshold at which at most this share of the requests goes to the cloud.",
)
@click.option(
    "--hold-tokens",
    type=click.IntRange(1, 32),
    default=24,
    show_default=True,
    help="Maximum number of the answer's first tokens that are held back from the client until the handoff is decided.",
)
@click.option(
    "--hold-ms",
    type=click.IntRange(1),
    default=1500,
    show_default=True,
    help="Maximum time for which tokens are held back from the client, in milliseconds.",
)
@click.option(
    "--ask/--no-ask",
    default=True,
    help="--ask: send prompts that have no stored answers to the models. --no-ask: use only the stored answers.",
)
@click.option(
    "--check", is_flag=True, help="Measure the published signals on the given prompts, without fitting new signals."
)
@click.option(
    "--parallel",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Number of prompts that are sent to a model at the same time.",
)
@click.option(
    "--context",
    type=click.IntRange(256),
    default=4096,
    show_default=True,
    help="Context length of one sequence, in tokens.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed for random choices.")
@threads_option(2)
@models_option
def calibrate(
    small: str,
    large: str,
    large_url: str,
    large_key_env: str,
    judge: str,
    judge_url: str,
    files: Sequence[Path],
    state_dir: Path | None,
    run_dir: Path | None,
    to: Path,
    name: str | None,
    sources: Path | None,
    keep: float | None,
    cloud_share: float | None,
    ask: bool,
    check: bool,
    seed: int,
    extra_dirs: Sequence[Path],
    **bounds: int,
) -> None:
    """From the answers of a pair of models, learn which prompts the small model answers well enough, and choose the
    threshold of the handoff.

    Asks both models every prompt, compares the answers with the references or with each other, and publishes
    `edge.quality` and the confidence of a handoff as one artifact with a report. A run that was killed resumes. With
    --from-shadow no prompts are asked: the fit uses the answers that a device compared because its policy has `shadow`.
    With --check the report measures signals that were published before, on prompts that their fit did not see.
    """
    from causeway_server.models.comparison.prompts import read_prompts

    from ..calibrate.prompts import AnswerLog, collection_order, read_sources
    from ..calibrate.report import Target
    from ..calibrate.run import Plan, ask_pair, calibrate_from_shadow, calibrate_pair, check_pair

    if keep is not None and cloud_share is not None:
        raise click.UsageError("--keep and --cloud-share exclude each other: name one target")
    if bool(judge) != bool(judge_url):
        raise click.UsageError("--judge and --judge-url must be given together")
    if (state_dir is None) == (not files):
        raise click.UsageError("name either --prompts or --from-shadow")
    if check and state_dir is not None:
        raise click.UsageError("--check needs --prompts: shadow answers are checked by the daemon itself")
    if check and (keep is not None or cloud_share is not None):
        raise click.UsageError("--check measures the published threshold: leave out --keep and --cloud-share")
    if state_dir is None and run_dir is None:
        raise click.UsageError("--prompts needs --run-dir, a folder for the answers")
    dirs = (to, *extra_dirs)
    with contextlib.ExitStack() as stack:
        plan = Plan(
            small=find_artifact(small, dirs),
            large=_large(large, dirs, is_remote=bool(large_url), may_be_absent=state_dir is not None),
            large_url=large_url,
            judge=judge,
            judge_url=judge_url,
            key=os.environ.get(large_key_env, ""),
            sources=tuple(read_sources(sources)) if sources else (),
            run=run_dir or Path(stack.enter_context(tempfile.TemporaryDirectory())),
            to=to,
            name=name or f"calibrated-{small}",
            command=shlex.join(["causeway-models", *sys.argv[1:]]),
            target=Target(keep, cloud_share) if keep or cloud_share is not None else Target(keep=0.95),
            seed=seed,
            **bounds,
        )
        if state_dir is not None:
            published = calibrate_from_shadow(plan, state_dir, click.echo)
        else:
            prompts = collection_order(read_prompts(files), seed)
            log = stack.enter_context(AnswerLog(plan.run / "answers.jsonl", plan.pair))
            if ask:
                ask_pair(plan, prompts, log, click.echo)
            if check:
                check_pair(plan, prompts, log, dirs, click.echo)
                return
            published = calibrate_pair(plan, prompts, log, click.echo)
    if published is not None:
        click.echo(f"published {published.path}, which calibrates {small} beside {large}")


def _large(name: str, dirs: Sequence[Path], *, is_remote: bool, may_be_absent: bool) -> Artifact | str:
    """Return the large model; only its name if it runs behind an endpoint or in a device's cloud."""
    if is_remote:
        return name
    try:
        return find_artifact(name, dirs)
    except ArtifactNotFound:
        if may_be_absent:
            return name
        raise


@click.command()
@click.option(
    "--graded",
    "files",
    multiple=True,
    required=True,
    type=existing_file,
    help='File of graded answers: JSON lines with {"prompt": ..., "grades": {MODEL: 0 to 1}, "tokens": '
    "{MODEL: length}}. May be repeated.",
)
@to_option
@click.option("--name", default="candidates", show_default=True, help="Name of the published artifact.")
@click.option(
    "--sources",
    type=existing_file,
    help="File that lists the sources of the data, as JSON lines with "
    '{"name": ..., "licence": ..., "attribution": ...}. The card names these sources.',
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed for random choices.")
def candidates(files: Sequence[Path], to: Path, name: str, sources: Path | None, seed: int) -> None:
    """Learn how well each of several models answers a prompt. A policy's `best_of` uses the result.

    Fits an estimate of each model's quality on graded answers, chooses between regressions and nearest neighbours on
    held-out rows, and publishes it with a report of rows that neither saw.
    """
    from ..calibrate.candidates import publish_candidates, read_graded
    from ..calibrate.prompts import read_sources

    command = shlex.join(["causeway-models", *sys.argv[1:]])
    named = tuple(read_sources(sources)) if sources else ()
    artifact, report = publish_candidates(read_graded(files), to, name, command=command, seed=seed, sources=named)
    click.echo("\n".join(report.lines()))
    click.echo(f"published {artifact.path}")


COMMANDS: tuple[click.Command, ...] = (calibrate, candidates)
