"""Answers drawn at random from what a schema's grammar allows, byte by byte: every way out of the schema is taken."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from causeway_server.models.constraints.grammars import LIMITS, framed_grammar

CORPUS: dict[str, dict[str, Any]] = {
    f"{path.stem}-{name}": schema
    for path in sorted((Path(__file__).parent / "schemas").glob("*.json"))
    for name, schema in json.loads(path.read_text()).items()
}
"""What pydantic, zod and an OpenAPI generator emit for 60 models."""
END = 256
_TOKENS = 400  # an answer that is longer is cut
_CLOSING = b'"]}'


class _Bytes:
    """Single bytes, and some whole characters and words, so that more than ASCII is drawn."""

    eos_token_id, bos_token_id, special_token_ids = END, None, (END,)
    tokens = (
        *(bytes([byte]) for byte in range(256)),
        b"\xff<end>",
        *(w.encode() for w in ("é", "٣", "👍", "true", "null")),
    )

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


TOKENS = _Bytes.tokens
TOKENIZER = LLTokenizer(TokenizerWrapper(_Bytes()), n_vocab=len(TOKENS), slices=[])


def matcher(schema: object) -> LLMatcher:
    """Return the matcher of a JSON schema at its beginning."""
    made = LLMatcher(TOKENIZER, framed_grammar(json.dumps(schema)), log_level=0, limits=LIMITS)
    assert not made.is_error(), made.get_error()
    return made


def accepts(schema: object, value: object) -> bool:
    """Return whether the compact JSON of a value is a whole answer."""
    raw = json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    made = matcher(schema)
    return bool(made.try_consume_tokens(list(raw)) == len(raw) and made.is_accepting())


def draw(start: LLMatcher, chance: Random) -> str | None:
    """Return an answer; None for one that was cut. Characters that close something become likelier with time."""
    state, written = start.deep_copy(), b""
    mask = np.zeros((len(TOKENS) + 31) // 32, np.int32)
    for step in range(_TOKENS):
        state.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(TOKENS)]).tolist()
        assert allowed, written
        if END in allowed and (len(allowed) == 1 or chance.random() < 0.3):
            return written.decode()
        others = [token for token in allowed if token != END]
        closing = [token for token in others if TOKENS[token] in _CLOSING]
        token = chance.choice(closing if closing and chance.random() < 0.05 + step / 100 else others)
        assert state.consume_token(token)
        written += TOKENS[token]
    return None


def refused(schema: object, draws: int, seed: int = 1) -> list[str]:
    """Return those of so many answers that `jsonschema`, formats included, does not accept by the schema's draft."""
    start, chance = matcher(schema), Random(seed)
    draft = validator_for(schema, default=Draft202012Validator)
    validator = draft(schema, format_checker=draft.FORMAT_CHECKER)
    answers = filter(None, (draw(start, chance) for _ in range(draws)))
    return [answer for answer in answers if not validator.is_valid(json.loads(answer))]
