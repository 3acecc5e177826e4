"""The commands that measure learned signals on a file of rows: scope, routing. None of them needs torch."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click

from router.types import Confidence

from ..catalog.artifact import Artifact, find_artifact
from ..evaluate.routing_curves import RoutingSample, mix
from ..function_calls.call import score_answer
from ..function_calls.dataset import Row, is_held_out, is_validation_row, read_rows
from ..function_calls.intents import is_device_row

_folder = click.Path(file_okay=False, path_type=Path)
_files = click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
_extra = click.option("--models", "extra", multiple=True, type=_folder, help="More folders of models.")
_run = click.option("--run", type=_folder, help="Keeps the models' answers; a second call goes on from them.")
_threads = click.option("--threads", type=click.IntRange(1), default=1, show_default=True)
_held = click.option("--held-back/--all-rows", "held", default=False, help="Only the rows that training holds back.")


@click.command("scope")
@_files
@_held
@click.option("--model", default="assistant", show_default=True, help="Whose confidence is joined in.")
@click.option("--source", default="clinc150", show_default=True, help="Whose labels these are.")
@_run
@_threads
@_extra
def scope_command(
    files: Sequence[Path],
    held: bool,
    model: str,
    source: str,
    run: Path | None,
    threads: int,
    extra: Sequence[Path],
) -> None:
    """How well FILES' rows in scope are told from those out of it (intent `oos`): by the prompt alone, and joined."""
    from ..signals.lookup import find_judged_artifact, find_signal
    from ..signals.scope import ScopeEstimator
    from ..train.signals.scope import measure

    rows = [row for path in files for row in read_rows(path, source) if not held or is_validation_row(row)]
    shipped = find_signal("scope", None, extra)
    estimator = ScopeEstimator.for_encoder(shipped, find_judged_artifact(shipped, extra))
    with _kept(run) as folder:
        fit = measure(estimator, rows, asker(find_artifact(model, extra), folder, threads))
    click.echo(f"{fit.rows} rows, {fit.outside} of them out of scope")
    click.echo(f"AUROC from the prompt alone: {fit.auroc:.4f}")
    click.echo(
        f"on the half that no line was fitted on: {fit.half_auroc:.4f} alone, "
        f"{fit.joined_auroc:.4f} with the confidence of {model}"
    )


@click.command("routing")
@_files
@_held
@click.option("--device", default="assistant", show_default=True, help="The device's model.")
@click.option("--cloud", default="assistant-large", show_default=True, help="The cloud's model.")
@click.option("--share", "shares", multiple=True, type=click.FloatRange(0, 1), default=(0.5, 0.7, 0.8, 0.9, 1.0))
@click.option("--after", type=click.IntRange(1, 16), default=8, show_default=True, help="Tokens before a handoff.")
@click.option("--to", type=_folder, help="Write routing.md, .csv and .svg there.")
@_run
@_threads
@_extra
def routing_command(
    files: Sequence[Path],
    held: bool,
    device: str,
    cloud: str,
    shares: Sequence[float],
    after: int,
    to: Path | None,
    run: Path | None,
    threads: int,
    extra: Sequence[Path],
) -> None:
    """What a pair of models keeps of the cloud's exact match, by how many of FILES' requests stay on the device.

    Requests of the device's domain are weighted to make each --share of the traffic. With --held-back, rows that the
    signals were calibrated on are left out.
    """
    from ..evaluate import routing_plots

    rows = [row for path in files for row in read_rows(path) if not held or _unseen(row)]
    with _kept(run) as folder:
        pairs = _pairs(find_artifact(device, extra), find_artifact(cloud, extra), rows, after, folder, threads, extra)
    names = list(pairs[0].signals) if pairs else []
    mixes = [mix(pairs, share, names) for share in shares]
    text = routing_plots.table(mixes, len(pairs))
    click.echo(text)
    if to is not None:
        to.mkdir(parents=True, exist_ok=True)
        shown = min(mixes, key=lambda one: abs(one.own_share - 0.8))
        title = f"# Routing between {device} and {cloud}\n\n![curve](routing.svg)\n\n"
        (to / "routing.md").write_text(title + text, encoding="utf-8")
        (to / "routing.csv").write_text(routing_plots.points(mixes), encoding="utf-8")
        (to / "routing.svg").write_text(routing_plots.picture(shown), encoding="utf-8")


def asker(model: Artifact, folder: Path, threads: int) -> Callable[[Sequence[str]], list[Confidence]]:
    """Texts → how sure `model` is after its first tokens, as a handoff after eight would see it."""
    from ..train.signals.calibration import at
    from ..train.signals.graded_answers import answer_rows, judge, question

    def ask(texts: Sequence[str]) -> list[Confidence]:
        rows = [question(text) for text in texts]
        judged = judge(rows, answer_rows(model, rows, folder, threads=threads), lambda _: False)
        return [at(one, 8)[0] for one in judged]

    return ask


def _pairs(
    device: Artifact,
    cloud: Artifact,
    rows: Sequence[Row],
    after: int,
    folder: Path,
    threads: int,
    extra: Sequence[Path],
) -> list[RoutingSample]:
    from ..signals.calibration import ConfidenceCalibrator
    from ..signals.lookup import find_signal
    from ..signals.quality import QualityEstimator
    from ..train.signals.calibration import at, tell
    from ..train.signals.graded_answers import answer_rows, judge

    quality = QualityEstimator.for_model(find_signal("edge.quality", device, extra), device)
    calibrator = ConfidenceCalibrator.for_model(find_signal("confidence", device, extra), device)
    near, far = (answer_rows(one, rows, folder, threads=threads, say=_told) for one in (device, cloud))
    judged = judge(rows, near, lambda row: is_device_row(row.source, row.intent))
    return [
        RoutingSample(
            device=score_answer(here.text, row).exact,
            cloud=score_answer(there.text, row).exact,
            own=one.own,
            signals={
                "edge.quality + confidence": tell(calibrator, one, after, quality),
                "confidence": at(one, after)[0].score,
                "edge.quality": quality(row.text),
                "short prompts": -float(len(row.text)),
            },
        )
        for row, one, here, there in zip(rows, judged, near, far, strict=True)
    ]


def _unseen(row: Row) -> bool:
    """Held back from training, and not of the half that signals are calibrated on."""
    from ..train.signals.quality import HALVES

    return is_validation_row(row) and not is_held_out(row.text, HALVES, 0.5)


def _told(text: str) -> None:
    click.echo(text, err=True)


@contextlib.contextmanager
def _kept(run: Path | None) -> Iterator[Path]:
    """The folder for answers; one that goes away again where none was named."""
    if run is not None:
        yield run
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


COMMANDS: tuple[click.Command, ...] = (scope_command, routing_command)
