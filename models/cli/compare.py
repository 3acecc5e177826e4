"""The command `causeway-models compare`, and the options of the gate before a model is published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, get_args

import click
import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from causeway_server.router.serving.process import option

from ..catalog.artifact import find_artifact
from ..llama_cpp.protocol import KVType
from .options import existing_file, mebibytes, models_option, threads_option

if TYPE_CHECKING:
    from ..comparison.compare import Comparison, Gate, ModelFigures, Share

T = TypeVar("T", bound=Callable[..., object] | click.Command)

prompts_option = option(
    "--prompts",
    'File of prompts: JSON lines with {"prompt": ...}, and also "answer" and "metric" if a prompt has '
    "a reference answer. May be repeated.",
    existing_file,
    to="prompt_files",
    multiple=True,
)
limits_option = option(
    "--limit",
    "Limit for a figure of the comparison, as FIGURE=NUMBER. The command refuses the new model if the "
    "figure is beyond the limit. For `compare`, the new model is the model SECOND. NUMBER is a maximum for "
    "kl_mean, kl_p99 and perplexity_ratio, and a minimum for top1, exact_match, rouge_l and "
    "accuracy_change. May be repeated.",
    to="limits",
    multiple=True,
)
_kv_type = click.Choice(get_args(KVType))


def gate_options(command: T) -> T:
    """Add `--against`, `--prompts` and `--limit`, from which `make_gate` makes a gate."""
    against = option(
        "--against",
        "Model (a name or a GGUF file) with which the new model is compared before it is added. Needs "
        "--prompts and --limit.",
    )
    return against(prompts_option(limits_option(command)))


def make_gate(
    against: str | None, prompt_files: Sequence[Path], limits: Sequence[str], extra_dirs: Sequence[Path], context: int
) -> Gate | None:
    """Return the gate of these options; None without them. Raises UsageError if only some of them are there."""
    given = bool(against), bool(prompt_files), bool(limits)
    if not any(given):
        return None
    if against is None or not all(given):
        raise click.UsageError("--against, --prompts and --limit must be given together")
    from ..comparison.compare import Gate, Run, parse_limits
    from ..comparison.prompts import read_prompts

    prompts = tuple(read_prompts(prompt_files))
    return Gate(_weights(against, extra_dirs), prompts, parse_limits(limits), Run(context))


@click.command()
@click.argument("first")
@click.argument("second")
@prompts_option
@limits_option
@option(
    "--answers",
    "Maximum number of prompts that both models answer. 0: only the probabilities of tokens are compared.",
    click.IntRange(0),
    200,
)
@option("--first-kv", "Format of the KV cache of the model FIRST.", _kv_type, "f16")
@option("--second-kv", "Format of the KV cache of the model SECOND.", _kv_type, "f16")
@option("--context", "Context length for a prompt with its answer, in tokens.", click.IntRange(1), 2048)
@option(
    "--format",
    "Format of the output: `human`, for people, or `json` (one JSON object).",
    click.Choice(["human", "json"]),
    "human",
    to="output",
)
@threads_option(2)
@models_option
def compare(
    first: str,
    second: str,
    prompt_files: Sequence[Path],
    limits: Sequence[str],
    answers: int,
    first_kv: KVType,
    second_kv: KVType,
    context: int,
    output: str,
    threads: int,
    extra_dirs: Sequence[Path],
) -> None:
    """Compare the models FIRST and SECOND (names or GGUF files), for example to see how much quality a quantisation
    costs.

    Figures per token (KL divergence, perplexity) need the same vocabulary. Answers are greedy and unconstrained. Exits
    with 1 if a --limit is not kept.
    """
    from ..comparison.compare import Run, broken_limits, parse_limits
    from ..comparison.compare import compare as measure
    from ..comparison.prompts import read_prompts

    if not prompt_files:
        raise click.UsageError("name the prompts: --prompts FILE")
    wanted = parse_limits(limits)
    files = [_weights(name, extra_dirs) for name in (first, second)]
    prompts = read_prompts(prompt_files)
    ticks = iter(track(range(len(prompts)), "comparing", console=Console(stderr=True)))
    next(ticks)
    run = Run(context, answers, threads, (first_kv, second_kv))
    found = measure(files[0], files[1], prompts, run, lambda: next(ticks, None))
    if output == "json":
        click.echo(msgspec.json.encode(found))
    else:
        _print(found)
    for broken in broken_limits(found, wanted):
        click.echo(f"refused: {broken}", err=True)
    if broken_limits(found, wanted):
        raise SystemExit(1)


def _weights(name: str, extra_dirs: Sequence[Path]) -> Path:
    path = Path(name)
    return path if path.is_file() else find_artifact(name, extra_dirs).path


def _print(found: Comparison) -> None:
    tasks = dict.fromkeys((*found.first.accuracy, *found.second.accuracy))
    table = Table("", "first", "second", box=None)
    rows: dict[str, Callable[[ModelFigures], str]] = {
        "file": lambda one: mebibytes(one.size_bytes),
        "memory": lambda one: mebibytes(one.memory_bytes),
        "prompt tokens/s": lambda one: _number(one.prompt_tokens_per_s),
        "tokens/s": lambda one: _number(one.tokens_per_s),
        "perplexity": lambda one: _number(one.perplexity),
    }
    for name, text in rows.items():
        table.add_row(name, text(found.first), text(found.second))
    for task in tasks:
        table.add_row(f"accuracy, {task}", *(_share(one.accuracy.get(task)) for one in (found.first, found.second)))
    console = Console(highlight=False)
    console.print(table)
    console.print(f"{found.prompts} prompts, {found.answered} of them answered, {found.tokens} tokens")
    for label, figure in {
        "KL divergence": f"mean {_number(found.kl_mean)}, 99th percentile {_number(found.kl_p99)} nats a token",
        "same likeliest token": _number(found.top1),
        "perplexity ratio": _number(found.perplexity_ratio),
        "equal answers": _number(found.exact_match),
        "ROUGE-L": _number(found.rouge_l),
        "change of accuracy": _share(found.accuracy_change),
    }.items():
        console.print(f"{label:21} {figure}", soft_wrap=True)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _share(share: Share | None) -> str:
    return "-" if share is None else f"{share.value:.3f} ({share.low:.3f} to {share.high:.3f})"


COMMANDS: tuple[click.Command, ...] = (compare,)
