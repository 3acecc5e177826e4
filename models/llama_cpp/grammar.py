"""Grammars for one model's tokens: compiled once each, then followed by every sequence that they constrain.

llguidance works on bytes; its tokenizer here is llama.cpp's own over the tables of `Vocabulary`.
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Callable

import llama_cpp.llama_cpp as native
import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from router.errors import InvalidGrammar

from ..constraints.json_schema import LIMITS
from .native.vocabulary import Vocabulary

_KEPT = 64  # compiled grammars
_SPECIAL = b"\xff"  # before the name of a token that is never text (toktrie's own mark)


class GrammarCompiler:
    """Compiles grammars and keeps the newest. Thread-safe; llguidance compiles without the GIL."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # least recently used first

    def prepare(self) -> None:
        """Build the tokenizer, which takes a second for a large vocabulary; otherwise the first grammar does."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _tokenizer(self._vocabulary)

    def compile(self, grammar: str, *, keep: bool = True) -> GrammarState:
        """Return the state at the grammar's beginning.

        Args:
            grammar: in one of llguidance's forms: Lark, or JSON of `LLMatcher.grammar_from_json_schema`.
            keep: keep what was compiled for the next sequence with this grammar.

        Raises:
            InvalidGrammar: llguidance cannot read it.
        """
        self.prepare()
        assert self._tokenizer is not None
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is not None:
                self._compiled.move_to_end(grammar)
        if matcher is None:
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
            if keep:  # the first mask builds most of the lexer; here it delays no step
                matcher.compute_bitmask()
                matcher.compute_ff_tokens()
            if matcher.is_error():
                raise InvalidGrammar(f"The grammar cannot be used: {matcher.get_error()[:300]}")
            if not keep:
                return GrammarState(matcher, self._vocabulary)
            with self._lock:
                self._compiled[grammar] = matcher
                while len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
        return GrammarState(matcher.deep_copy(), self._vocabulary)


class GrammarState:
    """Where one sequence is in its grammar.

    `forced`: the tokens that must come next, whatever the model prefers.
    """

    __slots__ = ("_ends", "_mask", "_matcher", "_size", "forced")

    def __init__(self, matcher: LLMatcher, vocabulary: Vocabulary) -> None:
        self._matcher = matcher
        self._size = vocabulary.size
        self._ends = list(vocabulary.end_tokens)
        self._mask = np.zeros((vocabulary.size + 31) // 32, np.int32)
        self.forced: list[int] = matcher.compute_ff_tokens()

    @property
    def ended(self) -> bool:
        """Whether nothing but the answer's end may follow."""
        return bool(self._matcher.is_stopped() and self._matcher.is_accepting())

    def allows(self, token: int) -> bool:
        return bool(self._matcher.validate_tokens([token]) == 1)

    def allowed(self) -> NDArray[np.int64]:
        """Return the ids that may come next, ascending; none if the grammar cannot go on with this vocabulary."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")[: self._size]
        if not self._matcher.is_accepting():
            bits[self._ends] = 0  # where a grammar cannot go on, llguidance's mask has the end
        return np.flatnonzero(bits)

    def likeliest_end(self, row: NDArray[np.float32]) -> int:
        """Return the end token with the highest logit, for a grammar that has ended."""
        return max(self._ends, key=row.__getitem__)

    def accept(self, token: int) -> None:
        """Move on by a token that is allowed."""
        self._matcher.consume_token(token)
        if self.forced and self.forced[0] == token:
            del self.forced[0]
        if not self.forced:
            self.forced = self._matcher.compute_ff_tokens()

    def accept_all(self, tokens: list[int]) -> bool:
        """Move on by several tokens; False if the grammar does not allow them."""
        accepted = self._matcher.try_consume_tokens(tokens) == len(tokens)
        self.forced = self._matcher.compute_ff_tokens()
        return accepted


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
