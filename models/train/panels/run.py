"""Train the encoder and the projector of panels for one language model, which is read and never changed.

The targets are the rows of the model's own embeddings, dequantised: a digit that is read right becomes about the row
of its token. No gradient goes through the language model, so that this takes a minute or two on one core.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from ...catalog.artifact import ArtifactError
from ...llama_cpp.native.vocabulary import Vocabulary
from ...llama_cpp.native.weights import Weights
from ..export.embedding_rows import embedding_rows
from .drawing import CELLS, Panel, as_input, caption, panels
from .network import SIDE, CaptionRows, PanelReader, write_encoder, write_projector

_BATCH = 64
_RATE = 2e-3
_SHARPNESS = 0.1  # of the distance between two digits' rows: the temperature of the choice between them
HELD_BACK = 1  # added to the seed of training


class PanelFiles(msgspec.Struct, frozen=True):
    """What training wrote. `digits`: share of the held-back digits whose nearest row is the right one."""

    encoder: Path
    projector: Path
    tokens: int
    digits: float


def caption_rows(weights: Path) -> CaptionRows:
    """Return the caption in the embeddings of a GGUF.

    Raises:
        ArtifactError: the file has no embeddings, or its tokenizer has no token for each digit.
    """
    rows = embedding_rows(weights)
    with contextlib.closing(Weights(weights)) as loaded:
        vocabulary = Vocabulary(loaded.pointer)

        def ids(*values: str) -> NDArray[np.int32]:
            return vocabulary.encode(caption(values), special=False)

        if not _has_digits(ids):
            raise ArtifactError(f"{weights}: its tokenizer does not write each digit as a token of its own")
        same = np.stack([ids(*[2 * str(digit)] * len(CELLS)) for digit in range(10)])
    places = np.flatnonzero((same != same[0]).any(axis=0)).reshape(len(CELLS), 2)
    words = rows[same[0]].copy()
    words[places.ravel()] = 0.0
    return CaptionRows(words, tuple((int(one), int(two)) for one, two in places), rows[same[:, places[0, 0]]])


def _has_digits(ids: Callable[..., NDArray[np.int32]]) -> bool:
    """Whether captions have the same length, and differ in a token for each digit that differs."""
    zero, mixed = ids("00", "00", "00"), ids("12", "34", "56")
    return len(zero) == len(mixed) and int((zero != mixed).sum()) == 2 * len(CELLS)


def train(
    weights: Path, folder: Path, count: int, epochs: int, seed: int, report: Callable[[str], None] = lambda _: None
) -> PanelFiles:
    """Draw `count` panels, train on them, and write both ONNX files to `folder`.

    Raises:
        ArtifactError: the language model cannot read digits.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = caption_rows(weights)
    torch.manual_seed(seed)
    reader = PanelReader(rows.digits)
    pixels, digits = _drawn(panels(count, seed))
    optimizer = torch.optim.Adam(reader.parameters(), lr=_RATE)
    steps = epochs * -(-count // _BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _RATE, total_steps=steps)
    table = torch.from_numpy(rows.digits)
    order = np.random.default_rng(seed)
    for epoch in range(epochs):
        total = 0.0
        for batch in np.array_split(order.permutation(count), -(-count // _BATCH)):
            loss = _loss(reader(pixels[batch]), digits[batch], table)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            total += float(loss.detach())
        report(f"panels: epoch {epoch + 1} of {epochs}, loss {total * _BATCH / count:.3f}")
    held_back = _drawn(panels(max(1, count // 10), seed + HELD_BACK))
    files = PanelFiles(
        folder / "encoder.onnx", folder / "projector.onnx", len(rows.words), _share(reader, *held_back, table)
    )
    write_encoder(reader, files.encoder)
    write_projector(reader, rows, files.projector)
    return files


def _drawn(drawn: Sequence[Panel]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pixels, and digits [n, cells, 2]."""
    pixels = torch.from_numpy(np.stack([as_input(panel, SIDE) for panel in drawn]))
    digits = [[[int(digit) for digit in one.digits] for one in panel.instruments] for panel in drawn]
    return pixels, torch.tensor(digits)


def _distances(projected: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Return squared distances to the digits' rows, in units of the mean one between two of them: [..., 10]."""
    unit = torch.cdist(table, table).square().sum() / (len(table) * (len(table) - 1))
    return torch.cdist(projected.flatten(0, -2), table).square().reshape(*projected.shape[:-1], -1) / unit


def _loss(projected: torch.Tensor, digits: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Choose the right digit's row, and come close to it."""
    distances = _distances(projected, table)
    chosen = functional.cross_entropy(-distances.flatten(0, -2) / _SHARPNESS, digits.flatten())
    return chosen + distances.gather(-1, digits.unsqueeze(-1)).mean()


def _share(reader: PanelReader, pixels: torch.Tensor, digits: torch.Tensor, table: torch.Tensor) -> float:
    with torch.no_grad():
        nearest = _distances(reader(pixels), table).argmin(dim=-1)
    return float((nearest == digits).float().mean())
