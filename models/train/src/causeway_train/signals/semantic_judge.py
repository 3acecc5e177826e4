"""Training of the semantic cache's judge: heads over all intents, then a network over pairs of near questions.

The intent heads that the pairs see are cross-fitted: each row's probabilities come from heads that were trained without
it, else the judge would trust them too much. Pairs are each row's nearest rows of its data set.
"""

from __future__ import annotations

import base64
import math
import random
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from causeway_server.models.semantic.judge import (
    FEATURES,
    TEXT_BUCKETS,
    WORD_BUCKETS,
    Array,
    ComparedText,
    Judge,
    JudgeFile,
    Vector,
    differing,
    text_buckets,
)
from causeway_server.models.semantic.protected import NEGATIONS, ORDERED, opposed, poles, signature
from causeway_server.models.signals.encoder import SentenceEncoder

from ..evaluate.same_answer import SOURCES, LabelledRow
from ..evaluate.semantic_stream import paraphrase

HIDDEN, PAIR_HIDDEN, FOLDS, NEAREST = 64, 48, 3, 8
_MIN_RIGHT, _MIN_SEEN = 0.1, 15  # a harmless word: in so many pairs, and the answer is the same in that share
_MIN_SIMILARITY = 0.4
_INTENT_EPOCHS = 12

Pair = tuple[int, int]
Progress = Callable[[str], None]


class _IntentHeads(nn.Module):
    """Hashed words and the encoder's vector → hidden → intents; the same function as `Judge._probabilities`."""

    def __init__(self, dimensions: int, intents: int) -> None:
        super().__init__()
        self.words = nn.EmbeddingBag(TEXT_BUCKETS, HIDDEN, mode="sum")
        nn.init.normal_(self.words.weight, std=0.05)
        self.vector = nn.Linear(dimensions, HIDDEN)
        self.out = nn.Linear(HIDDEN, intents)
        self.drop = nn.Dropout(0.3)

    def forward(self, buckets: Sequence[Sequence[int]], vectors: torch.Tensor) -> torch.Tensor:
        counts = torch.tensor([[math.sqrt(len(one))] for one in buckets])
        hidden = self.words(*_bags(buckets)) / counts + 2.0 * self.vector(vectors)
        logits: torch.Tensor = self.out(self.drop(hidden))
        return logits


class _PairNetwork(nn.Module):
    """Features and differing words → log-odds; the same function as `Judge.log_odds`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, PAIR_HIDDEN), nn.Linear(PAIR_HIDDEN, PAIR_HIDDEN)
        self.last, self.drop = nn.Linear(PAIR_HIDDEN, 1), nn.Dropout(0.1)
        self.words = nn.EmbeddingBag(WORD_BUCKETS, 8, mode="sum")
        nn.init.zeros_(self.words.weight)
        self.widen = nn.Linear(8, PAIR_HIDDEN, bias=False)

    def forward(self, features: torch.Tensor, buckets: Sequence[Sequence[int]]) -> torch.Tensor:
        hidden = self.first(features) + self.widen(self.words(*_bags(buckets)))
        hidden = self.drop(torch.relu(self.second(torch.relu(hidden))))
        log_odds: torch.Tensor = self.last(hidden)[:, 0]
        return log_odds


def train_judge(
    labelled: Sequence[LabelledRow],
    encoder: SentenceEncoder,
    *,
    seed: int,
    epochs: int,
    decay: float,
    progress: Progress = lambda _: None,
) -> JudgeFile:
    """Train on the rows of part `train`.

    Args:
        epochs: Passes over the pairs.
        decay: weight decay of the differing words' table.
    """
    rows = [row for row in labelled if row.part == "train"]
    torch.manual_seed(seed)
    vectors = np.stack([encoder(row.row.text) for row in rows])
    fitted, crossed = _intents(rows, vectors, seed)
    pairs = _near_pairs(rows, vectors)
    right = np.array([rows[one].answer == rows[other].answer for one, other in pairs])
    harmless = _harmless(rows, pairs, right)
    rarity = _rarity(rows)
    progress(f"{len(rows)} rows, {len(pairs)} pairs of near rows, {right.mean():.1%} with the same answer")
    draft = _file(fitted, harmless, rarity, len(rows))
    judge, questions = Judge(draft, encoder), []
    for row, vector, probabilities in zip(rows, vectors, crossed, strict=True):
        questions.append(
            ComparedText(
                signature=signature(row.row.text, list(row.words), frozenset(harmless)),
                poles=poles(list(row.words)),
                vector=vector,
                intents=probabilities,
                words=row.words,
                distinct=frozenset(row.words),
            )
        )
    pairs, right = _with_paraphrases(rows, judge, questions, pairs, right, seed)
    kept = np.array([_comparable(questions[one], questions[other]) for one, other in pairs])
    chosen = [pair for pair, keep in zip(pairs, kept, strict=True) if keep]
    truth = right[kept]
    progress(
        f"{len(chosen)} of the pairs agree in their protected words, {truth.mean():.1%} of these with the same answer"
    )
    features = np.array(
        [
            judge.features(
                questions[one], [questions[other]], [float(questions[one].vector @ questions[other].vector)]
            )[0]
            for one, other in chosen
        ],
        np.float32,
    )
    mean, spread = features.mean(axis=0), features.std(axis=0) + 1e-6
    network = _fit_pairs(
        (features - mean) / spread,
        [differing(questions[one], questions[other]) for one, other in chosen],
        truth,
        seed,
        epochs,
        decay,
    )
    return _with_pairs(draft, network, mean, spread)


def _bags(buckets: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = [len(one) for one in buckets]
    flat = torch.tensor([bucket for one in buckets for bucket in one], dtype=torch.long)
    return flat, torch.tensor(np.concatenate([[0], np.cumsum(lengths)[:-1]]), dtype=torch.long)


def _intents(rows: Sequence[LabelledRow], vectors: Vector, seed: int) -> tuple[_IntentHeads, Vector]:
    """Return heads trained on all rows, and the cross-fitted probabilities: float32 [rows, intents]."""
    names = {name: number for number, name in enumerate(sorted({row.intent for row in rows}))}
    truth = torch.tensor([names[row.intent] for row in rows])
    buckets = [text_buckets(row.words) for row in rows]
    fold = np.random.default_rng(seed).integers(0, FOLDS, len(rows))
    crossed = np.zeros((len(rows), len(names)), np.float32)
    for number in range(FOLDS):
        heads = _fit_intents(buckets, vectors, truth, np.flatnonzero(fold != number), len(names), seed)
        held = np.flatnonzero(fold == number)
        with torch.no_grad():
            logits = heads([buckets[at] for at in held], torch.tensor(vectors[held]))
        crossed[held] = torch.softmax(logits, 1).numpy()
    return _fit_intents(buckets, vectors, truth, np.arange(len(rows)), len(names), seed), crossed


def _fit_intents(
    buckets: Sequence[Sequence[int]],
    vectors: Vector,
    truth: torch.Tensor,
    chosen: NDArray[np.int64],
    intents: int,
    seed: int,
) -> _IntentHeads:
    heads = _IntentHeads(vectors.shape[1], intents)
    optimizer = torch.optim.AdamW(heads.parameters(), lr=0.01, weight_decay=0.3)
    steps = _INTENT_EPOCHS * (len(chosen) // 256 + 1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, steps + 1)
    draw = np.random.default_rng(seed)
    for _ in range(_INTENT_EPOCHS):
        order = draw.permutation(chosen)
        for start in range(0, len(order), 256):
            batch = order[start : start + 256]
            logits = heads([buckets[at] for at in batch], torch.tensor(vectors[batch]))
            loss = nn.functional.cross_entropy(logits, truth[batch], label_smoothing=0.05)
            _step(loss, optimizer, schedule)
    return heads.eval()


def _fit_pairs(
    features: Vector, buckets: Sequence[list[int]], right: NDArray[np.bool_], seed: int, epochs: int, decay: float
) -> _PairNetwork:
    network, draw = _PairNetwork(), np.random.default_rng(seed)
    words = [network.words.weight]
    others = [value for name, value in network.named_parameters() if name != "words.weight"]
    groups = [{"params": others, "weight_decay": 0.01}, {"params": words, "weight_decay": decay}]
    optimizer = torch.optim.AdamW(groups, lr=4e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, epochs * (len(right) // 256 + 1) + 1)
    inputs, truth = torch.tensor(features), torch.tensor(right).float()
    for _ in range(epochs):
        order = draw.permutation(len(right))
        for start in range(0, len(order), 256):
            batch = order[start : start + 256]
            log_odds = network(inputs[batch], [buckets[at] for at in batch])
            loss = nn.functional.binary_cross_entropy_with_logits(log_odds, truth[batch])
            _step(loss, optimizer, schedule)
    return network.eval()


def _step(loss: torch.Tensor, optimizer: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler) -> None:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    schedule.step()


def _with_paraphrases(
    rows: Sequence[LabelledRow],
    judge: Judge,
    questions: list[ComparedText],
    pairs: list[Pair],
    right: NDArray[np.bool_],
    seed: int,
) -> tuple[list[Pair], NDArray[np.bool_]]:
    """Add a paraphrase of every fourth row to `questions`, paired with its row and with that row's wrong neighbours."""
    draw = random.Random(seed)
    wrong: dict[int, list[int]] = {}
    for (one, other), same in zip(pairs, right, strict=True):
        if not same:
            wrong.setdefault(one, []).append(other)
    added: list[Pair] = []
    truth: list[bool] = []
    for at in range(0, len(rows), 4):
        made = judge.question(paraphrase(rows[at].row.text, draw))
        if made is None or rows[at].row.source not in SOURCES:
            continue
        questions.append(made)
        for other in (at, *wrong.get(at, ())):
            added.append((len(questions) - 1, other))
            truth.append(other == at)
    return [*pairs, *added], np.concatenate([right, np.array(truth, np.bool_)])


def _near_pairs(rows: Sequence[LabelledRow], vectors: Vector) -> list[Pair]:
    """Return each row paired with its NEAREST nearest rows of the same data set."""
    pairs: list[Pair] = []
    for source in SOURCES:
        own = np.array([at for at, row in enumerate(rows) if row.row.source == source])
        for start in range(0, len(own), 512):
            some = own[start : start + 512]
            similar = vectors[some] @ vectors[own].T
            similar[np.arange(len(some)), start + np.arange(len(some))] = -2.0
            nearest = np.argpartition(-similar, NEAREST, axis=1)[:, :NEAREST]
            pairs += [
                (int(one), int(own[at]))
                for row, one in enumerate(some)
                for at in nearest[row]
                if similar[row, at] > _MIN_SIMILARITY
            ]
    return pairs


def _harmless(rows: Sequence[LabelledRow], pairs: Sequence[Pair], right: NDArray[np.bool_]) -> list[str]:
    """Return the words that often differ between near rows with the same answer."""
    seen: Counter[str] = Counter()
    same: Counter[str] = Counter()
    for (one, other), agrees in zip(pairs, right, strict=True):
        differs = set(rows[one].words) ^ set(rows[other].words)
        seen.update(differs)
        if agrees:
            same.update(differs)
    found = {word for word, count in seen.items() if count >= _MIN_SEEN and same[word] >= _MIN_RIGHT * count}
    return sorted(word for word in found - NEGATIONS - ORDERED if word.isalpha())


def _rarity(rows: Sequence[LabelledRow]) -> dict[str, float]:
    having = Counter(word for row in rows for word in set(row.words))
    return {word: round(math.log(len(rows) / (1 + count)), 3) for word, count in having.items() if count > 1}


def _comparable(one: ComparedText, other: ComparedText) -> bool:
    return one.signature == other.signature and not opposed(one.poles, other.poles)


def _file(heads: _IntentHeads, harmless: Sequence[str], rarity: dict[str, float], rows: int) -> JudgeFile:
    """Return a judge that lacks the network over pairs."""
    empty = stored(np.zeros((PAIR_HIDDEN, FEATURES), np.float32))
    return JudgeFile(
        harmless=tuple(harmless),
        rarity=rarity,
        unseen_rarity=round(math.log(rows), 3),
        text_words=_array(heads.words.weight),
        text_vector=_array(2.0 * heads.vector.weight.T),
        text_bias=_array(2.0 * heads.vector.bias),
        intents=_array(heads.out.weight),
        intent_bias=_array(heads.out.bias),
        mean=(0.0,) * FEATURES,
        spread=(1.0,) * FEATURES,
        pair_words=stored(np.zeros((WORD_BUCKETS, PAIR_HIDDEN), np.float32)),
        layers=(empty,),
        biases=(stored(np.zeros(PAIR_HIDDEN, np.float32)),),
    )


def _with_pairs(draft: JudgeFile, network: _PairNetwork, mean: Vector, spread: Vector) -> JudgeFile:
    layers = (network.first, network.second, network.last)
    return msgspec.structs.replace(
        draft,
        mean=tuple(float(value) for value in mean),
        spread=tuple(float(value) for value in spread),
        pair_words=_array(network.words.weight @ network.widen.weight.T),
        layers=tuple(_array(layer.weight) for layer in layers),
        biases=tuple(_array(layer.bias) for layer in layers),
    )


def _array(values: torch.Tensor) -> Array:
    return stored(values.detach().numpy())


def stored(values: NDArray[np.floating]) -> Array:
    """Return an array as a judge's file has it: int8 with one scale per row."""
    rows = values.reshape(-1, values.shape[-1]) if values.ndim > 1 else values.reshape(1, -1)
    scales = np.maximum(np.abs(rows).max(axis=1), 1e-9) / 127.0
    whole = np.round(rows / scales[:, None]).astype(np.int8)
    return Array(
        values.shape, base64.b64encode(whole.tobytes()).decode(), tuple(float(f"{scale:.6g}") for scale in scales)
    )
