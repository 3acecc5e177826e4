"""The `logprobs` tensor of Triton's vLLM backend: JSON, one `{token id: {logprob, rank, decoded_token}}` per token.

The chosen token comes first, then the best ones by rank (which may include it). We do not know token ids, so our keys
only tell entries apart. The key `bytes` is ours, written only for a token that is not UTF-8 by itself; vLLM has none.
"""

from __future__ import annotations

import msgspec

from router.types import TokenAlternative, TokenLogprob


class _Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    logprob: float
    rank: int | None = None
    decoded_token: str | None = None
    bytes: tuple[int, ...] | None = None


_decoder = msgspec.json.Decoder(list[dict[str, _Entry]] | None)
_LOWEST = -9999.0
"""JSON has no -inf; OpenAI's servers write this value for it."""


def encode_logprobs(tokens: tuple[TokenLogprob, ...]) -> bytes:
    return msgspec.json.encode([_entries(token) for token in tokens])


def decode_logprobs(document: bytes, alternatives: int) -> tuple[TokenLogprob, ...]:
    """Decode with at most `alternatives` per token. Raises msgspec.DecodeError."""
    return tuple(_token(entries, alternatives) for entries in _decoder.decode(document) or () if entries)


def _entries(token: TokenLogprob) -> dict[str, _Entry]:
    ranks = {_name(one): rank for rank, one in enumerate(token.top, 1)}
    chosen = _Entry(
        logprob=max(token.logprob, _LOWEST),
        rank=ranks.get(_name(token), len(token.top) + 1),
        decoded_token=token.token,
        bytes=_odd_bytes(token),
    )
    entries = {"0": chosen}
    for rank, one in enumerate(token.top, 1):
        if _name(one) != _name(token):
            entries[str(rank)] = _Entry(max(one.logprob, _LOWEST), rank, one.token, _odd_bytes(one))
    return entries


def _name(token: TokenLogprob | TokenAlternative) -> tuple[str, tuple[int, ...] | None]:
    return token.token, token.bytes


def _odd_bytes(token: TokenLogprob | TokenAlternative) -> tuple[int, ...] | None:
    return None if token.bytes is None or bytes(token.bytes) == token.token.encode() else token.bytes


def _token(entries: dict[str, _Entry], count: int) -> TokenLogprob:
    alternatives = [_alternative(entry) for entry in entries.values()]
    by_rank = sorted(
        zip((entry.rank or 0 for entry in entries.values()), alternatives, strict=True), key=lambda pair: pair[0]
    )
    chosen = alternatives[0]
    top = tuple(one for _, one in by_rank[:count])
    return TokenLogprob(token=chosen.token, logprob=chosen.logprob, bytes=chosen.bytes, top=top)


def _alternative(entry: _Entry) -> TokenAlternative:
    text = entry.decoded_token or ""
    return TokenAlternative(token=text, logprob=max(entry.logprob, _LOWEST), bytes=entry.bytes or tuple(text.encode()))
