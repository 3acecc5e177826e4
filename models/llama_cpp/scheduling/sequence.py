"""One job while it runs: its prompt, what it answered so far, and what each new token becomes."""

from __future__ import annotations

import numpy as np

from router.types import Confidence, FinishReason, TokenLogprob

from ..native.vocabulary import Tokens, Vocabulary
from ..protocol import Emission, Job
from ..sampling.confidence import ConfidenceMeter, LogitsRow, token_logprob
from ..sampling.sampler import NO_TOKEN, TokenSampler
from ..sampling.text_stream import TextStream
from .kv_cache import SequenceSlot


class Sequence:
    """State of one job. `line` is set while it has cells; `feed` is what has to be in them before the next token.

    `quick` tokens need no look: their text is the table's and nothing else is asked about them.
    """

    __slots__ = (
        "_entries",
        "_logprobs",
        "_stream",
        "_surety",
        "_told",
        "_vocabulary",
        "cached",
        "chooser",
        "deadline",
        "ended",
        "feed",
        "id",
        "job",
        "limit",
        "line",
        "made",
        "prompt",
        "quick",
        "refused",
        "tokens",
    )

    def __init__(
        self,
        job: Job,
        prompt: Tokens,
        limit: int,
        chooser: TokenSampler | None,
        vocabulary: Vocabulary,
        deadline: float,
    ) -> None:
        """`limit`: the most tokens to make. `chooser` None: plain greedy. `deadline`: monotonic seconds."""
        self.job = job
        self.id = job.id
        self.prompt = prompt
        self.feed = prompt
        self.limit = limit
        self.chooser = chooser
        self.deadline = deadline
        self.line: SequenceSlot | None = None
        self.tokens: list[int] = []
        self.made = 0  # tokens, an end token not counted
        self.cached = 0  # tokens of the prompt that were in the cache
        self.ended = False
        self.refused = False
        self._vocabulary = vocabulary
        self._stream = TextStream(job.stop)
        self._logprobs = job.logprobs
        self._surety = ConfidenceMeter(job.confidence_tokens, vocabulary.refuse) if job.confidence_tokens > 0 else None
        self._entries: list[tuple[int, TokenLogprob]] = []  # (where its text begins, logprob) not yet told
        self._told = 0  # tokens in emissions so far
        self.quick = self._is_quick()

    @property
    def watched(self) -> bool:
        """The logits are looked at after the choice, so they must not be changed by it."""
        return self._logprobs is not None or self._surety is not None

    def restart(self) -> None:
        """Its cells were taken away: everything up to here has to be decoded again."""
        self.line = None
        self.feed = np.concatenate([self.prompt, np.array(self.tokens, np.int32)])

    def cells(self) -> Tokens:
        """The tokens that its cells hold: all but the last one made, which was not decoded yet."""
        made = np.array(self.tokens, np.int32)
        return np.concatenate([self.prompt, made])[: self.line.length if self.line else 0]

    def begin(self) -> Emission | None:
        """What is told before the first token: the prompt, if it was asked back."""
        if not self.job.echo:
            return None
        text = self._vocabulary.decode(self.prompt.tolist())
        return Emission(self.id, text) if text else None

    def take(self, token: int, row: LogitsRow) -> Emission | None:
        """A token was chosen at `row` (the model's own logits). What to tell, None for nothing yet."""
        if token == NO_TOKEN:
            return self.fail("invalid_schema", "no token of this model can go on with what the grammar asks for")
        confidence = self._look(token, row)
        if token in self._vocabulary.ends and not self.job.ignore_eos:
            return self._end("stop", confidence, self._stream.finish())
        self.tokens.append(token)
        self.made += 1
        if token == self._vocabulary.refuse:
            self.refused = True
            if self.job.refusal == "end":
                return self._end("stop", confidence, self._stream.finish())
        text = self._stream.feed(self._vocabulary.pieces[token])
        if self._stream.stopped:
            return self._end("stop", confidence, text)
        if self.made >= self.limit:
            return self._end("length", confidence, text + self._stream.finish())
        self.quick = self._is_quick()
        if not text and confidence is None:
            return None
        return self._tell(text, confidence)

    def quick_take(self, token: int, text: str) -> Emission:
        """As `take`, for a token that needs no look; the engine has checked that it is not the last."""
        self.tokens.append(token)
        self.made += 1
        tokens, self._told = self.made - self._told, self.made
        return Emission(self.id, text, tokens)

    def fail(self, code: str, detail: str) -> Emission:
        self.ended = True
        return Emission(
            self.id,
            error=code,
            detail=detail,
            prompt_tokens=len(self.prompt),
            completion_tokens=self.made,
            cached_tokens=self.cached,
        )

    def close(self) -> None:
        if self.chooser is not None:
            self.chooser.close()
            self.chooser = None

    def _look(self, token: int, row: LogitsRow) -> Confidence | None:
        """Logprobs and confidence of this token, before it is known what becomes of it."""
        if self._logprobs is not None and token not in self._vocabulary.ends:
            entry = token_logprob(row, token, self._logprobs, self._vocabulary)
            self._entries.append((self._stream.made, entry))
        if self._surety is None:
            return None
        confidence = self._surety.observe(row, token)
        if self._surety.done:
            self._surety = None
        return confidence

    def _tell(self, text: str, confidence: Confidence | None) -> Emission:
        tokens, self._told = self.made - self._told, self.made
        return Emission(self.id, text, tokens, self._ready(final=False), confidence)

    def _end(self, reason: FinishReason, confidence: Confidence | None, text: str) -> Emission:
        self.ended = True
        tokens, self._told = self.made - self._told, self.made
        return Emission(
            self.id,
            text,
            tokens,
            self._ready(final=True),
            confidence,
            finish_reason=reason,
            prompt_tokens=len(self.prompt),
            completion_tokens=self.made,
            cached_tokens=self.cached,
            refused=self.refused,
        )

    def _ready(self, *, final: bool) -> tuple[TokenLogprob, ...]:
        """Logprobs of tokens whose text is out; at the end those of a stop string, which never is, are dropped."""
        if not self._entries:
            return ()
        held = self._stream.made > self._stream.shown
        shown = self._stream.shown
        ready = [entry for start, entry in self._entries if start < shown or not held]
        self._entries = [] if final or not held else [pair for pair in self._entries if pair[0] >= shown]
        return tuple(ready)

    def _is_quick(self) -> bool:
        return self._logprobs is None and self._surety is None and self._stream.clean
