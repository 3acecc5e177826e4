"""The device's sentence encoder: a table of token vectors distilled from a transformer, int8, as one ONNX graph.

1. The teacher encodes every token on its own (Tulkens and van Dongen 2024, Model2Vec).
2. These vectors are projected to the principal directions of the teacher's vectors of the texts (SVD).
3. Rows are weighted by the rarity of their token (SIF; Arora et al. 2017).
4. The table is trained briefly: the mean of a text's rows must point where the teacher's vector of the text points.

Rows are rounded to int8, with one scale each. Nothing here needs torch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from causeway_server.models.catalog.artifact import sha256_of
from causeway_server.models.signals.encoder import PIECES_KEY, SentenceEncoder, Vector

from ..onnx_writer import FLOAT, INT64, Node, Port, write_onnx
from .optimizers import Adam, Indices

DIMENSIONS = 256
SIF_CONSTANT = 1e-3  # a token with this share of all tokens has half the weight
BATCH = 256
_CHUNK = 2000  # texts that the teacher encodes between two saves


class EncoderMetrics(msgspec.Struct, frozen=True):
    """Mean cosine between the table's vectors and the teacher's projected vectors, on held-back texts."""

    before: float  # cosine before step 4
    after: float  # cosine after step 4
    quantised: float  # cosine in int8, through ONNX Runtime
    texts: int


def teacher_vectors(
    teacher: SentenceEncoder, texts: Sequence[str], folder: Path, progress: Callable[[str], None] = lambda _: None
) -> Vector:
    """Return the teacher's vectors, float32 [texts, width].

    They are kept in `folder`, so that a second call resumes an interrupted one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chunks, teacher_sha256 = [], sha256_of(teacher.path)
    for start in range(0, len(texts), _CHUNK):
        chunk = texts[start : start + _CHUNK]
        name = hashlib.sha256("\0".join((teacher_sha256, *chunk)).encode()).hexdigest()[:16]
        path = folder / f"vectors-{name}.npy"
        if not path.is_file():
            partial = folder / "vectors.partial.npy"
            np.save(partial, np.stack(list(map(teacher, chunk))), allow_pickle=False)
            partial.replace(path)
            progress(f"encoder: the teacher has read {min(start + _CHUNK, len(texts))} of {len(texts)} texts")
        chunks.append(np.load(path, allow_pickle=False))
    return np.concatenate(chunks)


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
    progress: Callable[[str], None] = lambda _: None,
) -> EncoderMetrics:
    """Train a table on `texts`, measure it on `held`, and write it to `target`.

    Args:
        folder: keeps the teacher's vectors between calls.
        rate: initial learning rate of step 4; it falls linearly.
    """
    pieces = teacher.pieces
    vectors, held_vectors = (teacher_vectors(teacher, part, folder, progress) for part in (texts, held))
    token_vectors = np.stack([teacher.encode_ids([token]) for token in range(len(pieces.listed))])  # (1)
    directions = _directions(vectors, dimensions)
    ids, held_ids = ([pieces(text) or [pieces.unknown] for text in part] for part in (texts, held))
    initial = (token_vectors @ directions) * _rarity(ids, len(pieces.listed))[:, None]  # (2), (3)
    goals, held_goals = _unit(vectors @ directions), _unit(held_vectors @ directions)
    before = _mean_cosine(initial, held_ids, held_goals)
    table = Adam(initial)
    draw = np.random.default_rng(seed)
    for epoch in range(epochs):  # (4)
        order = draw.permutation(len(ids))
        epoch_rate = rate * (1 - epoch / epochs)
        batches = np.array_split(order, -(-len(order) // BATCH))
        cosines = [_step(table, [ids[i] for i in batch], goals[batch], epoch_rate) for batch in batches]
        progress(f"encoder: epoch {epoch + 1} of {epochs}, cosine {np.mean(cosines):.4f}")
    after = _mean_cosine(table.value, held_ids, held_goals)
    write_table(table.value, teacher.pieces.listed, target)
    written = SentenceEncoder(target)
    quantised = np.mean([float(written.encode_ids(one) @ goal) for one, goal in zip(held_ids, held_goals, strict=True)])
    return EncoderMetrics(before=before, after=after, quantised=float(quantised), texts=len(held))


def _step(table: Adam, ids: Sequence[Sequence[int]], goals: Vector, rate: float) -> float:
    """Train on one batch; return the mean cosine before the update."""
    touched, shares = _shares(ids)
    means = shares @ table.value[touched]
    lengths = np.linalg.norm(means, axis=1, keepdims=True) + 1e-9
    units = means / lengths
    cosines = (units * goals).sum(axis=1, keepdims=True)
    # d(-cos)/d(mean): the component of the goal that is orthogonal to the mean, over the mean's length.
    table.step(shares.T @ (-(goals - cosines * units) / lengths / len(goals)), rate, touched)
    return float(cosines.mean())


def write_table(rows: Vector, pieces: Sequence[str], target: Path) -> None:
    """Write the graph ids int64 [n] → embedding float32 [dimensions] of length 1, with int8 rows and their scales."""
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
        inputs=[Port("ids", INT64, ["n"])],
        outputs=[Port("embedding", FLOAT, [rows.shape[1]])],
        constants={"table": np.round(rows / scale).astype(np.int8), "scale": scale[:, 0]},
        metadata={PIECES_KEY: "\n".join(pieces)},
    )


def _shares(ids: Sequence[Sequence[int]]) -> tuple[Indices, Vector]:
    """Return the distinct tokens of a batch, and each text's share of them: float32 [texts, tokens], rows sum to 1."""
    touched, columns = np.unique(np.concatenate([np.asarray(one) for one in ids]), return_inverse=True)
    shares = np.zeros((len(ids), len(touched)), np.float32)
    texts = np.repeat(np.arange(len(ids)), [len(one) for one in ids])
    np.add.at(shares, (texts, columns), 1.0)
    return touched, shares / shares.sum(axis=1, keepdims=True)


def _directions(vectors: Vector, dimensions: int) -> Vector:
    """Return the principal directions of the vectors, not centred: float32 [width, dimensions]."""
    _, eigenvectors = np.linalg.eigh((vectors.T @ vectors).astype(np.float64))
    return eigenvectors[:, ::-1][:, :dimensions].astype(np.float32)


def _rarity(ids: Sequence[Sequence[int]], pieces: int) -> Vector:
    counts = Counter(token for one in ids for token in one)
    total = sum(counts.values())
    shares = np.array([counts[token] / total for token in range(pieces)], np.float32)
    return SIF_CONSTANT / (SIF_CONSTANT + shares)


def _mean_cosine(rows: Vector, ids: Sequence[Sequence[int]], goals: Vector) -> float:
    units = _unit(np.stack([rows[one].mean(axis=0) for one in ids]))
    return float((units * goals).sum(axis=1).mean())


def _unit(vectors: Vector) -> Vector:
    return vectors / (np.linalg.norm(vectors, axis=1, keepdims=True) + 1e-9)
