"""Commands of the semantic cache: train-semantic makes its judge (needs torch), evaluate-semantic measures it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec
from rich.console import Console
from rich.table import Table

from causeway_server.models.catalog.artifact import ArtifactError
from causeway_server.models.cli.options import folder, models_option, to_option

from ..evaluate.same_answer import SOURCES, LabelledRow, Part, label
from ..function_calls.dataset import INTENT_SOURCES, read_rows
from ..publish import ATTRIBUTIONS
from ..publish_signal import SignalMetadata, publish_signal
from .options import data_option

if TYPE_CHECKING:
    from causeway_server.models.semantic.judge import Judge

_PARAPHRASED = 0.2
_seed = click.option("--seed", type=int, default=1, show_default=True, help="Seed for random choices.")
_max_error = click.option(
    "--max-error",
    type=click.FloatRange(0.002, 0.05),
    default=0.01,
    show_default=True,
    help="Maximum share, 0 to 1, of all requests that may get a wrong answer from the cache.",
)


@click.command("train-semantic")
@data_option
@click.option("--run", type=folder, required=True, help="Folder to which the judge is written before it is published.")
@to_option
@click.option(
    "--epochs", type=click.IntRange(1), default=4, show_default=True, help="Number of passes over the training pairs."
)
@click.option(
    "--decay",
    type=click.FloatRange(0),
    default=0.5,
    show_default=True,
    help="Weight decay for the table in which the judge has a weight for each word that only one of the two "
    "questions has.",
)
@_seed
def train_semantic(data: Path, run: Path, to: Path, epochs: int, decay: float, seed: int) -> None:
    """Train the judge of the semantic cache, which says whether two questions mean the same, and choose the judge's
    thresholds. The thresholds are chosen on rows that were not used for the training.

    Needs torch. The rows that `evaluate-semantic` reports on are used for neither.
    """
    from causeway_server.models.catalog.artifact import find_signal
    from causeway_server.models.semantic.judge import Judge
    from causeway_server.models.signals.encoder import SentenceEncoder

    from ..evaluate.semantic_stream import calibrate, run_stream, stream
    from ..signals.semantic_judge import train_judge

    artifact, rows = find_signal("embedding", None, (to,)), _labelled(data)
    encoder = SentenceEncoder(artifact.path)
    file = train_judge(rows, encoder, seed=seed, epochs=epochs, decay=decay, progress=click.echo)
    requests = stream(rows, "calibrate", seed)
    scored, _ = run_stream(Judge(file, encoder), requests)
    file = msgspec.structs.replace(file, calibration=calibrate(scored, len(requests)))
    run.mkdir(parents=True, exist_ok=True)
    path = run / "same-answer.json"
    path.write_bytes(msgspec.json.encode(file))
    metrics = {
        key: value
        for name, share in (("rows", 0.0), ("paraphrased", _PARAPHRASED))
        for key, value in _measured(Judge(file, encoder), rows, "report", 0.01, seed, share, prefix=f"{name}/").items()
    }
    metadata = SignalMetadata(
        kind="same-answer",
        architecture="lists of protected words; scores of all intents from hashed words and the encoder's vector; "
        "two layers over pairs",
        quantisation="int8, one scale per row",
        command=f"causeway-train train-semantic --epochs {epochs} --decay {decay:g} --seed {seed}",
        note="This signal estimates for the semantic cache whether two questions have the same answer. Of a stream of "
        "held-back rows with max_error 0.01, `hits` is the share of requests that get a stored answer, and `wrong` "
        "the share of all requests that get a wrong one (`causeway-train evaluate-semantic`).",
        metrics=metrics,
        seed=seed,
        data=tuple(one for one in ATTRIBUTIONS if "questions" not in one.name),
    )
    published = publish_signal(path, "same-answer", to, metadata, judged=artifact)
    click.echo(f"{published.path}: {', '.join(f'{key} {value:g}' for key, value in metrics.items())}")


@click.command("evaluate-semantic")
@data_option
@_max_error
@click.option(
    "--paraphrased",
    type=click.FloatRange(0, 0.9),
    default=0.0,
    show_default=True,
    help="Share, 0 to 1, of the requests that repeat an earlier request in other words.",
)
@click.option(
    "--part",
    type=click.Choice(["calibrate", "report"]),
    default="report",
    show_default=True,
    help="Part of the rows that is measured. The threshold was chosen on the part `calibrate`.",
)
@_seed
@models_option
def evaluate_semantic(
    data: Path, max_error: float, paraphrased: float, part: Part, seed: int, extra_dirs: Sequence[Path]
) -> None:
    """Measure the semantic cache (hits, wrong hits, time of a look-up) on a stream of rows of the data sets HWU64 and
    CLINC150.
    """
    from causeway_server.models.catalog.artifact import find_judged_artifact, find_signal
    from causeway_server.models.semantic.judge import Judge

    from ..evaluate.semantic_stream import similarity_alone, stream

    artifact = find_signal("same-answer", None, extra_dirs)
    judge, rows = Judge.load(artifact, find_judged_artifact(artifact, extra_dirs)), _labelled(data)
    table = Table("rows of", "requests", "oracle", "hits", "wrong", "look-up", title=f"max_error {max_error:g}")
    for sources in (SOURCES, *((source,) for source in SOURCES)):
        found = _measured(judge, rows, part, max_error, seed, paraphrased, sources)
        shares = [f"{100 * found[key]:.2f} %" for key in ("oracle", "hits", "wrong")]
        table.add_row(" + ".join(sources), f"{found['requests']:g}", *shares, f"{found['lookup_us']:.0f} µs")
    console = Console()
    console.print(table)
    alone = similarity_alone(stream(rows, part, seed, paraphrased), judge, max_error)
    console.print(
        f"upper bound, known only with hindsight: a threshold on the similarity alone would give {100 * alone:.2f} % "
        "hits"
    )


def _measured(
    judge: Judge,
    rows: Sequence[LabelledRow],
    part: Part,
    max_error: float,
    seed: int,
    paraphrased: float,
    sources: Sequence[str] = SOURCES,
    prefix: str = "",
) -> dict[str, float]:
    """Return the figures of one stream, measured on the requests of `sources`."""
    from ..evaluate.semantic_stream import run_stream, stream, summarize

    if judge.calibration is None:
        raise ArtifactError(
            "This model of the semantic cache has no calibration. Train it again with `causeway-train train-semantic`."
        )
    requests = [request for request in stream(rows, part, seed, paraphrased) if request.source in sources]
    scored, seconds = run_stream(judge, requests)
    result = summarize(requests, scored, seconds, judge.calibration.threshold(max_error))
    return {f"{prefix}{key}": round(float(value), 4) for key, value in msgspec.structs.asdict(result).items()}


def _labelled(data: Path) -> list[LabelledRow]:
    files = [data / "intents" / f"{name}.jsonl" for name in INTENT_SOURCES]
    return label([row for path in files if path.is_file() for row in read_rows(path)])


COMMANDS: tuple[click.Command, ...] = (train_semantic, evaluate_semantic)
