"""Measurement of the semantic cache on a stream of labelled rows, with the index and the judge that the daemon uses.

Each data set is a scope of its own, because the labels of two data sets cannot be compared. `paraphrased` is the share
of requests that repeat an earlier row with other words around its core: a hit is right only if it has that row's
answer.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np

from causeway_server.models.semantic.index import ENTRIES, SemanticIndex
from causeway_server.models.semantic.judge import Calibration, Judge, allowed_errors

from .same_answer import SOURCES, LabelledRow, Part

_CLUSTERED = 0.01  # clusters are measured among the wrong hits at this error rate
_BEFORE = ("please", "can you", "could you please", "hey", "okay", "i want you to", "would you")
_AFTER = ("please", "for me", "thank you", "now please")
_SWAPS = (
    ("what is", "what's"), ("what's", "what is"), ("tell me", "let me know"), ("show me", "let me see"),
    ("i need", "i want"), ("do i have", "have i got"), ("how do i", "how can i"), ("i would like", "i'd like"),
    ("i want", "i would like"), ("is there", "are there"), ("give me", "tell me"), ("could you", "can you"),
)  # fmt: skip


class StreamedRequest(msgspec.Struct, frozen=True):
    """One request of a stream."""

    text: str
    source: str
    answer: tuple[object, ...]
    intent: str = ""


class Scored(msgspec.Struct, frozen=True):
    """The best match of one request in the cache; `right`: the match has the request's answer."""

    intent: tuple[str, str]
    log_odds: float
    similarity: float
    right: bool


class StreamResult(msgspec.Struct, frozen=True):
    """One stream under one threshold. Shares are of all requests."""

    requests: int
    oracle: float  # hits of a perfect judge: an earlier request has the same answer
    hits: float
    wrong: float
    lookup_us: float  # median time of a look-up in microseconds, encoding included


def stream(rows: Sequence[LabelledRow], part: Part, seed: int = 1, paraphrased: float = 0.0) -> list[StreamedRequest]:
    """Return the rows of `part` in random order, with paraphrases of earlier rows mixed in."""
    draw = random.Random(seed)
    chosen = [row for row in rows if row.part == part and row.row.source in SOURCES]
    draw.shuffle(chosen)
    requests: list[StreamedRequest] = []
    for number, row in enumerate(chosen):
        requests.append(StreamedRequest(row.row.text, row.row.source, row.answer, row.row.intent))
        while number > 20 and draw.random() < paraphrased:
            earlier = chosen[draw.randrange(number)]
            source, intent = earlier.intent
            requests.append(StreamedRequest(paraphrase(earlier.row.text, draw), source, earlier.answer, intent))
    return requests


def paraphrase(text: str, draw: random.Random) -> str:
    """Return the text with other words around its core, such as words of politeness."""
    changed = text.lower()
    fitting = [(old, new) for old, new in _SWAPS if old in changed]
    if fitting:
        changed = changed.replace(*draw.choice(fitting), 1)
    if not fitting or draw.random() < 0.5:
        command = not changed.startswith(("what", "how", "who", "is ", "are ", "do ", "i ", "when", "where", "why"))
        changed = f"{draw.choice(_BEFORE)} {changed}" if command else f"{changed} {draw.choice(_AFTER)}"
    return changed


def run_stream(judge: Judge, requests: Sequence[StreamedRequest]) -> tuple[list[Scored], list[float]]:
    """Send a stream through an index that stores every request with its answer."""
    index, answers = SemanticIndex(judge, ENTRIES), [request.answer for request in requests]
    scored, seconds = [], []
    for at, request in enumerate(requests):
        scope, started = request.source.encode(), time.perf_counter()
        question = judge.question(request.text)
        match = None if question is None else index.find(scope, question)
        seconds.append(time.perf_counter() - started)
        if question is None:
            continue
        if match is not None:
            right = answers[int.from_bytes(match.key, "big")] == request.answer
            scored.append(Scored((request.source, request.intent), match.log_odds, match.similarity, right))
        index.add(scope, question, at.to_bytes(4, "big"))
    return scored, seconds


def calibrate(scored: Sequence[Scored], requests: int, most_error: float = 0.05) -> Calibration:
    """Return the calibration of a stream that `run_stream` scored."""
    wrong = sorted((one for one in scored if not one.right), key=lambda one: -one.log_odds)
    kept = max(0, allowed_errors(requests, most_error)) + 1
    clusters = Counter(one.intent for one in wrong[: max(1, int(_CLUSTERED * requests))]).values()
    effect = sum(count * count for count in clusters) / max(1, sum(clusters))
    values = tuple(round(one.log_odds, 5) for one in wrong[:kept])
    return Calibration(requests, values, most_error, max(1.0, round(effect, 3)))


def summarize(
    requests: Sequence[StreamedRequest], scored: Sequence[Scored], seconds: Sequence[float], threshold: float
) -> StreamResult:
    """Count hits and wrong hits above a threshold."""
    seen: set[tuple[object, ...]] = set()
    possible = 0
    for request in requests:
        possible += request.answer in seen
        seen.add(request.answer)
    hits = [one for one in scored if one.log_odds > threshold]
    total = max(1, len(requests))
    return StreamResult(
        requests=len(requests),
        oracle=possible / total,
        hits=len(hits) / total,
        wrong=sum(not one.right for one in hits) / total,
        lookup_us=1e6 * float(np.median(seconds)) if seconds else 0.0,
    )


def similarity_alone(requests: Sequence[StreamedRequest], judge: Judge, max_error: float) -> float:
    """Return the hits that a plain threshold on the similarity, chosen with hindsight, reaches at `max_error`."""
    scored: list[tuple[float, bool]] = []
    for source in dict.fromkeys(request.source for request in requests):
        own = [request for request in requests if request.source == source]
        vectors = np.stack([judge.vector(request.text) for request in own])
        for at in range(1, len(own)):
            similar = vectors[:at] @ vectors[at]
            best = int(similar.argmax())
            scored.append((float(similar[best]), own[best].answer == own[at].answer))
    scored.sort(key=lambda one: -one[0])
    wrong = np.cumsum([not right for _, right in scored])
    return float(np.searchsorted(wrong, max_error * len(requests), side="right")) / len(requests)
