"""A running job: its prompt, the tokens generated so far, and the text that each new token adds to the answer."""

from __future__ import annotations

import codecs
from collections.abc import Iterable

import msgspec
import numpy as np
from numpy.typing import NDArray

from causeway_server.router.types import Confidence, FinishReason, TokenLogprob

from ..native.vocabulary import Tokens, Vocabulary
from ..native.weights import Adapter
from ..prompts import Places, SequencePrompt
from ..protocol import Emission, SequenceRequest
from ..sampler import NO_TOKEN, ConfidenceMeter, LogitsRow, TokenSampler, token_logprob
from .kv_cache import SequenceSlot
from .speculation import PromptLookup

_decoder = codecs.getincrementaldecoder("utf-8")


class TextStream:
    """The text of one sequence. Once `stop`, the stop string that ended it, is set, nothing more may be fed."""

    __slots__ = ("_decode", "_held", "_max_stop", "_stops", "received", "shown", "stop")

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._max_stop = max(map(len, self._stops), default=0)
        self._decode = _decoder(errors="replace")
        self._held = ""
        self.received = 0  # characters fed so far
        self.shown = 0  # characters returned so far
        self.stop = ""

    def feed(self, piece: bytes) -> str:
        """Add a token's bytes; return the text that can be shown now."""
        return self._show(self._decode.decode(piece))

    def finish(self) -> str:
        """Return the text left at the end: held-back text without a stop string; half a character becomes U+FFFD."""
        text = self._show(self._decode.decode(b"", final=True))
        held, self._held = self._held, ""
        self.shown += len(held)
        return text + held

    @property
    def clean(self) -> bool:
        """Whether no text is held back and none can be, so that a token adds exactly its own text."""
        return not self._stops and not self._decode.getstate()[0]

    def _show(self, text: str) -> str:
        self.received += len(text)
        if self._stops:
            text = self._held + text
            ends = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
            if ends:
                (end, self.stop), self._held = min(ends), ""
                text = text[:end]
            else:
                keep = self._possible_stop(text)
                text, self._held = text[: len(text) - keep], text[len(text) - keep :]
        self.shown += len(text)
        return text

    def _possible_stop(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that is the beginning of a stop string."""
        for length in range(min(self._max_stop - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0


class Sequence:
    """The state of one job.

    `slot` is set while the sequence has KV cells; `pending_tokens` must be decoded into them before the next token is
    sampled. `plain`: a token adds exactly its own text (no logprobs, confidence, stop strings, or partial character),
    so `accept_plain` may handle it.
    """

    def __init__(
        self,
        job: SequenceRequest,
        prompt: SequencePrompt,
        max_tokens: int,
        sampler: TokenSampler | None,
        vocabulary: Vocabulary,
        deadline: float,
        adapter: Adapter | None = None,
    ) -> None:
        """Begin a job. `sampler` None: plain greedy decoding; `deadline`: monotonic seconds."""
        self._vectors = prompt.vectors
        self.places = Places(prompt.tokens, prompt.placed)
        self.adapter = adapter
        self.system_tokens = prompt.system_tokens
        self.job = job
        self.id = job.id
        self.prompt = self.pending_tokens = prompt.tokens
        self.text_tokens = prompt.text
        self.max_tokens = max_tokens
        self.sampler = sampler
        self.deadline = deadline
        self.slot: SequenceSlot | None = None
        self.lookup: PromptLookup | None = None  # from the first token on, if the engine speculates
        self.generated: list[int] = []  # tokens, without an end token
        self.cached_tokens = 0  # of the prompt, found in the cache
        self.finished = False
        self.refused = False
        self._vocabulary = vocabulary
        self._stream = TextStream(job.stop)
        self._logprobs = job.logprobs
        self._confidence_meter = (
            ConfidenceMeter(job.confidence_tokens, vocabulary.refuse_token) if job.confidence_tokens > 0 else None
        )
        self._held_logprobs: list[tuple[int, TokenLogprob]] = []  # (where its text begins, logprob) not yet emitted
        self._reported = 0  # tokens in emissions so far
        self._end_tokens = 0  # 1: the model ended the answer; its end token counts, as vLLM and llama-server count it
        self.plain = not self.needs_logits and self._stream.clean

    @property
    def remaining(self) -> int:
        """Number of tokens until the limit."""
        return self.max_tokens - len(self.generated)

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far, the end token included."""
        return len(self.generated) + self._end_tokens

    @property
    def forced(self) -> list[int]:
        """The next tokens as far as the grammar determines them, without the last token that the limit allows."""
        return [] if self.sampler is None else self.sampler.forced[: max(0, self.remaining - 1)]

    @property
    def needs_logits(self) -> bool:
        """Whether logprobs or confidence are computed after sampling, which must then leave the logits unchanged."""
        return self._logprobs is not None or self._confidence_meter is not None

    @property
    def measures_end(self) -> bool:
        """Whether the confidence covers the end token. Calibrations are fitted on answers that include it."""
        return self._confidence_meter is not None and not self._confidence_meter.done

    def text_run(self, start: int) -> int:
        """Return the number of text tokens to decode next, from `start` to the end or the next soft token."""
        pending = self.pending_tokens
        return len(pending) - start if not self._vectors else _run(pending[start:] < 0)

    def soft_run(self, start: int) -> tuple[int, bool]:
        """Return the number of soft tokens to decode next, and whether they need a batch without others."""
        if not self._vectors:
            return 0, False
        count = _run(self.pending_tokens[start:] >= 0)
        return self.places.run(start, count)

    def vectors_of(self, start: int, end: int) -> list[NDArray[np.float32]]:
        """Return the vectors of the soft tokens from `start` to before `end`."""
        return [self._vectors[token] for token in self.pending_tokens[start:end].tolist()]

    def restart(self) -> None:
        """Reset the sequence after a preemption: all tokens so far have to be decoded again."""
        self.slot = None
        self.pending_tokens = np.concatenate([self.prompt, np.array(self.generated, np.int32)])

    def tokens_in_slot(self) -> Tokens:
        """Return the tokens in the slot's cells: all but the last generated one, which is not decoded yet."""
        generated = np.array(self.generated, np.int32)
        return np.concatenate([self.prompt, generated])[: self.slot.length if self.slot else 0]

    def echo_prompt(self) -> Emission | None:
        """Return the prompt as the first emission, if the job asks for it."""
        if not self.job.echo:
            return None
        text = self._vocabulary.decode(self.text_tokens.tolist())
        return Emission(self.id, text) if text else None

    def accept(self, token: int, row: LogitsRow) -> Emission | None:
        """Add a sampled token or NO_TOKEN; return what to emit, None if its text is held back. `row`: its logits."""
        if token == NO_TOKEN:
            return self.fail("invalid_schema", "no token of this model continues the grammar")
        confidence = self._observe(token, row)
        if token in self._vocabulary.end_tokens and not self.job.ignore_eos:
            self._end_tokens = 1
            return self._finish("stop", confidence, self._stream.finish())
        self.generated.append(token)
        if token == self._vocabulary.refuse_token:
            self.refused = True
            if self.job.refusal == "end":
                return self._finish("stop", confidence, self._stream.finish())
        text = self._stream.feed(self._vocabulary.pieces[token])
        if self._stream.stop:
            return self._finish("stop", confidence, text)
        if len(self.generated) >= self.max_tokens:
            return self._finish("length", confidence, text + self._stream.finish())
        self.plain = not self.needs_logits and self._stream.clean
        if not text and confidence is None:
            return None
        return Emission(self.id, text, self._unreported(), self._release_logprobs(final=False), confidence)

    def accept_plain(self, token: int, text: str) -> Emission:
        """Add a token as `accept` does, for a sequence that is `plain` and a token that is not the last one."""
        self.generated.append(token)
        made = len(self.generated)
        tokens, self._reported = made - self._reported, made
        return Emission(self.id, text, tokens)

    def end(self) -> Emission:
        """End an answer whose grammar allows only the end token. The token is counted although no step samples it."""
        self._end_tokens = 1
        return self._finish("stop", None, self._stream.finish())

    def fail(self, code: str, detail: str) -> Emission:
        """End with an error."""
        return msgspec.structs.replace(self._finish(None, None, ""), error=code, detail=detail)

    def close(self) -> None:
        """Free the native sampler."""
        if self.sampler is not None:
            self.sampler.close()
            self.sampler = None

    def _observe(self, token: int, row: LogitsRow) -> Confidence | None:
        """Record the logprobs of a token and update the confidence."""
        if self._logprobs is not None and token not in self._vocabulary.end_tokens:
            entry = token_logprob(row, token, self._logprobs, self._vocabulary)
            self._held_logprobs.append((self._stream.received, entry))
        if self._confidence_meter is None:
            return None
        confidence = self._confidence_meter.observe(row, token)
        if self._confidence_meter.done:
            self._confidence_meter = None
        return confidence

    def _finish(self, reason: FinishReason | None, confidence: Confidence | None, text: str) -> Emission:
        self.finished = True
        return Emission(
            self.id,
            text,
            self._unreported(),
            self._release_logprobs(final=True),
            confidence,
            finish_reason=reason,
            prompt_tokens=len(self.prompt),
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
            refused=self.refused,
            stop=self._stream.stop,
        )

    def _unreported(self) -> int:
        made = self.completion_tokens
        tokens, self._reported = made - self._reported, made
        return tokens

    def _release_logprobs(self, *, final: bool) -> tuple[TokenLogprob, ...]:
        """Return the logprobs of the tokens whose text is emitted; at the end, drop those of a stop string."""
        if not self._held_logprobs:
            return ()
        shown = self._stream.shown
        held = self._stream.received > shown
        released = [entry for start, entry in self._held_logprobs if start < shown or not held]
        if final or not held:
            self._held_logprobs = []
        else:
            self._held_logprobs = [pair for pair in self._held_logprobs if pair[0] >= shown]
        return tuple(released)


def _run(ends: NDArray[np.bool_]) -> int:
    """Return the number of elements before the first True, or of all if there is none."""
    return int(ends.argmax()) if ends.any() else len(ends)
