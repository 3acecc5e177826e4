"""Converts the model's tokens to bytes and text, and text to tokens."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import llama_cpp.llama_cpp as native
import numpy as np
from numpy.typing import NDArray

from causeway_server.router.errors import EngineUnavailable, InvalidRequest, UnsupportedFeature
from causeway_server.router.reasoning import CLOSE, OPEN
from causeway_server.router.tool_calls.parser import TEXT_MARKS

from ...chat.sandbox import MARK
from . import bindings

_PIECE_BYTES = 1 << 16  # buffer for one token's text
_CONTROL = native.LLAMA_TOKEN_ATTR_CONTROL | native.LLAMA_TOKEN_ATTR_UNKNOWN
# Before the text, before the suffix, before the answer: the order in which every family with such tokens was trained.
_MIDDLE_TOKENS = (native.llama_vocab_fim_pre, native.llama_vocab_fim_suf, native.llama_vocab_fim_mid)
_TEXT_MARKS = TEXT_MARKS | {OPEN, CLOSE}  # control tokens whose text the parsers in `router` read

Tokens = NDArray[np.int32]


class Vocabulary:
    """Tables that are built when the model is loaded, so that a token's text is a list look-up. Thread-safe once built.

    `pieces`: the bytes of each token's text; empty for end, control and refusal tokens, which are never text. A control
    token that marks a tool call (Llama 3, Mistral, Phi) or a thought is text, for the parsers in `router`.
    `control_tokens`: control tokens that are never text; `marks`: control tokens that are text, by their text. `texts`:
    each token's text; None for one that is part of a character, or that needs handling (end, refusal). `guard`: first
    characters of control tokens; `bos_text`, `eos_text`: as the file names them; all for `chat.template.render`.
    """

    def __init__(self, model: bindings.Pointer, refuse: str = "") -> None:
        """Read the vocabulary of `model`. Raises EngineUnavailable if `refuse` ("": none) is not one token of it."""
        self.pointer: bindings.Pointer = native.llama_model_get_vocab(model)
        self.size = int(native.llama_vocab_n_tokens(self.pointer))
        self._buffer = ctypes.create_string_buffer(_PIECE_BYTES)
        self.pieces = [self._piece(token, special=False) for token in range(self.size)]
        self.end_tokens = frozenset(t for t in range(self.size) if native.llama_vocab_is_eog(self.pointer, t))
        kinds = (native.llama_vocab_get_attr(self.pointer, token) for token in range(self.size))
        controls = {t: self._piece(t, special=True).decode() for t, kind in enumerate(kinds) if kind & _CONTROL}
        self.marks = {text: token for token, text in controls.items() if text in _TEXT_MARKS}
        marks = {token: text.encode() for token, text in controls.items() if text in _TEXT_MARKS}
        self.control_tokens = tuple(token for token in controls if token not in marks)
        self.max_piece_bytes = max(len(self._piece(token, special=True)) for token in range(self.size))
        self._control_texts = tuple(filter(None, controls.values()))
        self.refuse_token = self._single_token(refuse) if refuse else None
        refuse_tokens = () if self.refuse_token is None else (self.refuse_token,)
        silent = (*self.end_tokens, *self.control_tokens, *refuse_tokens)
        self._silent_pieces = {token: self._piece(token, special=True) for token in silent}
        for token in silent:
            self.pieces[token] = b""
        for token, piece in marks.items():
            self.pieces[token] = piece
        self.texts = [
            None if token in self.end_tokens or token == self.refuse_token else _text(piece)
            for token, piece in enumerate(self.pieces)
        ]
        self.guard = "".join(sorted({text[0] for text in self._control_texts}))
        self.bos, self.eos = int(native.llama_vocab_bos(self.pointer)), int(native.llama_vocab_eos(self.pointer))
        self.bos_text, self.eos_text = self._named(model, "bos", self.bos), self._named(model, "eos", self.eos)
        middle = [int(token(self.pointer)) for token in _MIDDLE_TOKENS]
        self._middle_tokens = middle if min(middle) >= 0 else None
        self._adds_bos = bool(native.llama_vocab_get_add_bos(self.pointer)) and self.bos >= 0

    @classmethod
    def of_file(cls, path: Path) -> Vocabulary:
        """Read the vocabulary of a GGUF file, which stays open, without its weights. Raises EngineUnavailable."""
        return cls(bindings.load_model(path, vocab_only=True))

    def name(self, token: int) -> str:
        """Return a token as the vocabulary spells it, for templates (`bos_token`); "" for a negative id."""
        return self._piece(token, special=True).decode(errors="replace") if token >= 0 else ""

    def encode(
        self, text: str, *, special: bool, soft: Mapping[str, Tokens] | None = None, add_bos: bool = True
    ) -> Tokens:
        """Tokenise a prompt, with a leading beginning-of-sequence token where the model wants one.

        `special`: recognise control tokens in it, except those that a `MARK` interrupts (a caller's words). `soft`: ids
        of soft tokens, by the part of the text that they replace.
        """
        tokens: list[Tokens] = []
        for part in re.split(f"({'|'.join(map(re.escape, soft))})", text) if soft else [text]:
            if soft and part in soft:
                tokens.append(soft[part])
                continue
            pieces = self._split_at_marks(part) if special and MARK in part else [part]
            tokens += [self._tokenize(piece, special=special) for piece in pieces if piece]
        if add_bos and self._adds_bos and not (tokens and len(tokens[0]) and tokens[0][0] == self.bos):
            tokens.insert(0, np.array([self.bos], np.int32))
        return np.concatenate(tokens) if tokens else np.zeros(0, np.int32)

    def frame_middle(self, before: Tokens, suffix: str) -> Tokens:
        """Frame a prompt's tokens for an answer between `before` and the text `suffix`. Raises UnsupportedFeature."""
        if self._middle_tokens is None:
            raise UnsupportedFeature(
                "`suffix`: This model has no tokens for filling in the middle. Remove `suffix`.", param="suffix"
            )
        start = int(self._adds_bos and len(before) > 0 and before[0] == self.bos)
        prefix, suffix_mark, middle = self._middle_tokens
        after = self._tokenize(suffix, special=False)
        parts = (before[:start], [prefix], before[start:], [suffix_mark], after, [middle])
        return np.concatenate(parts).astype(np.int32)

    def validate(self, tokens: Sequence[int], param: str = "prompt") -> Tokens:
        """Check a caller's token ids, which are the parameter `param`. Raises InvalidRequest."""
        for index, token in enumerate(tokens):
            if not 0 <= token < self.size:
                raise InvalidRequest(
                    f"Token id {token} at {index} is unknown. Known ids: 0 to {self.size - 1}.", param=param
                )
        return np.array(tokens, np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        return b"".join(self.pieces[token] for token in tokens).decode(errors="replace")

    def detokenize(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, control tokens as the vocabulary spells them. Raises InvalidRequest."""
        found = self.validate(tokens, "tokens").tolist()
        return b"".join(self._silent_pieces.get(token, self.pieces[token]) for token in found).decode(errors="replace")

    def _split_at_marks(self, text: str) -> list[str]:
        """Split a text inside control tokens that a caller spells, so that no piece has one; drop all marks."""
        parts = text.split(MARK)
        unmarked = "".join(parts)
        pieces, start, at = [], 0, 0
        for part in parts[:-1]:
            at += len(part)
            # The mark stands behind the first character of a possible control token.
            if at > start and unmarked.startswith(self._control_texts, at - 1):
                pieces.append(unmarked[start:at])
                start = at
        return [*pieces, unmarked[start:]]

    def _named(self, model: bindings.Pointer, kind: str, token: int) -> str:
        """Return a token's text for templates, "" if unnamed: llama.cpp's default, 11, is a common word."""
        key = f"tokenizer.ggml.{kind}_token_id".encode()
        found = native.llama_model_meta_val_str(model, key, self._buffer, _PIECE_BYTES)
        return self.name(token) if found >= 0 else ""

    def _single_token(self, text: str) -> int:
        tokens = self._tokenize(text, special=True)
        if len(tokens) != 1:
            raise EngineUnavailable(f"The refusal token {text!r} is {len(tokens)} tokens of this model, not one.")
        return int(tokens[0])

    def _tokenize(self, text: str, *, special: bool) -> Tokens:
        raw = text.encode(errors="replace")
        room = len(raw) + 8
        while True:
            tokens = np.empty(room, np.int32)
            count = bindings.tokenize(self.pointer, raw, len(raw), tokens.ctypes.data, room, False, special)
            if count >= 0:
                return tokens[:count].copy()
            room = -count

    def _piece(self, token: int, *, special: bool) -> bytes:
        length = native.llama_token_to_piece(self.pointer, token, self._buffer, _PIECE_BYTES, 0, special)
        return ctypes.string_at(self._buffer, length) if length > 0 else b""


def _text(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None
