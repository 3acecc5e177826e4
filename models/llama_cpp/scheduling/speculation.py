"""Prompt-lookup speculation: if text repeats, the tokens that followed its earlier occurrence are decoded as drafts.

A draft is accepted only as far as the model samples the same tokens, so the distribution of answers is unchanged.
Saxena 2023, "Prompt Lookup Decoding"; Leviathan et al. 2023 for the verification.

Drafts are made if they are expected to pay: each new token is compared with the prediction, whether it was drafted or
not, and the duration of steps is recorded by their number of rows.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol

import msgspec

from ..native.vocabulary import Tokens

MAX_DRAFT = 15  # tokens of one sequence and step
MAX_DRAFTS = 31  # of all sequences together
_LENGTHS = (3, 7, 11, MAX_DRAFT)
_BLOCK = 4  # rows: llama.cpp's matrix kernels take so many at once, and the rest one by one
_GRAM = 3  # tokens that must have occurred before
_RUN = 6  # right predictions in a row, from which on text is taken for a copy
_DECAY = 0.95  # of older predictions in the acceptance
_PRIORS = ((1.0, 1.0), (19.0, 1.0))  # (right, wrong) predictions assumed: at first, in a copy
_GAIN = 1.05  # a batch with drafts must be this much better
_NEWEST = 0.5  # weight of a slower measurement; a faster one counts whole, since other load only slows down
_AGING = 0.998  # of a cost that ruled a draft out: it is measured again some day
_MARGINAL = 0.25  # guessed cost of another row, as a share of the first


class PromptLookup:
    """Predicts the next tokens of one sequence from its prompt and its answer.

    `acceptance`: the estimated probability that a predicted token is the next one; text that has been predicted for a
    while (a copy) has its own estimate, so that coincidences elsewhere do not lower it.
    """

    __slots__ = ("_ends", "_hits", "_misses", "_run", "_source", "_tokens")

    def __init__(self, tokens: Tokens) -> None:
        """Begin after `tokens`, the prompt."""
        self._tokens: list[int] = tokens.tolist()
        self._ends: dict[tuple[int, ...], int] = {}  # the last place behind each gram but the newest
        self._source = 0  # place of the predicted token; 0: none
        self._hits, self._misses = [0.0, 0.0], [0.0, 0.0]  # outside of copies, in them
        self._run = 0  # right predictions in a row
        grams = zip(*(self._tokens[at:] for at in range(_GRAM)), strict=False)
        for end, gram in enumerate(grams, _GRAM):
            self._source = self._ends.get(gram, 0)
            self._ends[gram] = end

    @property
    def acceptance(self) -> float:
        copying = self._run >= _RUN
        right, wrong = _PRIORS[copying]
        hits, misses = self._hits[copying] + right, self._misses[copying] + wrong
        return hits / (hits + misses)

    def append(self, token: int) -> None:
        """Add the next token of the answer."""
        tokens, source = self._tokens, self._source
        right = bool(source) and tokens[source] == token
        if source:
            copying = self._run >= _RUN
            self._hits[copying] = self._hits[copying] * _DECAY + right
            self._misses[copying] = self._misses[copying] * _DECAY + (not right)
        self._run = self._run + 1 if right else 0
        tokens.append(token)
        gram = tuple(tokens[-_GRAM:])
        # A source that was right is followed, also where its grams occur more than once.
        self._source = source + 1 if right else self._ends.get(gram, 0)
        self._ends[gram] = len(tokens)

    def draft(self, limit: int) -> list[int]:
        """Return at most `limit` predicted tokens."""
        return self._tokens[self._source : self._source + limit] if self._source else []


class Drafting(Protocol):
    """The properties of a sequence that drafts need."""

    lookup: PromptLookup | None

    @property
    def remaining(self) -> int: ...

    @property
    def forced(self) -> list[int]: ...


class Draft(msgspec.Struct):
    """Draft tokens of the decoding sequence with this `index`; `row`: row of the first one in the batch."""

    index: int
    tokens: list[int]
    row: int = 0


def forced_drafts(decoding: Sequence[Drafting], room: int) -> list[Draft]:
    """Return the tokens that grammars force next: accepted for certain, each saves a step (jump-forward)."""
    drafts: list[Draft] = []
    room = min(room, MAX_DRAFTS)
    for index, sequence in enumerate(decoding):
        if room > 0 and (tokens := sequence.forced[:room]):
            drafts.append(Draft(index, tokens))
            room -= len(tokens)
    return drafts


class DraftPlanner:
    """Chooses the drafts that maximise the expected tokens per second of all sequences together, and counts them."""

    def __init__(self) -> None:
        self._costs: dict[int, float] = {}  # seconds of a step by its rows
        self.drafted = self.accepted = 0

    def record(self, rows: int, step_s: float) -> None:
        """Record the duration of a step without prefill."""
        known = self._costs.get(rows, step_s)
        self._costs[rows] = min(step_s, known + _NEWEST * (step_s - known))

    def plan(self, decoding: Sequence[Drafting], room: int) -> list[Draft]:
        """Return the drafts of the next step, of at most `room` tokens together."""
        drafts = [
            (draft, lookup.acceptance)
            for index, sequence in enumerate(decoding)
            if (lookup := sequence.lookup) is not None
            and (draft := Draft(index, lookup.draft(min(MAX_DRAFT, sequence.remaining - 1)))).tokens
        ]
        running = len(decoding)
        if not drafts or running not in self._costs:
            return []
        best, rate = list[int](), _GAIN * running / self._costs[running]
        ruled_out: list[int] = []
        for longest in _LENGTHS:
            lengths = [min(longest, len(draft.tokens)) for draft, _ in drafts]
            # Whole blocks of rows, at the expense of the newest sequence's draft.
            lengths[-1] = max(1, lengths[-1] - (running + sum(lengths)) % _BLOCK)
            if sum(lengths) > min(room, MAX_DRAFTS):
                break
            gained = sum(_expected(one[1], length) for one, length in zip(drafts, lengths, strict=True))
            value = (running + gained) / self._cost(running, running + sum(lengths))
            if value > rate:
                best, rate = lengths, value
            else:
                ruled_out.append(running + sum(lengths))
        if not best:
            for rows in ruled_out:
                if rows in self._costs:
                    self._costs[rows] = max(self._costs[running], self._costs[rows] * _AGING)
            return []
        for (draft, _), length in zip(drafts, best, strict=True):
            del draft.tokens[length:]
        return [draft for draft, _ in drafts]

    def count(self, drafted: int, accepted: int) -> None:
        """Record the result of one draft."""
        self.drafted += drafted
        self.accepted += accepted

    def _cost(self, running: int, rows: int) -> float:
        """Return the duration in seconds of a step with `rows` rows: measured, or interpolated from similar sizes."""
        if (known := self._costs.get(rows)) is not None:
            return known
        sizes = sorted(self._costs)
        at = bisect_left(sizes, rows)
        below = sizes[at - 1]
        if at < len(sizes):
            above = sizes[at]
            share = (rows - below) / (above - below)
            return self._costs[below] + share * (self._costs[above] - self._costs[below])
        return self._costs[below] + _MARGINAL * (rows - below) * self._costs[running] / running


def _expected(acceptance: float, tokens: int) -> float:
    """Return the expected number of accepted tokens of a draft; a token can only be accepted after accepted ones."""
    return acceptance * (1 - acceptance**tokens) / (1 - acceptance)
