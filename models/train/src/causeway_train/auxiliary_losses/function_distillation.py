"""Distillation of the function's name: soft labels by a function teacher, on unlabelled texts.

A few dozen rows per function do not show a small network in which other words a request can be made. Many more texts
are made from the rows (data/paraphrase.py), the teacher assigns a probability to each function, and the network learns
these probabilities instead of one correct name (Hinton et al. 2015, arXiv 1503.02531). Texts without a confident label
are dropped. The device's model also learns what to refuse: the probability of a refusal is the sum over all functions
that the device lacks.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from ..data.augmentation import Augmenter
from ..data.paraphrase import Paraphraser, common_words, whole_words
from ..function_calls.dataset import Row
from ..function_calls.intents import functions_for
from .embedding_loss import SentenceEmbeddings, has_embeddings, save_embeddings
from .function_teacher import FunctionTeacher, load_or_train_teacher

TEACHER, SOFT_LABELS = "function_teacher.pt", "soft_labels.json"
MIN_CONFIDENCE = 0.4  # least probability of the best function of a soft label
TOP_FUNCTIONS = 6  # functions in a soft label
VARIANTS = {"clinc150": 24, "banking77": 6, "hwu64": 6}  # texts made from each row of a source
TRAINED_SHARE = {"snips2017": 0.33}  # share of a source's rows that the teacher is trained on; others: all
OUT_OF_SCOPE_REPEATS = 4  # how often the teacher is trained on each out-of-scope row
NEIGHBOURS, MIN_COSINE = 6, 0.5  # neighbours of a word
_CHUNK = 20_000  # texts that the teacher labels at a time

FunctionProbabilities = list[tuple[str, float]]  # the most probable first


class FunctionSoftLabels:
    """Unlabelled texts with the teacher's probabilities of the functions, and the teacher's vectors of these texts and
    of the rows.
    """

    def __init__(
        self, labels: Sequence[tuple[str, FunctionProbabilities]], embeddings: SentenceEmbeddings | None = None
    ) -> None:
        self.labels, self.embeddings = list(labels), embeddings

    @classmethod
    def load_or_make(
        cls, minilm: Path, rows: Sequence[Row], names: Sequence[str], folder: Path, *, seed: int,
        progress: Callable[[str], None],
    ) -> FunctionSoftLabels:  # fmt: skip
        """Load the labels in `folder`, or train a teacher on `rows`, label texts with it, and save both there.

        Args:
            minilm: folder with the published files that the teacher starts from.
            names: the functions.
        """
        if not ((folder / SOFT_LABELS).is_file() and has_embeddings(folder)):
            teacher = load_or_train_teacher(
                minilm, teacher_rows(rows, seed), names, folder / TEACHER, seed=seed, progress=progress
            )
            row_texts = [row.text for row in rows]
            texts = list(dict.fromkeys(row_texts + make_texts(rows, _neighbours(teacher, rows), seed)))
            ambiguous = [row.text for row in rows if len(functions_for(row.source, row.intent)) > 1]
            labelled = set(row_texts) - set(ambiguous)  # their own labels are better
            labels, vectors = label_texts(teacher, texts, progress)
            save_embeddings(texts, vectors, folder)
            partial = folder / f"{SOFT_LABELS}.partial"
            partial.write_bytes(msgspec.json.encode([one for one in labels if one[0] not in labelled]))
            partial.replace(folder / SOFT_LABELS)
        labels = msgspec.json.decode((folder / SOFT_LABELS).read_bytes(), type=list[tuple[str, FunctionProbabilities]])
        return cls(labels, SentenceEmbeddings.load(folder))


def teacher_rows(rows: Sequence[Row], seed: int) -> list[Row]:
    """Return the teacher's training rows: fewer rows of a source that has few functions, and out-of-scope rows
    repeated.
    """
    draw = random.Random(seed)
    chosen = [row for row in rows if row.source not in TRAINED_SHARE or draw.random() < TRAINED_SHARE[row.source]]
    return chosen + [row for row in rows if row.intent == "oos"] * (OUT_OF_SCOPE_REPEATS - 1)


def make_texts(rows: Sequence[Row], neighbours: dict[str, list[str]], seed: int) -> list[str]:
    """Return distinct paraphrases of augmented rows."""
    augmenter, paraphrase = Augmenter(rows, seed), Paraphraser(rows, neighbours, seed)
    texts = [paraphrase(augmenter.variant(row)) for row in rows for _ in range(VARIANTS.get(row.source, 0))]
    return list(dict.fromkeys(texts))


def label_texts(
    teacher: FunctionTeacher, texts: Sequence[str], progress: Callable[[str], None]
) -> tuple[list[tuple[str, FunctionProbabilities]], NDArray[np.float16]]:
    """Return the confident soft labels, probabilities summing to 1, and the vectors of all texts [texts, n]."""
    labels: list[tuple[str, FunctionProbabilities]] = []
    vectors = np.zeros((len(texts), teacher.bert.width), np.float16)
    for start in range(0, len(texts), _CHUNK):
        chunk = texts[start : start + _CHUNK]
        probabilities, chunk_vectors = teacher.predict(chunk)
        vectors[start : start + len(chunk)] = chunk_vectors.numpy()
        top, columns = probabilities.topk(min(TOP_FUNCTIONS, len(teacher.names)))
        for text, best, indices in zip(chunk, top.tolist(), columns.tolist(), strict=True):
            if best[0] >= MIN_CONFIDENCE:
                total = sum(best)
                labels.append((text, [(teacher.names[i], p / total) for i, p in zip(indices, best, strict=True)]))
        progress(f"soft labels: {start + len(chunk)} of {len(texts)} texts read, {len(labels)} labelled")
    return labels, vectors


def _neighbours(teacher: FunctionTeacher, rows: Sequence[Row]) -> dict[str, list[str]]:
    """Find neighbours of words among the rows' words and MiniLM's whole-word pieces, so that words that no row has
    occur in training too.
    """
    return nearest_words(teacher, common_words(rows), whole_words(teacher.tokenizer.pieces.listed))


def nearest_words(teacher: FunctionTeacher, words: Sequence[str], others: Sequence[str] = ()) -> dict[str, list[str]]:
    """Return the nearest neighbours of each word, first those among `words`, then those among `others`."""
    neighbours: dict[str, list[str]] = {word: [] for word in words}
    if not words:
        return neighbours
    vectors = functional.normalize(teacher.vectors(words), dim=-1)
    unseen = [word for word in others if word not in neighbours]
    for candidates in filter(None, (list(words), unseen)):
        cosines = vectors @ functional.normalize(teacher.vectors(candidates), dim=-1).T
        if candidates is not unseen:
            cosines -= 2 * torch.eye(len(words))  # a word is not its own neighbour
        top, columns = cosines.topk(min(NEIGHBOURS, len(candidates)))
        for word, indices, values in zip(words, columns.tolist(), top.tolist(), strict=True):
            near = [candidates[i] for i, cosine in zip(indices, values, strict=True) if cosine >= MIN_COSINE]
            neighbours[word] = neighbours[word] + near
    return neighbours


def soften(losses: Tensor, logits: Tensor, targets: Sequence[tuple[int, Sequence[tuple[int, float]]]]) -> Tensor:
    """Replace the losses at soft targets by the cross entropy with the soft targets' probabilities.

    Args:
        losses: [positions].
        logits: [positions, vocabulary].
        targets: index of a position, and tokens with their probabilities.
    """
    if not targets:
        return losses
    rows = torch.tensor([row for row, (_, probabilities) in enumerate(targets) for _ in probabilities])
    tokens = torch.tensor([token for _, probabilities in targets for token, _ in probabilities])
    weights = torch.tensor([p for _, probabilities in targets for _, p in probabilities], device=losses.device)
    positions = torch.tensor([position for position, _ in targets], device=losses.device)
    logprobs = logits[positions].float().log_softmax(-1)
    soft = torch.zeros(len(targets), device=losses.device).index_add(
        0, rows.to(losses.device), -weights * logprobs[rows, tokens]
    )
    return losses.index_copy(0, positions, soft)
