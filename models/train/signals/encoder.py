"""The device's sentence encoder: a table of token vectors taught by a transformer, int8, as one ONNX graph.

1. Every token by itself goes through the teacher (Tulkens and van Dongen 2024, Model2Vec).
2. The main directions of its answers to the texts (SVD) are what the table keeps of them.
3. Rows are weighted by how rare their token is (SIF; Arora et al. 2017).
4. A short regression: the mean of a text's rows shall point where the teacher's vector of the text points.

Rows are rounded to int8 with a scale each. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...catalog.artifact import sha256_of
from ...signals.encoder import PIECES_KEY, SentenceEncoder, Vector
from .adam import Adam
from .onnx_writer import FLOAT, INT64, Node, Port, write_onnx

DIMENSIONS = 256
COMMON = 1e-3  # SIF's constant: a token of this share of all tokens weighs half
BATCH = 256
_PART = 2000  # texts that are asked of the teacher between two saves

Ids = NDArray[np.int64]


class EncoderMetrics(msgspec.Struct, frozen=True):
    """Mean cosine between the table's vectors and the teacher's main directions, on texts that were held back."""

    before: float  # the regression
    after: float
    rounded: float  # in int8, through ONNX Runtime
    texts: int


def ask_teacher(
    teacher: SentenceEncoder, texts: Sequence[str], folder: Path, say: Callable[[str], None] = lambda _: None
) -> Vector:
    """float32 [texts, dimensions]; answers are kept in `folder`, so that a second call takes up where one ended."""
    folder.mkdir(parents=True, exist_ok=True)
    parts, own = [], sha256_of(teacher.path)
    for start in range(0, len(texts), _PART):
        part = texts[start : start + _PART]
        name = hashlib.sha256("\0".join((own, *part)).encode()).hexdigest()[:16]
        path = folder / f"vectors-{name}.npy"
        if not path.is_file():
            partial = folder / "vectors.partial.npy"
            np.save(partial, teacher.encode_all(part), allow_pickle=False)
            partial.replace(path)
            say(f"encoder: the teacher has read {min(start + _PART, len(texts))} of {len(texts)} texts")
        parts.append(np.load(path, allow_pickle=False))
    return np.concatenate(parts)


def distill(
    teacher: SentenceEncoder,
    texts: Sequence[str],
    held: Sequence[str],
    folder: Path,
    target: Path,
    *,
    epochs: int = 8,
    rate: float = 3e-3,
    seed: int = 1,
    dimensions: int = DIMENSIONS,
    say: Callable[[str], None] = lambda _: None,
) -> EncoderMetrics:
    """Teach a table on `texts`, measure it on `held`, write it to `target`. `folder` keeps the teacher's answers."""
    pieces = teacher.pieces
    wanted, held_wanted = (ask_teacher(teacher, part, folder, say) for part in (texts, held))
    alone = np.stack([teacher.encode_ids([number]) for number in range(len(pieces))])  # (1)
    directions = _directions(wanted, dimensions)
    ids, held_ids = ([pieces(text) or [pieces.unknown] for text in part] for part in (texts, held))
    table = (alone @ directions) * _rarity(ids, len(pieces))[:, None]
    goals, held_goals = _unit(wanted @ directions), _unit(held_wanted @ directions)
    before = _agreement(table, held_ids, held_goals)
    learner = Adam(table)
    draw = np.random.default_rng(seed)
    for epoch in range(epochs):
        order = draw.permutation(len(ids))
        now = rate * (1 - epoch / epochs)
        parts = np.array_split(order, -(-len(order) // BATCH))
        told = [_step(learner, [ids[i] for i in at], goals[at], now) for at in parts]
        say(f"encoder: epoch {epoch + 1} of {epochs}, cosine {np.mean(told):.4f}")
    after = _agreement(learner.value, held_ids, held_goals)
    write_table(learner.value, teacher.pieces.listed, target)
    written = SentenceEncoder(target)
    rounded = np.mean([float(written.encode_ids(one) @ goal) for one, goal in zip(held_ids, held_goals, strict=True)])
    return EncoderMetrics(before=before, after=after, rounded=float(rounded), texts=len(held))


def _step(table: Adam, ids: Sequence[Sequence[int]], goals: Vector, rate: float) -> float:
    """One batch; the mean cosine before it."""
    touched, shares = _shares(ids)
    means = shares @ table.value[touched]
    lengths = np.linalg.norm(means, axis=1, keepdims=True) + 1e-9
    units = means / lengths
    cosines = (units * goals).sum(axis=1, keepdims=True)
    # d(-cos)/d(mean): the part of the goal that the mean does not have yet, over the mean's length.
    table.step(shares.T @ (-(goals - cosines * units) / lengths / len(goals)), rate, touched)
    return float(cosines.mean())


def write_table(rows: Vector, pieces: Sequence[str], target: Path) -> None:
    """ids int64 [n] → embedding float32 [dimensions], of length 1; a row of int8 and a scale for every token."""
    scale = (np.abs(rows).max(axis=1, keepdims=True) / 127 + 1e-12).astype(np.float32)
    write_onnx(
        target,
        "static_encoder",
        [
            Node("Gather", ["table", "ids"], ["levels"]),
            Node("Cast", ["levels"], ["reals"], {"to": FLOAT}),
            Node("Gather", ["scale", "ids"], ["scales"]),
            Node("MatMul", ["scales", "reals"], ["sum"]),  # [n] by [n, dimensions]
            Node("LpNormalization", ["sum"], ["embedding"], {"axis": -1, "p": 2}),
        ],
        takes=[Port("ids", INT64, ["n"])],
        gives=[Port("embedding", FLOAT, [rows.shape[1]])],
        constants={"table": np.round(rows / scale).astype(np.int8), "scale": scale[:, 0]},
        metadata={PIECES_KEY: "\n".join(pieces)},
    )


def _shares(ids: Sequence[Sequence[int]]) -> tuple[Ids, Vector]:
    """The tokens of a batch, and each text's share of them: float32 [texts, tokens]; a row sums to 1."""
    touched, places = np.unique(np.concatenate([np.asarray(one) for one in ids]), return_inverse=True)
    shares = np.zeros((len(ids), len(touched)), np.float32)
    texts = np.repeat(np.arange(len(ids)), [len(one) for one in ids])
    np.add.at(shares, (texts, places), 1.0)
    return touched, shares / shares.sum(axis=1, keepdims=True)


def _directions(vectors: Vector, dimensions: int) -> Vector:
    """The `dimensions` directions that hold most of the vectors, not centred: float32 [width, dimensions]."""
    _, found = np.linalg.eigh((vectors.T @ vectors).astype(np.float64))
    return found[:, ::-1][:, :dimensions].astype(np.float32)


def _rarity(ids: Sequence[Sequence[int]], pieces: int) -> Vector:
    counts = Counter(number for one in ids for number in one)
    total = sum(counts.values())
    shares = np.array([counts[number] / total for number in range(pieces)], np.float32)
    return COMMON / (COMMON + shares)


def _agreement(rows: Vector, ids: Sequence[Sequence[int]], goals: Vector) -> float:
    units = _unit(np.stack([rows[one].mean(axis=0) for one in ids]))
    return float((units * goals).sum(axis=1).mean())


def _unit(vectors: Vector) -> Vector:
    return vectors / (np.linalg.norm(vectors, axis=1, keepdims=True) + 1e-9)
