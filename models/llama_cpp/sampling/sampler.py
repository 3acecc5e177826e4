"""Sample the next token of one sequence: bias and penalties, grammar, then the best token or a drawn one.

Order: penalties and bias on the logits, top_k (first: the rest then works on few tokens), temperature, top_p, min_p,
draw. A plain greedy sequence needs no sampler: the engine takes the argmax of the row.
"""

from __future__ import annotations

import codecs
import ctypes
import secrets

import llama_cpp.llama_cpp as native
import numpy as np
from numpy.typing import NDArray

from router.errors import InvalidGrammar, InvalidRequest
from router.types import Sampling

from ..native import bindings
from ..native.vocabulary import Tokens, Vocabulary
from .confidence import LogitsRow
from .thinking_budget import ThinkingBudget

NO_TOKEN = -1
_TOP_K = 64  # default: beyond it is a small model's noise, and time
_RANDOM_SEED = 0xFFFFFFFF  # llama.h, LLAMA_DEFAULT_SEED: "choose one"
_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])  # llama_token_data


class TokenDataArray:
    """One llama_token_data_array over the whole vocabulary, which the engine's thread reuses for every sequence."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._ids = np.arange(vocabulary.size, dtype=np.int32)
        self._controls = np.array([t for t in vocabulary.control_tokens if t not in vocabulary.end_tokens], np.int64)
        self._table = np.empty(vocabulary.size, _CANDIDATE)
        self._array = native.llama_token_data_array()
        self._address = ctypes.addressof(self._array)
        self._one = native.llama_token_data()
        self._single = native.llama_token_data_array(data=ctypes.pointer(self._one), size=1)
        self._single_address = ctypes.addressof(self._single)

    def allows(self, grammar: bindings.Pointer, token: int) -> bool:
        """Return whether `token` may come next: the grammar checks one candidate instead of all."""
        self._one.id, self._one.logit = token, 1.0  # type: ignore[assignment]
        self._single.size, self._single.selected, self._single.sorted = 1, -1, False
        bindings.apply(grammar, self._single_address)
        return bool(self._one.logit == 1.0)

    def sample(self, row: LogitsRow, grammar: bindings.Pointer, chain: bindings.Pointer) -> int:
        """Return the best token (without `chain`) or a drawn one among those that the grammar allows, or NO_TOKEN."""
        table = self._table
        table["id"], table["logit"], table["p"] = self._ids, row, 0.0
        table["logit"][self._controls] = -np.inf
        array = self._array
        array.data = table.ctypes.data_as(native.llama_token_data_p)  # type: ignore[assignment]
        array.size, array.selected, array.sorted = len(table), -1, False
        bindings.apply(grammar, self._address)
        best = int(table["logit"].argmax())
        if table["logit"][best] == -np.inf:
            return NO_TOKEN
        if not chain:
            return best
        bindings.apply(chain, self._address)
        return int(array.data[array.selected].id)


class TokenSampler:
    """Owns the native sampler chain and grammar of one sequence; `close` frees them.

    `adjusts_logits`: `sample` changes the row it is given.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        candidates: TokenDataArray,
        sampling: Sampling,
        prompt: Tokens,
        gbnf: str = "",
        *,
        may_refuse: bool = False,
        answer_prefix: str = "",
        thinking: ThinkingBudget | None = None,
    ) -> None:
        """Compile the settings of one sequence.

        Args:
            vocabulary: the model's tokens.
            candidates: shared by all sequences of the engine.
            sampling: temperature, penalties and so on.
            prompt: its tokens, for the repetition penalty.
            gbnf: grammar with the root rule `root`; "" for none.
            may_refuse: the refusal token may come first, before what the grammar requires.
            answer_prefix: beginning of the grammar's text that stands in the prompt already; if the grammar does not
                allow it, the answer is unconstrained.
            thinking: ends a thought that becomes too long; only without a grammar.

        Raises:
            InvalidGrammar: llama.cpp refuses the grammar.
            InvalidRequest: `logit_bias` names a token that does not exist.
        """
        self._candidates = candidates
        self._thinking = thinking
        self._bias = _bias(sampling, vocabulary)
        self._penalties = _Penalties(sampling, prompt) if _penalises(sampling) else None
        self._controls = frozenset(vocabulary.control_tokens) - vocabulary.end_tokens
        self._grammar = _grammar(vocabulary, gbnf) if gbnf else 0
        self._chain = 0 if _is_greedy(sampling) else _chain(sampling)
        self._pieces, self._texts = vocabulary.pieces, vocabulary.texts
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._at_boundary = True  # the answer so far ends with a whole character
        self._allowed_first = vocabulary.refuse_token if may_refuse and not answer_prefix else None
        self._answer_prefix = vocabulary.encode(answer_prefix, special=False).tolist() if answer_prefix else []
        self.adjusts_logits = bool(self._grammar) or self._bias is not None or self._penalties is not None

    def sample(self, row: LogitsRow, context: bindings.Pointer, index: int) -> int:
        """Sample the token that follows batch index `index`.

        Args:
            row: its logits, changed in place.
            context: the llama_context that decoded the batch.
            index: the batch row.

        Returns:
            The token, or NO_TOKEN when the grammar allows none.
        """
        if self._answer_prefix:
            self._skip_answer_prefix()
        if self._penalties is not None:
            self._penalties.apply(row)
        if self._bias is not None:
            row[self._bias[0]] += self._bias[1]
        token = bindings.sample(self._chain, context, index) if self._chain else int(row.argmax())
        if not self._grammar or token == self._allowed_first:
            return token if self._thinking is None else self._thinking.choose(token)
        # The model mostly wants what the grammar allows: checking one token costs a hundredth of checking all.
        if token in self._controls or not self._candidates.allows(self._grammar, token):
            token = self._candidates.sample(row, self._grammar, self._chain)
        # llama.cpp's grammars accept bytes as a character that are not UTF-8 (overlong forms, surrogates).
        while token != NO_TOKEN and not self._continues_utf8(token):
            row[token] = -np.inf
            token = self._candidates.sample(row, self._grammar, self._chain)
        return token

    def accept(self, token: int) -> None:
        """Add `token`, which `sample` returned, to the answer."""
        allowed_first, self._allowed_first = self._allowed_first, None
        if self._grammar and token != allowed_first:
            bindings.accept(self._grammar, token)
            if not (self._at_boundary and self._texts[token] is not None):
                self._decoder.decode(self._pieces[token])
                self._at_boundary = not self._decoder.getstate()[0]
        if self._penalties is not None:
            self._penalties.count(token)

    def close(self) -> None:
        for sampler in (self._grammar, self._chain):
            if sampler:
                bindings.free_sampler(sampler)
        self._grammar = self._chain = 0

    def _skip_answer_prefix(self) -> None:
        """Advance the grammar past the beginning that stands in the prompt."""
        for token in self._answer_prefix:
            if not self._pieces[token]:
                continue  # a beginning-of-sequence token
            if not self._candidates.allows(self._grammar, token):
                bindings.free_sampler(self._grammar)
                self._grammar = 0
                break
            bindings.accept(self._grammar, token)
        self._answer_prefix = []

    def _continues_utf8(self, token: int) -> bool:
        """Return whether the token's bytes are valid UTF-8 after the answer so far."""
        if self._at_boundary and self._texts[token] is not None:
            return True
        state = self._decoder.getstate()
        try:
            self._decoder.decode(self._pieces[token])
        except UnicodeDecodeError:
            return False
        finally:
            self._decoder.setstate(state)
        return True


class _Penalties:
    """Presence and frequency over the answer (OpenAI's), repetition over prompt and answer (Keskar et al. 2019)."""

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
                f"no token {token}: this model has ids 0 to {vocabulary.size - 1}", param=f"logit_bias.{token}"
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


def _grammar(vocabulary: Vocabulary, gbnf: str) -> bindings.Pointer:
    grammar = bindings.init_grammar(vocabulary.pointer, gbnf.encode(), b"root")
    if not grammar:
        raise InvalidGrammar("llama.cpp cannot read the grammar")
    return grammar
