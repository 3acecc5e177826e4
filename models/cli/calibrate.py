"""`causeway-models calibrate`: learn for a pair of models when the small one is good enough."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from ..catalog.artifact import find_artifact
from .options import existing_file, folder, models_option, threads_option, to_option


@click.command()
@click.option("--small", required=True, help="Model on the device.")
@click.option("--large", required=True, help="Model in the cloud: one of yours, or the name that --large-url knows.")
@click.option("--large-url", help="OpenAI endpoint of the large model, such as https://host/v1.")
@click.option("--large-key-env", default="", help="Environment variable that holds the endpoint's API key.")
@click.option("--judge", help="Model that compares the answers to prompts without a reference.")
@click.option("--judge-url", help="Its OpenAI endpoint; --large-key-env holds the API key of both.")
@click.option(
    "--prompts",
    "files",
    multiple=True,
    required=True,
    type=existing_file,
    help='JSON lines: {"prompt": ...}, and "answer" with "metric" where there is a reference; may be repeated.',
)
@click.option("--run", type=folder, required=True, help="Folder for the answers; a second call goes on with them.")
@to_option
@click.option("--name", help="Name of the artifact; default: calibrated-SMALL.")
@click.option("--keep", type=click.FloatRange(0, 1, min_open=True), help="Share of the large model's quality to keep.")
@click.option("--cloud-share", type=click.FloatRange(0, 1), help="Share of the requests that may go to the cloud.")
@click.option(
    "--hold-tokens", type=click.IntRange(1, 32), default=24, show_default=True, help="Most tokens that are held back."
)
@click.option(
    "--hold-ms", type=click.IntRange(1), default=1500, show_default=True, help="Most milliseconds that they are."
)
@click.option("--ask/--no-ask", default=True, help="--no-ask: use the answers that are there.")
@click.option("--parallel", type=click.IntRange(1, 64), default=4, show_default=True, help="Prompts asked at a time.")
@click.option("--context", type=click.IntRange(256), default=4096, show_default=True, help="Tokens of one sequence.")
@click.option("--seed", type=int, default=1, show_default=True)
@threads_option(2)
@models_option
def calibrate(
    small: str,
    large: str,
    large_url: str | None,
    large_key_env: str,
    judge: str | None,
    judge_url: str | None,
    files: Sequence[Path],
    run: Path,
    to: Path,
    name: str | None,
    keep: float | None,
    cloud_share: float | None,
    hold_tokens: int,
    hold_ms: int,
    ask: bool,
    parallel: int,
    context: int,
    seed: int,
    threads: int,
    extra_dirs: Sequence[Path],
) -> None:
    """Learn when the small model of a pair is good enough, and choose the threshold for your target.

    Asks both models every prompt, compares the answers with the references or with each other, and publishes
    `edge.quality` and the confidence of a handoff as one artifact with a report. A killed run goes on.
    """
    from ..calibrate.answers import AnswerLog
    from ..calibrate.evaluate import Target
    from ..calibrate.prompts import collection_order, read_prompts
    from ..calibrate.run import Endpoint, Plan, ask_pair, calibrate_pair

    if keep is not None and cloud_share is not None:
        raise click.UsageError("--keep and --cloud-share exclude each other: name one target")
    if (judge is None) != (judge_url is None):
        raise click.UsageError("--judge and --judge-url belong together")
    dirs, key = (to, *extra_dirs), os.environ.get(large_key_env, "")
    prompts = collection_order(read_prompts(files), seed)
    plan = Plan(
        small=find_artifact(small, dirs),
        large=large if large_url else find_artifact(large, dirs),
        endpoint=Endpoint(large_url, key) if large_url else None,
        judge=(judge, Endpoint(judge_url, key)) if judge and judge_url else None,
        run=run,
        target=Target(keep, cloud_share) if keep or cloud_share is not None else Target(keep=0.95),
        hold_tokens=hold_tokens,
        hold_ms=hold_ms,
        parallel=parallel,
        context_tokens=context,
        threads=threads,
        seed=seed,
    )
    with AnswerLog(run / "answers.jsonl", plan.pair) as log:
        if ask:
            ask_pair(plan, prompts, log, click.echo)
        command = shlex.join(["causeway-models", *sys.argv[1:]])
        published = calibrate_pair(plan, prompts, log, to, name or f"calibrated-{small}", command, click.echo)
    if published is not None:
        click.echo(f"published {published.path}, for {small} beside {large}")


COMMANDS: tuple[click.Command, ...] = (calibrate,)
