"""Encoding of prompts as tokens: the chat template, the tokenizer, and a cache of recent results.

A prompt is counted before it is answered (the policy's token signals), and n choices share one prompt: the cache makes
that one tokenisation.

Soft tokens are vectors in a prompt, each with an id that no token has, so that a prompt stays a list of ids. The prefix
cache compares ids. Equal vectors have equal ids, and different vectors never share one. `Places` gives the positions of
the tokens in a prompt with a vision model's images, and the runs of tokens that belong together.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from causeway_server.router.errors import ContextLengthExceeded, InvalidRequest, UnsupportedFeature
from causeway_server.router.types import Message

from ..chat.template import DEFAULT_TEMPLATE, render
from .native.vocabulary import Tokens, Vocabulary
from .protocol import Prompt, SoftRun, SoftTokens
from .scheduling.kv_cache import common_prefix

_KNOWN = 4096  # vectors whose ids are remembered
_PARTS = 3  # of a position that `SoftRun.positions` writes


class SequencePrompt(msgspec.Struct, frozen=True, eq=False):
    """A prompt as its sequence decodes it."""

    tokens: Tokens  # int32 [tokens], read-only; ids below 0 are soft tokens
    vectors: Mapping[int, NDArray[np.float32]] = {}  # [embedding dimensions] each, by ids of soft tokens
    placed: Mapping[int, SoftRun] = {}  # runs without consecutive positions, by their first vector's id
    system_tokens: int = 0  # the number of first tokens that may be stored as a file

    @property
    def text(self) -> Tokens:
        """The tokens without the soft ones."""
        return self.tokens[self.tokens >= 0] if self.vectors else self.tokens


class SoftTokenIds:
    """Gives out ids below 0. Thread-safe. `largest_run`: vectors in one batch; `positions_have_parts`: M-RoPE."""

    def __init__(self, dimensions: int, largest_run: int, *, positions_have_parts: bool) -> None:
        self._dimensions = dimensions
        self._largest_run = largest_run
        self._parts = positions_have_parts
        self._lock = threading.Lock()
        self._first_id = lru_cache(_KNOWN)(self._give_out)  # of the vectors that a marker stands for
        self._next = -1  # an id is never given out again: 2**31 of them are enough for years

    def assign(
        self, soft: Sequence[SoftTokens]
    ) -> tuple[dict[str, Tokens], dict[int, NDArray[np.float32]], dict[int, SoftRun]]:
        """Assign ids to a prompt's soft tokens: by marker, int32 [tokens], with a `SequencePrompt`'s `vectors` and
        `placed`.

        Raises InvalidRequest for bytes that are not the model's vectors, UnsupportedFeature for an image beyond a
        batch.
        """
        ids: dict[str, Tokens] = {}
        rows: dict[int, NDArray[np.float32]] = {}
        placed: dict[int, SoftRun] = {}
        for one in soft:
            vectors, marker = self._rows(one), one.marker
            with self._lock:
                first = self._first_id(marker, len(vectors))
            negative_ids = np.array(range(first, first - len(vectors), -1), np.int32)
            rows.update(zip(negative_ids.tolist(), vectors, strict=True))
            if one.runs:
                self._check(one.runs, len(vectors))
            pieces, start = list[Tokens](), 0
            for run in one.runs or (SoftRun(vectors=len(vectors)),):
                if run.positions or (run.whole and run.vectors):
                    placed[int(negative_ids[start])] = run
                pieces += [np.array(run.tokens, np.int32), negative_ids[start : start + run.vectors]]
                start += run.vectors
            ids[marker] = np.concatenate(pieces)
        return ids, rows, placed

    def _give_out(self, _marker: str, count: int) -> int:
        first, self._next = self._next, self._next - count
        return first

    def _rows(self, soft: SoftTokens) -> NDArray[np.float32]:
        size = 4 * self._dimensions
        if not soft.vectors or len(soft.vectors) % size:
            raise InvalidRequest(
                f"{len(soft.vectors)} bytes of soft tokens are not a whole number of vectors of {self._dimensions} "
                "values."
            )
        rows = np.frombuffer(soft.vectors, "<f4").reshape(-1, self._dimensions)
        if not np.isfinite(rows).all():
            raise InvalidRequest("A soft token has a value that is not finite.")
        return rows

    def _check(self, runs: Sequence[SoftRun], vectors: int) -> None:
        if sum(run.vectors for run in runs) != vectors:
            raise InvalidRequest(
                f"The prompt has {vectors} vectors of soft tokens, but its runs name "
                f"{sum(run.vectors for run in runs)}."
            )
        for run in runs:
            if min(run.tokens, default=0) < 0:
                raise InvalidRequest(f"A run of soft tokens follows the unknown token {min(run.tokens)}.")
            if len(run.positions) != (4 * _PARTS * run.vectors if self._parts else 0):
                raise InvalidRequest("The positions of the soft tokens do not have the form that this model needs.")
            if run.whole and run.vectors > self._largest_run:
                raise UnsupportedFeature(
                    f"An image is {run.vectors} soft tokens, which this model reads in one batch, but a "
                    f"batch has only {self._largest_run}. Set engine.batch_tokens to {run.vectors}."
                )


class _Span(NamedTuple):
    """A run in the prompt: index and position of its first token. Behind it, positions are `fewer` less."""

    start: int
    position: int
    fewer: int
    run: SoftRun

    @property
    def end(self) -> int:
        return self.start + self.run.vectors


class Places:
    """The runs of soft tokens in a prompt (int32 [tokens]), which determine the positions of its tokens.

    `placed`: the runs by the id of their first soft token.
    """

    def __init__(self, prompt: Tokens, placed: Mapping[int, SoftRun]) -> None:
        self._spans: list[_Span] = []
        fewer = 0
        for index in np.flatnonzero(np.isin(prompt, list(placed))).tolist() if placed else ():
            run, position = placed[int(prompt[index])], index - fewer
            fewer += run.vectors - run.span if run.positions else 0
            self._spans.append(_Span(index, position, fewer, run))
        self._starts = [one.start for one in self._spans]

    def position(self, index: int) -> int:
        """Return the position of a token that is not within a run."""
        before = self._at(index - 1)
        return index if before is None else index - before.fewer

    def run(self, start: int, count: int) -> tuple[int, bool]:
        """Return how many of `count` soft tokens from `start` share a run, and whether they attend to each other."""
        placed = self._at(start)
        if placed is not None and start < placed.end:
            return placed.end - start, placed.run.whole
        following = bisect_right(self._starts, start)
        return min([count, *(one - start for one in self._starts[following : following + 1])]), False

    def offsets(self, start: int, end: int) -> tuple[int, NDArray[np.int32] | None]:
        """Return the position of the first soft token from `start` to `end`, and the others' offsets from it."""
        placed = self._at(start)
        if placed is None or start >= placed.end:
            return self.position(start), None
        if not placed.run.positions:
            return placed.position + start - placed.start, None
        positions = np.frombuffer(placed.run.positions, "<i4").reshape(_PARTS, placed.run.vectors)
        return placed.position, positions[:, start - placed.start : end - placed.start]

    def cut(self, tokens: int) -> int:
        """Return `tokens`, or a smaller number if the last of them is inside a run that continues after it."""
        placed = self._at(tokens)
        return placed.start if placed is not None and placed.start < tokens < placed.end else tokens

    def _at(self, index: int) -> _Span | None:
        """Return the last run that begins at `index` or before."""
        found = bisect_right(self._starts, index)
        return self._spans[found - 1] if found else None


_CACHE_BYTES = 4 * 1024 * 1024
_PROMPT_BYTES, _TOKEN_BYTES = 1024, 16  # cost of a cached prompt: its objects; each token, with its text
_SYSTEM_ROLES = ("system", "developer")
SHORTEN = "Shorten it, or ask a model with more context."
_LONG = 1024 * 1024  # characters; tokenising more takes long enough to delay other callers


class PromptTooLong(ContextLengthExceeded):
    """The prompt is too long to be tokenised; `at_least` is a lower bound of its tokens."""

    def __init__(self, at_least: int, context: int) -> None:
        super().__init__(f"the prompt has at least {at_least} tokens, this model's context is {context}. {SHORTEN}")
        self.at_least = at_least


class PromptEncoder:
    """Renders and tokenises prompts. Thread-safe. Raises InvalidRequest if the model cannot take one."""

    def __init__(self, vocabulary: Vocabulary, template: str, context: int, soft: SoftTokenIds) -> None:
        """Prepare the encoder of a model. `template`: chat template, "" for none; `context`: tokens of a sequence."""
        self._soft = soft
        self._vocabulary = vocabulary
        self._context = context
        self._template = template or DEFAULT_TEMPLATE
        self._bos, self._eos = vocabulary.bos_text, vocabulary.eos_text
        self._lock = threading.Lock()
        self._cache: OrderedDict[Prompt, Tokens] = OrderedDict()  # least recently used first
        self._cache_bytes = 0

    def count(self, prompt: Prompt) -> int:
        """Return the number of tokens, or a lower bound for a prompt that is far too long."""
        try:
            return len(self.tokens(prompt))
        except PromptTooLong as error:
            return error.at_least

    def encode(self, prompt: Prompt) -> SequencePrompt:
        """Return the prompt's tokens, and the vectors of its soft tokens."""
        if not prompt.soft:
            return SequencePrompt(self.tokens(prompt))
        ids, vectors, placed = self._soft.assign(prompt.soft)
        return SequencePrompt(self._encode(prompt, ids), vectors, placed)

    def tokens(self, prompt: Prompt) -> Tokens:
        """Return the prompt's tokens, read-only int32 [tokens]."""
        if prompt.soft:  # whose vectors are too large to be kept
            return self.encode(prompt).tokens
        with self._lock:
            if (cached := self._cache.get(prompt)) is not None:
                self._cache.move_to_end(prompt)
                return cached
        tokens = self._encode(prompt)
        tokens.flags.writeable = False
        self._store(prompt, tokens)
        return tokens

    def system_tokens(self, prompt: Prompt) -> int:
        """Return how many of a chat's first tokens depend only on its system messages and tools."""
        system = tuple(itertools.takewhile(lambda message: message.role in _SYSTEM_ROLES, prompt.messages))
        if not system or len(system) == len(prompt.messages):
            return 0
        try:
            # Nothing in what two unlike users have in common is a user's.
            one, other = (
                self.tokens(Prompt(messages=(*system, Message("user", text)), tools=prompt.tools))
                for text in ("A?", "7.")
            )
        except InvalidRequest:
            return 0
        return min(common_prefix(one, other), common_prefix(one, self.tokens(prompt)))

    def _encode(self, prompt: Prompt, soft: Mapping[str, Tokens] | None = None) -> Tokens:
        if prompt.messages:
            text = render(
                self._template,
                prompt.messages,
                prompt.tools,
                bos=self._bos,
                eos=self._eos,
                guard=self._vocabulary.guard,
            )
            self._check_length(text)
            tokens = self._vocabulary.encode(text + prompt.answer_start, special=True, soft=soft)
        elif prompt.text is not None:
            self._check_length(prompt.text)
            tokens = self._vocabulary.encode(
                prompt.text, special=prompt.parse_special, soft=soft, add_bos=prompt.add_bos
            )
        else:
            tokens = self._vocabulary.validate(prompt.tokens)
        if prompt.suffix is not None:
            tokens = self._vocabulary.frame_middle(tokens, prompt.suffix)
        if not len(tokens):
            raise InvalidRequest("The prompt is empty.", param="messages" if prompt.messages else "prompt")
        if soft and not all(ids.min() in tokens for ids in soft.values()):
            raise InvalidRequest("This model's chat template leaves soft tokens out of the prompt.", param="messages")
        if soft and tokens[-1] < 0:
            raise InvalidRequest("The prompt ends in soft tokens: text must follow them.", param="messages")
        return tokens

    def _check_length(self, text: str) -> None:
        """Refuse a long text if its characters alone prove that it does not fit, by a token's maximum length."""
        at_least = len(text) // max(1, self._vocabulary.max_piece_bytes)
        if len(text) > _LONG and at_least > self._context:
            raise PromptTooLong(at_least, self._context)

    def _store(self, prompt: Prompt, tokens: Tokens) -> None:
        if _cost(tokens) > _CACHE_BYTES:
            return
        with self._lock:
            if prompt not in self._cache:
                self._cache[prompt] = tokens
                self._cache_bytes += _cost(tokens)
            while self._cache_bytes > _CACHE_BYTES:
                _, evicted = self._cache.popitem(last=False)
                self._cache_bytes -= _cost(evicted)


def _cost(tokens: Tokens) -> int:
    return _PROMPT_BYTES + _TOKEN_BYTES * len(tokens)
