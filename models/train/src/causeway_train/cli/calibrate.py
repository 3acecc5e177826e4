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
    help="Large model, which runs in the cloud: a model on this machine, or a model's name at --large-url.",
)
@click.option("--large-url", default="", help="OpenAI endpoint of the large model, such as https://host/v1.")
@click.option("--large-key-env", default="", help="Environment variable that holds the endpoint's API key.")
@click.option("--judge", default="", help="Model that compares answers if a prompt has no reference.")
@click.option(
    "--judge-url", default="", help="OpenAI endpoint of the judge. It uses the API key of --large-key-env, too."
)
@click.option(
    "--prompts",
    "files",
    multiple=True,
    type=existing_file,
    help='JSON lines with {"prompt": ...}, and "answer" with "metric" if there is a reference. May be repeated.',
)
@click.option(
    "--from-shadow",
    "state_dir",
    type=existing_folder,
    help="A daemon's state folder: fit on its recorded shadow answers, and ask no prompts.",
)
@click.option("--run-dir", type=folder, help="Folder for the answers; a second call goes on with them.")
@to_option
@click.option("--name", help="Name of the artifact; default: calibrated-SMALL.")
@click.option(
    "--sources",
    type=existing_file,
    help=(
        'JSON lines with {"name": ..., "licence": ..., "attribution": ...}: sources of the prompts, for '
        "the manifest and the card."
    ),
)
@click.option("--keep", type=click.FloatRange(0, 1, min_open=True), help="Share of the large model's quality to keep.")
@click.option("--cloud-share", type=click.FloatRange(0, 1), help="Share of the requests that may go to the cloud.")
@click.option(
    "--hold-tokens",
    type=click.IntRange(1, 32),
    default=24,
    show_default=True,
    help="Maximum number of tokens that are held back before the handoff decision.",
)
@click.option(
    "--hold-ms",
    type=click.IntRange(1),
    default=1500,
    show_default=True,
    help="Maximum milliseconds that tokens are held back.",
)
@click.option(
    "--ask/--no-ask",
    default=True,
    help="Whether to ask the models prompts that have no answers yet. --no-ask uses the stored answers alone.",
)
@click.option("--check", is_flag=True, help="Measure the published signals on these prompts, and fit nothing.")
@click.option(
    "--parallel",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="Number of prompts that are asked at the same time.",
)
@click.option(
    "--context", type=click.IntRange(256), default=4096, show_default=True, help="Context of one sequence, in tokens."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of random choices.")
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
    """Learn when a pair's small model is good enough, and choose the threshold.

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
        raise click.UsageError("--judge and --judge-url belong together")
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
        click.echo(f"published {published.path}, for {small} beside {large}")


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
    help='JSON lines: {"prompt": ..., "grades": {MODEL: 0 to 1}, "tokens": {MODEL: length}}; may be repeated.',
)
@to_option
@click.option("--name", default="candidates", show_default=True, help="Name of the artifact.")
@click.option("--sources", type=existing_file, help="JSON lines as those of `calibrate`: the data that the card names.")
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of random choices.")
def candidates(files: Sequence[Path], to: Path, name: str, sources: Path | None, seed: int) -> None:
    """Learn which of several models answers a prompt well, for `best_of` in a policy.

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
