"""Sampling of a token from one row of logits, with its log-probability and confidence.

Log-probabilities, alternatives and confidence are computed from the model's own distribution, before temperature,
penalties, bias and grammar. Natural logarithms.

Sampling: bias and penalties, grammar, then the best token or a drawn one. A token that the grammar forces is taken
without reading the logits. Otherwise the model's own choice is tried first, since the grammar mostly allows it; only if
it does not, the tokens that the grammar excludes are masked.

Order: penalties and bias on the logits, top_k (first: the rest then works on few tokens), temperature, top_p, min_p,
draw. A plain greedy sequence needs no sampler: the engine takes the argmax of the row.

A thought that has reached its budget is ended: the end mark replaces the tokens with which it would have continued.

Grammars are compiled once each, and followed by every sequence that they constrain. llguidance works on bytes; its
tokenizer here is llama.cpp's own over the tables of `Vocabulary`.
"""

from __future__ import annotations

import ctypes
import math
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache, partial

import llama_cpp.llama_cpp as native
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from causeway_server.router.errors import InvalidGrammar, InvalidRequest
from causeway_server.router.reasoning import CLOSE, OPEN, closed_thought
from causeway_server.router.types import Confidence, Sampling, TokenAlternative, TokenLogprob

from ..constraints.grammars import LIMITS
from .native import bindings
from .native.vocabulary import Tokens, Vocabulary
from .protocol import SequenceRequest

_KEPT = 64  # compiled grammars
_SPECIAL = b"\xff"  # before the name of a token that is never text (toktrie's own mark)


class GrammarCompiler:
    """Compiles grammars and caches the newest ones. Thread-safe; llguidance compiles without the GIL."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._kept = lru_cache(_KEPT)(partial(self._matcher, warm=True))

    def prepare(self) -> LLTokenizer:
        """Build the tokenizer now, not with the first grammar: it takes a second for a large vocabulary."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _tokenizer(self._vocabulary)
            return self._tokenizer

    def compile(self, grammar: str, *, keep: bool = True) -> GrammarState:
        """Return a grammar's initial state, of Lark or `LLMatcher`'s JSON; `keep` caches it. Raises InvalidGrammar."""
        matcher = self._kept(grammar).deep_copy() if keep else self._matcher(grammar)
        return GrammarState(matcher, self._vocabulary)

    def _matcher(self, grammar: str, *, warm: bool = False) -> LLMatcher:
        matcher = LLMatcher(self.prepare(), grammar, log_level=0, limits=LIMITS)
        if warm:  # the first mask builds most of the lexer; here it delays no step
            matcher.compute_bitmask()
            matcher.compute_ff_tokens()
        if matcher.is_error():
            raise InvalidGrammar(f"The grammar cannot be used: {matcher.get_error()[:300]}")
        return matcher


class GrammarState:
    """The state of a sequence in its grammar. `forced`: the tokens that must come next, whatever the model predicts."""

    __slots__ = ("_ends", "_mask", "_matcher", "_size", "forced")

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._size = vocabulary.size
        self._ends = list(vocabulary.end_tokens)
        self._mask = np.zeros((vocabulary.size + 31) // 32, np.int32)
        self.forced: list[int] = matcher.compute_ff_tokens()

    @property
    def ended(self) -> bool:
        """Whether the answer must end here."""
        return bool(self._matcher.is_stopped() and self._matcher.is_accepting())

    def allows(self, token: int) -> bool:
        return bool(self._matcher.validate_tokens([token]) == 1)

    def allowed(self) -> NDArray[np.int64]:
        """Return the ids that may come next, ascending; empty if no token of this vocabulary continues the grammar."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")[: self._size]
        if not self._matcher.is_accepting():
            bits[self._ends] = 0  # where a grammar cannot go on, llguidance's mask has the end
        return np.flatnonzero(bits)

    def likeliest_end(self, row: NDArray[np.float32]) -> int:
        """Return the end token with the highest logit, for a grammar that has ended."""
        return max(self._ends, key=row.__getitem__)

    def accept(self, token: int) -> None:
        """Advance by an allowed token."""
        self._matcher.consume_token(token)
        if self.forced and self.forced[0] == token:
            del self.forced[0]
        if not self.forced:
            self.forced = self._matcher.compute_ff_tokens()


def _tokenizer(vocabulary: Vocabulary) -> LLTokenizer:
    tokens = [
        piece or _SPECIAL + vocabulary.name(token).encode(errors="replace")
        for token, piece in enumerate(vocabulary.pieces)
    ]
    tokenize = ctypes.cast(native._lib.llama_tokenize, ctypes.c_void_p).value  # noqa: SLF001 - its address
    build: Callable[..., LLTokenizer] = getattr(LLTokenizer, "from_llamacpp")  # noqa: B009 - absent from its stub
    return build(
        tokens=tokens,
        vocab_ptr=vocabulary.pointer,
        tokenize_fptr=tokenize,
        eos_token=sorted(vocabulary.end_tokens),
        slices=None,
    )


LogitsRow = NDArray[np.float32]  # logits of one position, [vocabulary]
_OPEN, _CLOSE = OPEN.encode(), CLOSE.encode()
NO_TOKEN = -1
_TOP_K = 64  # default: beyond it is a small model's noise, and time
_RANDOM_SEED = 0xFFFFFFFF  # llama.h, LLAMA_DEFAULT_SEED: "choose one"


def log_sum_exp(row: LogitsRow) -> float:
    """Return log(sum(exp(row))): a logit less this is a log-probability."""
    top = float(row.max())
    return top + math.log(float(np.exp(row - top).sum()))


def token_logprob(row: LogitsRow, token: int, best: int, vocabulary: Vocabulary) -> TokenLogprob:
    """Return the log-probability of `token`, and the `best` likeliest tokens with theirs."""
    total, pieces = log_sum_exp(row), vocabulary.pieces
    top: list[int] = []
    if best:
        best = min(best, len(row))
        candidates = np.argpartition(row, -best)[-best:]
        top = candidates[np.argsort(row[candidates])[::-1]].tolist()
    alternatives = tuple(
        TokenAlternative(pieces[other].decode(errors="replace"), float(row[other]) - total, tuple(pieces[other]))
        for other in top
    )
    piece = pieces[token]
    return TokenLogprob(piece.decode(errors="replace"), float(row[token]) - total, tuple(piece), alternatives)


class ConfidenceMeter:
    """The running confidence over the first tokens of an answer.

    score = (1 - refusal) · exp(mean logprob), refusal = p(refusal token) at the first position: the geometric mean of
    the sampled tokens' probabilities, times the probability that the model does not refuse.
    """

    __slots__ = ("_entropy", "_least", "_logprob", "_margin", "_refusal", "_refuse_token", "_remaining", "_tokens")

    def __init__(self, tokens: int, refuse_token: int | None) -> None:
        """Observe the first `tokens` tokens. `refuse_token`: None if the model has none."""
        self._remaining = tokens
        self._refuse_token = refuse_token
        self._tokens = 0
        self._logprob = self._margin = self._entropy = self._refusal = self._least = 0.0

    @property
    def done(self) -> bool:
        return self._remaining <= 0

    def observe(self, row: LogitsRow, token: int) -> Confidence:
        """Add one position: its logits, float32 [vocabulary], and the token sampled there."""
        logprobs = row - np.float32(log_sum_exp(row))
        probabilities = np.exp(logprobs)
        if len(probabilities) > 1:
            second, first = np.partition(probabilities, -2)[-2:].tolist()
        else:
            second, first = 0.0, float(probabilities[0])
        if not self._tokens and self._refuse_token is not None:
            self._refusal = min(1.0, float(probabilities[self._refuse_token]))
        self._tokens += 1
        self._remaining -= 1
        logprob = float(logprobs[token])
        self._logprob += logprob
        self._least = min(self._least, logprob)
        self._margin += first - second
        self._entropy -= float(np.dot(probabilities, logprobs))
        n = self._tokens
        mean = self._logprob / n
        score = (1.0 - self._refusal) * math.exp(min(0.0, mean))
        return Confidence(n, score, mean, self._margin / n, max(0.0, self._entropy / n), self._refusal, self._least)


class ThinkingBudget:
    """The thinking budget of one sequence: the end mark replaces the first token beyond it, and more if necessary, so
    that for the model its thought is complete, and it begins the answer.
    """

    def __init__(self, vocabulary: Vocabulary, job: SequenceRequest) -> None:
        """Take the budget of `job`: `thinking_tokens`, and from `thinking` whether the prompt ends in a thought."""
        self._pieces = vocabulary.pieces
        self._ends = vocabulary.end_tokens
        self._left = job.thinking_tokens or 0
        end: list[int] = vocabulary.encode(closed_thought("open"), special=True).tolist()
        self._end = [token for token in end if token != vocabulary.bos]
        self._forced: list[int] = []
        self._text = b""  # the beginning until it is decided, then the last bytes
        self._thinks = job.thinking == "open"
        self._over = False

    def choose(self, token: int) -> int:
        """Return the next token: `token`, which the model chose, or a token of the end mark."""
        if self._forced:
            return self._forced.pop(0)
        if self._over:
            return token
        if token < 0 or token in self._ends:
            self._over = True
            return token
        self._text += self._pieces[token]
        if not self._thinks:
            start = self._text.lstrip()
            self._thinks = start.startswith(_OPEN)
            self._over = len(start) >= len(_OPEN) and not self._thinks
            if not self._thinks:
                return token
        if _CLOSE in self._text:
            self._over = True
        elif self._left <= 0:
            self._over = True
            self._forced = self._end[1:]
            return self._end[0]
        self._left -= 1
        self._text = self._text[-len(_CLOSE) :]
        return token


class TokenSampler:
    """A sequence's native sampler chain, which `close` frees. `adjusts_logits`: `sample` changes its row."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        sampling: Sampling,
        prompt: Tokens,
        grammar: GrammarState | Future[GrammarState] | None = None,
        *,
        may_refuse: bool = False,
        thinking: ThinkingBudget | None = None,
    ) -> None:
        """Compile the settings of one sequence. Raises InvalidRequest if `logit_bias` names an unknown token.

        Args:
            prompt: The prompt's tokens, for the repetition penalty.
            grammar: Constrains the answer: in its initial state, or being compiled while the prompt is prefilled.
            may_refuse: The refusal token may come first, before what the grammar requires.
            thinking: Ends a thought that becomes too long; only without a grammar.
        """
        self._thinking = thinking
        self._bias = _bias(sampling, vocabulary)
        self._penalties = _Penalties(sampling, prompt) if _penalises(sampling) else None
        self._grammar = grammar if isinstance(grammar, GrammarState) else None
        self._compiling = None if isinstance(grammar, GrammarState) else grammar
        self._chain = 0 if _is_greedy(sampling) else _chain(sampling)
        self._allowed_first = vocabulary.refuse_token if may_refuse else None
        self.adjusts_logits = bool(self._bias or self._penalties or (grammar and self._chain))

    @property
    def forced(self) -> list[int]:
        """The next tokens, as far as the grammar determines them."""
        return [] if self._grammar is None or self._allowed_first is not None else self._grammar.forced

    @property
    def ended(self) -> bool:
        """Whether the grammar allows only the answer's end."""
        return self._grammar is not None and self._allowed_first is None and self._grammar.ended

    def sample(self, row: LogitsRow, context: bindings.Pointer, index: int) -> int:
        """Sample the token after batch row `index`; NO_TOKEN when the grammar allows none.

        `row`: its logits, changed in place; `context`: the llama_context that decoded the batch.
        """
        if self._compiling is not None:
            self._grammar, self._compiling = self._compiling.result(), None
        if forced := self.forced:
            return forced[0]
        if self._grammar is not None and self.ended:
            return self._grammar.likeliest_end(row)
        if self._penalties is not None:
            self._penalties.apply(row)
        if self._bias is not None:
            row[self._bias[0]] += self._bias[1]
        token = bindings.sample(self._chain, context, index) if self._chain else int(row.argmax())
        if self._grammar is None or token == self._allowed_first:
            return token if self._thinking is None else self._thinking.choose(token)
        if self._grammar.allows(token):
            return token
        allowed = self._grammar.allowed()
        if not len(allowed):
            return NO_TOKEN
        if not self._chain:
            return int(allowed[row[allowed].argmax()])
        logits = row[allowed]
        row.fill(-np.inf)
        row[allowed] = logits
        return bindings.sample(self._chain, context, index)

    def accept(self, token: int) -> None:
        """Add `token`, which `sample` returned, to the answer."""
        allowed_first, self._allowed_first = self._allowed_first, None
        if self._grammar is not None and token != allowed_first and not self._grammar.ended:
            self._grammar.accept(token)
        if self._penalties is not None:
            self._penalties.count(token)

    def close(self) -> None:
        if self._chain:
            bindings.free_sampler(self._chain)
        self._chain = 0


class _Penalties:
    """Presence and frequency penalties over the answer (OpenAI's), repetition over both (Keskar et al. 2019)."""

    def __init__(self, sampling: Sampling, prompt: Tokens) -> None:
        self._presence = sampling.presence_penalty or 0.0
        self._frequency = sampling.frequency_penalty or 0.0
        self._repeat = sampling.repeat_penalty or 1.0
        self._counts: dict[int, int] = {}
        self._prompt = np.unique(prompt) if self._repeat != 1.0 else np.zeros(0, np.int32)

    def count(self, token: int) -> None:
        self._counts[token] = self._counts.get(token, 0) + 1

    def apply(self, row: LogitsRow) -> None:
        generated = np.fromiter(self._counts, np.int64, len(self._counts))
        if self._repeat != 1.0:
            seen = np.union1d(generated, self._prompt)
            logits = row[seen]
            row[seen] = np.where(logits > 0, logits / self._repeat, logits * self._repeat)
        if len(generated):
            counts = np.fromiter(self._counts.values(), np.float32, len(self._counts))
            row[generated] -= np.float32(self._presence) + np.float32(self._frequency) * counts


def is_plain_greedy(sampling: Sampling) -> bool:
    """Return whether the token is the argmax of the model's own logits."""
    return _is_greedy(sampling) and not sampling.logit_bias and not _penalises(sampling)


def _is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature == 0.0 or sampling.top_k == 1


def _penalises(sampling: Sampling) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty) or sampling.repeat_penalty not in (None, 1.0)


def _bias(sampling: Sampling, vocabulary: Vocabulary) -> tuple[NDArray[np.int64], NDArray[np.float32]] | None:
    if not sampling.logit_bias:
        return None
    tokens = [token for token, _ in sampling.logit_bias]
    for token in tokens:
        if not 0 <= token < vocabulary.size:
            raise InvalidRequest(
                f"Token {token} not found: this model has ids 0 to {vocabulary.size - 1}.", param=f"logit_bias.{token}"
            )
    return np.array(tokens, np.int64), np.array([bias for _, bias in sampling.logit_bias], np.float32)


def _chain(sampling: Sampling) -> bindings.Pointer:
    params = native.llama_sampler_chain_default_params()
    params.no_perf = True
    chain = bindings.chain_init(params)
    top_k = _TOP_K if sampling.top_k is None else sampling.top_k
    if top_k > 0:
        bindings.chain_add(chain, bindings.init_top_k(top_k))
    bindings.chain_add(chain, bindings.init_temp(1.0 if sampling.temperature is None else sampling.temperature))
    if sampling.top_p is not None and sampling.top_p < 1.0:
        bindings.chain_add(chain, bindings.init_top_p(sampling.top_p, 1))
    if sampling.min_p:
        bindings.chain_add(chain, bindings.init_min_p(sampling.min_p, 1))
    seed = secrets.randbits(31) if sampling.seed is None else sampling.seed % _RANDOM_SEED
    bindings.chain_add(chain, bindings.init_dist(seed))
    return chain
