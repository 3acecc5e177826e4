"""Which functions a tutor thinks of, as a lesson at the function's name: on texts that nobody labelled.

The device's model learns from it also what is none of its own: how probable those functions are together is how
probable a refusal should be.

A few dozen rows a function do not tell a small network what else people say. So many more texts are made from them
(`paraphrase`), the tutor says how probable each function is, and the network learns these probabilities instead of one
right name (Hinton et al. 2015, arXiv 1503.02531). Texts of which the tutor makes nothing are left out.
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

from ...function_calls.dataset import Row
from ...function_calls.intents import functions_for
from ..data.augmentation import Augmenter
from ..data.paraphrase import Paraphraser, common_words, whole_words
from .embedding_loss import SentenceEmbeddings, is_kept, keep
from .function_teacher import FunctionTeacher, find_teacher

TUTOR, HINTS = "tutor.pt", "hints.json"
SURE = 0.4  # the tutor's probability of its best function, at least
KEPT = 6  # functions of each text
VARIANTS = {"clinc150": 24, "banking77": 6, "hwu64": 6}  # of each row of a source
TAUGHT = {"snips2017": 0.33}  # share of a source's rows that the tutor is taught
OUTSIDE = 4  # how often it is taught each row that is out of scope
NEAR, NEARNESS = 6, 0.5  # neighbours of a word at most, and the least cosine
_PART = 20_000  # texts that the tutor is asked at a time

Shares = list[tuple[str, float]]  # functions and their probabilities, the best first


class FunctionHints:
    """Texts, and what the tutor makes of each: functions, and the meanings of these texts and of the rows'."""

    def __init__(self, told: Sequence[tuple[str, Shares]], meanings: SentenceEmbeddings | None = None) -> None:
        self.told, self.meanings = list(told), meanings

    @classmethod
    def of(
        cls, minilm: Path, rows: Sequence[Row], names: Sequence[str], folder: Path, *, seed: int,
        say: Callable[[str], None],
    ) -> FunctionHints:  # fmt: skip
        """Teaches a tutor on `rows`, from the published files in `minilm`, and asks it; all is kept in `folder`."""
        if not ((folder / HINTS).is_file() and is_kept(folder)):
            tutor = find_teacher(minilm, lessons(rows, seed), names, folder / TUTOR, seed=seed, say=say)
            own = [row.text for row in rows]
            texts = list(dict.fromkeys(own + variants(rows, _synonyms(tutor, rows), seed)))
            unnamed = [row.text for row in rows if len(functions_for(row.source, row.intent)) > 1]
            named = set(own) - set(unnamed)  # by their labels: no hint is needed
            told, vectors = ask(tutor, texts, say)
            keep(texts, vectors, folder)
            partial = folder / f"{HINTS}.partial"
            partial.write_bytes(msgspec.json.encode([one for one in told if one[0] not in named]))
            partial.replace(folder / HINTS)
        told = msgspec.json.decode((folder / HINTS).read_bytes(), type=list[tuple[str, Shares]])
        return cls(told, SentenceEmbeddings.kept(folder))


def lessons(rows: Sequence[Row], seed: int) -> list[Row]:
    """What the tutor is taught: of a source with few functions a part is enough, what is out of scope is rare."""
    draw = random.Random(seed)
    chosen = [row for row in rows if row.source not in TAUGHT or draw.random() < TAUGHT[row.source]]
    return chosen + [row for row in rows if row.intent == "oos"] * (OUTSIDE - 1)


def variants(rows: Sequence[Row], near: dict[str, list[str]], seed: int) -> list[str]:
    """Changed texts of the rows; no text twice."""
    augmenter, paraphrase = Augmenter(rows, seed), Paraphraser(rows, near, seed)
    made = [paraphrase(augmenter.variant(row)) for row in rows for _ in range(VARIANTS.get(row.source, 0))]
    return list(dict.fromkeys(made))


def ask(
    tutor: FunctionTeacher, texts: Sequence[str], say: Callable[[str], None]
) -> tuple[list[tuple[str, Shares]], NDArray[np.float16]]:
    """What the tutor thinks of, where it is sure enough of one function; and its vectors of all texts [texts, n]."""
    kept: list[tuple[str, Shares]] = []
    vectors = np.zeros((len(texts), tutor.bert.width), np.float16)
    for start in range(0, len(texts), _PART):
        part = texts[start : start + _PART]
        told, made = tutor.read(part)
        vectors[start : start + len(part)] = made.numpy()
        shares, places = told.topk(min(KEPT, len(tutor.names)))
        for text, odds, at in zip(part, shares.tolist(), places.tolist(), strict=True):
            if odds[0] >= SURE:
                whole = sum(odds)
                kept.append((text, [(tutor.names[i], odd / whole) for i, odd in zip(at, odds, strict=True)]))
        say(f"hints: the tutor has read {start + len(part)} of {len(texts)} texts, and is sure of {len(kept)}")
    return kept, vectors


def _synonyms(tutor: FunctionTeacher, rows: Sequence[Row]) -> dict[str, list[str]]:
    """Also words that nobody said: what a model has never read it can't know."""
    return near_words(tutor, common_words(rows), whole_words(tutor.reading.pieces.listed))


def near_words(tutor: FunctionTeacher, words: Sequence[str], others: Sequence[str] = ()) -> dict[str, list[str]]:
    """For each word those among `words`, and those among `others`, that the tutor finds most like it."""
    near: dict[str, list[str]] = {word: [] for word in words}
    if not words:
        return near
    vectors = functional.normalize(tutor.vectors(words), dim=-1)
    unsaid = [word for word in others if word not in near]
    for found in filter(None, (list(words), unsaid)):
        likeness = vectors @ functional.normalize(tutor.vectors(found), dim=-1).T
        if found is not unsaid:
            likeness -= 2 * torch.eye(len(words))  # no word is its own neighbour
        nearness, places = likeness.topk(min(NEAR, len(found)))
        for word, at, one in zip(words, places.tolist(), nearness.tolist(), strict=True):
            near[word] = near[word] + [found[i] for i, how in zip(at, one, strict=True) if how >= NEARNESS]
    return near


def with_hints(losses: Tensor, logits: Tensor, hints: Sequence[tuple[int, Sequence[tuple[int, float]]]]) -> Tensor:
    """`losses` [targets], where those that a hint is for are replaced by the cross entropy with it.

    A hint is the place among the targets, and tokens with their probabilities; logits are [targets, vocabulary].
    """
    if not hints:
        return losses
    rows = torch.tensor([row for row, (_, shares) in enumerate(hints) for _ in shares])
    tokens = torch.tensor([token for _, shares in hints for token, _ in shares])
    weights = torch.tensor([share for _, shares in hints for _, share in shares], device=losses.device)
    places = torch.tensor([place for place, _ in hints], device=losses.device)
    told = logits[places].float().log_softmax(-1)
    soft = torch.zeros(len(hints), device=losses.device).index_add(
        0, rows.to(losses.device), -weights * told[rows, tokens]
    )
    return losses.index_copy(0, places, soft)
