"""The model's tokens as bytes and text, and text as tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import llama_cpp.llama_cpp as native
import numpy as np
from numpy.typing import NDArray

from router.errors import EngineUnavailable, InvalidRequest

from ...chat.template import MARK
from . import bindings

_LONGEST = 1 << 16  # bytes of one token's text
_GUARDED = native.LLAMA_TOKEN_ATTR_CONTROL | native.LLAMA_TOKEN_ATTR_UNKNOWN

Tokens = NDArray[np.int32]


class Vocabulary:
    """Tables made once at load, so that a token's text is one list look-up. Thread-safe after construction."""

    def __init__(self, model: bindings.Pointer, refuse: str = "") -> None:
        """`refuse`: the text of the model's refusal token, if it has one. Raises EngineUnavailable when it has not."""
        self.pointer: bindings.Pointer = native.llama_model_get_vocab(model)
        self.size = int(native.llama_vocab_n_tokens(self.pointer))
        self._buffer = ctypes.create_string_buffer(_LONGEST)
        self.pieces = [self._piece(token, special=False) for token in range(self.size)]  # bytes of each token's text
        self.ends = frozenset(t for t in range(self.size) if native.llama_vocab_is_eog(self.pointer, t))
        self.controls = tuple(t for t in range(self.size) if self._guarded(t))
        self.longest = max(len(self._piece(token, special=True)) for token in range(self.size))  # bytes
        self._control_texts = tuple(filter(None, (self._piece(t, special=True).decode() for t in self.controls)))
        self.refuse = self._single(refuse) if refuse else None
        # Never text: what closes an answer, what only structures a prompt, a refusal.
        for token in (*self.ends, *self.controls, *([] if self.refuse is None else [self.refuse])):
            self.pieces[token] = b""
        # None: not a text of its own (a part of a character), or a token that needs a look (an end, a refusal).
        self.texts = [
            None if t in self.ends or t == self.refuse else _text(piece) for t, piece in enumerate(self.pieces)
        ]
        self.guard = "".join(sorted({text[0] for text in self._control_texts}))
        self.bos = int(native.llama_vocab_bos(self.pointer))
        self._adds_bos = bool(native.llama_vocab_get_add_bos(self.pointer)) and self.bos >= 0

    def name(self, token: int) -> str:
        """A token as its vocabulary writes it, for templates (`bos_token`); "" for a negative id."""
        return self._piece(token, special=True).decode(errors="replace") if token >= 0 else ""

    @property
    def eos(self) -> int:
        return int(native.llama_vocab_eos(self.pointer))

    def encode(self, text: str, *, special: bool) -> Tokens:
        """Tokens of a prompt, led by the beginning-of-sequence token where the model wants one.

        `special`: control tokens are recognised in the text, except those that a `MARK` breaks up (a user's words).
        """
        pieces = self._split_at_marks(text) if special and MARK in text else [text]
        tokens = [self._encode(piece, special=special) for piece in pieces if piece]
        if self._adds_bos and not (tokens and len(tokens[0]) and tokens[0][0] == self.bos):
            tokens.insert(0, np.array([self.bos], np.int32))
        return np.concatenate(tokens) if tokens else np.zeros(0, np.int32)

    def check(self, tokens: Sequence[int]) -> Tokens:
        """Token ids given by a caller. Raises InvalidRequest for one that the model does not have."""
        for place, token in enumerate(tokens):
            if not 0 <= token < self.size:
                raise InvalidRequest(
                    f"token id {token} at {place}: this model has ids 0 to {self.size - 1}", param="prompt"
                )
        return np.array(tokens, np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode(errors="replace")

    def _split_at_marks(self, text: str) -> list[str]:
        """Cut where a user's words spell a control token, so that no piece has it whole; drop the other marks."""
        parts = text.split(MARK)
        plain = "".join(parts)
        pieces, start, at = [], 0, 0
        for part in parts[:-1]:
            at += len(part)
            # The mark stood behind the first letter of what may be a control token.
            if at > start and plain.startswith(self._control_texts, at - 1):
                pieces.append(plain[start:at])
                start = at
        return [*pieces, plain[start:]]

    def _single(self, text: str) -> int:
        tokens = self._encode(text, special=True)
        if len(tokens) != 1:
            raise EngineUnavailable(f"the refusal token {text!r} is {len(tokens)} tokens of this model, not one")
        return int(tokens[0])

    def _encode(self, text: str, *, special: bool) -> Tokens:
        raw = text.encode(errors="replace")
        room = len(raw) + 8
        while True:
            tokens = np.empty(room, np.int32)
            count = bindings.tokenize(self.pointer, raw, len(raw), tokens.ctypes.data, room, False, special)
            if count >= 0:
                return tokens[:count].copy()
            room = -count

    def _piece(self, token: int, *, special: bool) -> bytes:
        length = native.llama_token_to_piece(self.pointer, token, self._buffer, _LONGEST, 0, special)
        return ctypes.string_at(self._buffer, length) if length > 0 else b""

    def _guarded(self, token: int) -> bool:
        return bool(native.llama_vocab_get_attr(self.pointer, token) & _GUARDED)


def _text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None
