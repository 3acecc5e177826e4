"""The command that trains a picture encoder and a projector on drawn instrument panels: train-panels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from ..catalog.artifact import find_artifact
from .options import folder, mebibytes, models_option, threads_option, to_option

ENCODER = "panels"


@click.command("train-panels")
@click.option(
    "--model", "model_name", required=True, help="The language model that is to read panels; it stays as it is."
)
@click.option("--run", type=folder, required=True, help="Folder for the files before they are published.")
@to_option
@click.option("--panels", "count", type=click.IntRange(64), default=3000, show_default=True, help="Panels to draw.")
@click.option("--epochs", type=click.IntRange(1), default=12, show_default=True, help="Passes over them.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the drawing and the network.")
@threads_option(1)
@models_option
def train_panels(
    model_name: str, run: Path, to: Path, count: int, epochs: int, seed: int, threads: int, extra_dirs: Sequence[Path]
) -> None:
    """Train a projector with which a language model reads drawn instrument panels (synthetic), for `fusion: early`.

    Publishes the picture encoder `panels` to --to, and adds the projector to the model's folder and manifest.
    """
    import torch

    from ..publish.add_adapter import check_extensible
    from ..publish.add_projector import add_projector
    from ..publish.publish import SignalMetadata, publish_signal
    from ..train.panels.run import train

    model = find_artifact(model_name, extra_dirs)
    check_extensible(model, "a projector")
    torch.set_num_threads(threads)
    trained = train(model.path, run, count, epochs, seed, click.echo)
    command = f"causeway-models train-panels --model {model_name} --panels {count} --epochs {epochs} --seed {seed}"
    note = "reads drawn instrument panels (synthetic), and nothing else"
    encoder = publish_signal(
        trained.encoder,
        ENCODER,
        to,
        SignalMetadata(
            kind="",
            architecture="convolutions",
            quantisation="F32",
            metrics={"panels/digits_right": trained.digits},
            data=(),
            seed=seed,
            command=command,
            note=note,
        ),
    )
    artifact = add_projector(model, trained.projector, encoder, trained.tokens, note)
    size = mebibytes(trained.projector.stat().st_size)
    click.echo(f"{100 * trained.digits:.1f} % of the digits of held-back panels are nearest to the right row")
    click.echo(
        f"{artifact.name}: a panel becomes {trained.tokens} soft tokens ({size}), behind the encoder {encoder.name}"
    )


COMMANDS = (train_panels,)
