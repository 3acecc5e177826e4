"""The judge, which estimates how likely two questions with the same protected words have the same answer.

A text is converted to a `ComparedText` once: the encoder's vector, the probabilities of the trained intents, its words.
A pair is described by `FEATURES` numbers and the words that only one of the texts has; a small network maps them to
log-odds. `Calibration` turns a promised error rate into a threshold of the log-odds.

`Findings` test the promised error rate again on a device's own traffic. Some semantic hits are generated again and
compared with the cached answer. If more of them differ than the promised rate explains, the threshold rises. It falls
again as requests without further faults come in.
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, pairwise
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..catalog.artifact import Artifact, ArtifactError
from ..signals.encoder import SentenceEncoder
from .protected import CHARACTERS, Signature, poles, signature, words

Vector = NDArray[np.float32]
FEATURES = 15
TEXT_BUCKETS, WORD_BUCKETS = 1 << 13, 1 << 12
DELTA = 0.1  # the promised error rate holds with a probability of 1 - DELTA over the draw of the held-back rows
SAME_WORDS = 100.0  # log-odds of two texts that differ in nothing but politeness, contractions and plurals
_SMALL = 1e-4
MAX_REQUESTS = 10_000.0  # then older findings count half


class Array(msgspec.Struct, frozen=True):
    """An array in a JSON file: int8 with one scale per row, little endian, base64."""

    shape: tuple[int, ...]
    values: str
    scales: tuple[float, ...]

    def load(self) -> Vector:
        """Decode the array, and check that its fields agree. Raises ValueError if they contradict each other."""
        whole = np.frombuffer(base64.b64decode(self.values), np.int8).reshape(len(self.scales), -1)
        return (whole * np.array(self.scales, np.float32)[:, None]).reshape(self.shape).astype(np.float32)


class Calibration(msgspec.Struct, frozen=True):
    """The judge's results on a stream of rows that it was not trained on.

    `wrong`: the log-odds of the wrong hits, highest first, as many as a promised rate of up to `most_error` needs.
    `design_effect`: wrong hits come in clusters (one misleading entry misleads several requests), so that their number
    varies more than that of independent errors, by this factor (Kish 1965).
    """

    requests: int
    wrong: tuple[float, ...]
    most_error: float = 0.05
    design_effect: float = 1.0

    def threshold(self, max_error: float) -> float:
        """Return the log-odds that a hit must exceed so that at most `max_error` of all requests get a wrong answer.

        The number of wrong hits falls as the threshold rises, so the thresholds are tested from the strictest on, each
        by the exact binomial tail (Angelopoulos et al. 2021, Learn then Test, arXiv 2110.01052). Infinite if there are
        too few rows for the promise.
        """
        independent = allowed_errors(int(self.requests / self.design_effect), min(max_error, self.most_error))
        if independent < 0:
            return math.inf
        allowed = int(independent * self.design_effect)
        return self.wrong[allowed] if allowed < len(self.wrong) else self.wrong[-1] if self.wrong else math.inf


def allowed_errors(requests: int, max_error: float) -> int:
    """Return the greatest count of errors that is improbable (`DELTA`) at a rate above `max_error`; -1 if none is."""
    return next((count - 1 for count, below in _cumulative(requests, max_error) if below > DELTA), requests)


def likely_errors(requests: int, max_error: float) -> int:
    """Return the smallest count of errors that a rate of `max_error` exceeds only improbably (`DELTA`)."""
    return next((count for count, below in _cumulative(requests, max_error) if 1.0 - below <= DELTA), requests)


def _cumulative(requests: int, rate: float) -> Iterator[tuple[int, float]]:
    """Yield each count of errors with the cumulative probability of the binomial distribution."""
    below = 0.0
    log_p, log_q = math.log(rate), math.log1p(-rate)
    for count in range(requests + 1):
        ways = math.lgamma(requests + 1) - math.lgamma(count + 1) - math.lgamma(requests - count + 1)
        below += math.exp(ways + count * log_p + (requests - count) * log_q)
        yield count, below


class JudgeFile(msgspec.Struct, frozen=True):
    """The content of a judge's file."""

    harmless: tuple[str, ...]  # words that may differ between questions with the same answer
    rarity: dict[str, float]  # inverse document frequency of the words of the training rows, nats
    unseen_rarity: float
    text_words: Array  # weights [TEXT_BUCKETS, hidden]
    text_vector: Array  # weights [dimensions, hidden]
    text_bias: Array  # biases [hidden]
    intents: Array  # weights [intents, hidden]
    intent_bias: Array
    mean: tuple[float, ...]  # mean of the features
    spread: tuple[float, ...]
    pair_words: Array  # weights [WORD_BUCKETS, pair hidden]
    layers: tuple[Array, ...]  # weights, each [outputs, inputs]
    biases: tuple[Array, ...]
    calibration: Calibration | None = None


class ComparedText(msgspec.Struct, frozen=True, eq=False):
    """A text, prepared for comparison."""

    signature: Signature
    poles: int
    vector: Vector  # sentence vector of unit length
    intents: Vector  # probabilities of the intents
    words: tuple[str, ...]
    distinct: frozenset[str]


class Judge:
    """A loaded judge; calls may come from any thread. `sha256`: hash of its file, "" if it has none."""

    def __init__(self, file: JudgeFile, encoder: SentenceEncoder, sha256: str = "") -> None:
        self.sha256 = sha256
        self._encoder = encoder
        self._harmless = frozenset(file.harmless)
        self._rarity, self._unseen = file.rarity, file.unseen_rarity
        self._text_words, self._text_vector, self._text_bias = (
            one.load() for one in (file.text_words, file.text_vector, file.text_bias)
        )
        self._intents, self._intent_bias = file.intents.load(), file.intent_bias.load()
        self._mean, self._spread = np.array(file.mean, np.float32), np.array(file.spread, np.float32)
        pair_words = file.pair_words.load()
        self._pair_words = np.concatenate([pair_words, np.zeros_like(pair_words[:1])])  # the last row: no word differs
        self._layers = [(one.load().T.copy(), bias.load()) for one, bias in zip(file.layers, file.biases, strict=True)]
        self.calibration = file.calibration

    @classmethod
    def load(cls, judge: Artifact, encoder: Artifact) -> Judge:
        """Load `judge` if it was trained on exactly this `encoder`. Raises ArtifactError."""
        return cls(read_judge(judge.path_for(encoder)), SentenceEncoder(encoder.path), judge.manifest.sha256)

    def question(self, text: str) -> ComparedText | None:
        """Prepare a text for comparison; return None if it is empty or too long."""
        if len(text) > CHARACTERS:
            return None
        found = words(text)
        if not found:
            return None
        vector = self._encoder(text)
        return ComparedText(
            signature=signature(text, found, self._harmless),
            poles=poles(found),
            vector=vector,
            intents=self._probabilities(vector, found),
            words=tuple(found),
            distinct=frozenset(found),
        )

    def vector(self, text: str) -> Vector:
        """Return the encoder's vector of a text: float32 [dimensions], of length 1."""
        return self._encoder(text)

    def log_odds(self, question: ComparedText, others: Sequence[ComparedText], similarities: Sequence[float]) -> Vector:
        """Return for each of `others` the log-odds that its answer answers `question`, too: float32 [others].

        `similarities`: inner products of the texts' vectors.
        """
        rows = self.features(question, others, similarities)
        hidden = (np.array(rows, np.float32) - self._mean) / self._spread
        (matrix, bias), *rest = self._layers
        hidden = hidden @ matrix + bias
        buckets = [[*differing(question, other), WORD_BUCKETS] for other in others]  # none empty, as `reduceat` needs
        starts = [0, *accumulate(map(len, buckets[:-1]))]
        hidden += np.add.reduceat(self._pair_words[list(chain.from_iterable(buckets))], starts, axis=0)
        for matrix, bias in rest:
            hidden = np.maximum(hidden, 0.0) @ matrix + bias
        result = np.asarray(hidden[:, 0], np.float32)
        for row, other in enumerate(others):
            if other.words == question.words:
                result[row] = SAME_WORDS
        return result

    def features(
        self, question: ComparedText, others: Sequence[ComparedText], similarities: Sequence[float]
    ) -> list[list[float]]:
        """Return FEATURES numbers on `question` and each of `others`: [others, FEATURES]."""
        p, intents = question.intents, np.array([other.intents for other in others])
        best_p = int(p.argmax())
        log_p = math.log(float(p[best_p]))
        measured = zip(
            others,
            similarities,
            (intents @ p).tolist(),
            np.sqrt(intents * p).sum(axis=1).tolist(),
            intents.argmax(axis=1).tolist(),
            strict=True,
        )
        rows = []
        for other, similarity, product, roots, best_q in measured:
            q = other.intents
            only_question, only_other = question.distinct - other.distinct, other.distinct - question.distinct
            common = question.distinct & other.distinct
            unlike = [self._rarity.get(word, self._unseen) for word in (*only_question, *only_other)]
            shared = sum([self._rarity.get(word, self._unseen) for word in common])
            differs = sum(unlike)
            in_order = [w for w in question.words if w in common] == [w for w in other.words if w in common]
            row = [
                similarity,
                product,
                float(best_p == best_q),
                math.log(float(p[best_q]) + _SMALL),
                math.log(float(q[best_p]) + _SMALL),
                log_p,
                math.log(float(q[best_q])),
                roots,
                float(len(only_question)),
                float(len(only_other)),
                float(len(common)),
                shared / (shared + differs + 1e-6),
                differs,
                max(unlike, default=0.0),
                float(in_order),
            ]
            rows.append(row)
        return rows

    def _probabilities(self, vector: Vector, found: Sequence[str]) -> Vector:
        buckets = text_buckets(found)
        hidden = self._text_words.take(buckets, axis=0).sum(axis=0) / math.sqrt(len(buckets))
        logits = self._intents @ (hidden + vector @ self._text_vector + self._text_bias) + self._intent_bias
        powers = np.exp(logits - logits.max())
        result: Vector = powers / powers.sum()
        return result


def read_judge(path: Path) -> JudgeFile:
    """Read a judge's file. Raises ArtifactError: the file is malformed."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=JudgeFile)
        shapes = file.text_words.shape[0], file.pair_words.shape[0], len(file.mean), len(file.spread)
        if shapes != (TEXT_BUCKETS, WORD_BUCKETS, FEATURES, FEATURES):
            raise ValueError(f"the arrays of the file have {shapes} rows")
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise ArtifactError(
            f"{path} is not a file of the model that compares questions for the semantic cache ({error})"
        ) from error
    return file


def text_buckets(found: Sequence[str]) -> list[int]:
    """Hash words and word pairs into TEXT_BUCKETS."""
    pairs = [f"{one} {other}" for one, other in pairwise(["<", *found, ">"])]
    return [zlib.crc32(part.encode()) % TEXT_BUCKETS for part in (*found, *pairs)]


def differing(question: ComparedText, other: ComparedText) -> list[int]:
    """Hash the words that only one of two questions has into WORD_BUCKETS."""
    return [zlib.crc32(word.encode()) % WORD_BUCKETS for word in question.distinct ^ other.distinct]


class Findings(msgspec.Struct):
    """The results of the checks of semantic hits: counts and log-odds, no content."""

    judge_sha256: str  # the hash of the judge that gave these log-odds
    requests: float = 0.0  # number of look-ups, each weighted with the share of semantic answers that is compared
    compared: int = 0  # number of semantic answers that were generated again for comparison
    wrong: list[float] = []  # the log-odds of the answers that differed, highest first

    def look_up(self, share: float) -> bool:
        """Count a look-up, hit or miss; return whether `least_log_odds` may have changed."""
        before = int(self.requests)
        self.requests += share
        if self.requests > MAX_REQUESTS:
            self.requests, self.compared, self.wrong = self.requests / 2, self.compared // 2, self.wrong[::2]
        return int(self.requests) != before

    def compare(self, log_odds: float, *, agreed: bool) -> None:
        """Count a semantic answer that was generated again for comparison."""
        self.compared += 1
        if not agreed:
            self.wrong = sorted([*self.wrong, log_odds], reverse=True)

    def merge(self, other: Findings) -> None:
        """Add the findings of an earlier run with the same judge."""
        self.requests += other.requests
        self.compared += other.compared
        self.wrong = sorted([*self.wrong, *other.wrong], reverse=True)

    def least_log_odds(self, max_error: float) -> float:
        """Return the log-odds that a hit must exceed so that wrong answers agree with `max_error`; -inf: all do."""
        likely = likely_errors(int(self.requests), max_error)
        return self.wrong[likely] if likely < len(self.wrong) else -math.inf
