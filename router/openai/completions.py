"""Legacy completions: the body of `POST /v1/completions` → `Request`, and the logprobs of their answers.

The logprobs are parallel lists of tokens, logprobs, and offsets in the text. A token that holds a part of a character
is written, as by OpenAI, as ``bytes:\\xe2\\x82``.
"""

from __future__ import annotations

import codecs
import math
import re
from typing import Final

import msgspec

from ..errors import InvalidRequest, UnsupportedFeature
from ..types import Chunk, Request, RoutingHints, TokenAlternative, TokenLogprob
from .request_body import generation_fields, includes_usage, load, too_deep, validate
from .wire import WireCompletion

Prompts = tuple[str | tuple[int, ...], ...]

_FIELDS: Final = frozenset(WireCompletion.__struct_fields__)
LOWEST_LOGPROB: Final = -9999.0
"""The logprob that OpenAI writes for an almost impossible token, because JSON has no infinity."""
_BYTES_PREFIX: Final = "bytes:"
_BYTES: Final = re.compile(_BYTES_PREFIX + r"(\\x[0-9a-f]{2})+")
_encode = msgspec.json.Encoder().encode
_utf8 = codecs.getincrementaldecoder("utf-8")


def parse_completion(body: bytes, hints: RoutingHints) -> Request:
    """Parse and validate a legacy completion request. Arguments and errors as for `parse_chat`."""
    try:
        document = load(body)
        wire = validate(document, WireCompletion)
        return Request(
            kind="completion",
            prompts=prompts_of(wire.prompt, "prompt", empty_text=True),
            max_tokens=wire.max_tokens,
            n=_choices(wire),
            include_usage=includes_usage(wire),
            logprobs=wire.logprobs,
            echo=wire.echo is True,
            suffix=wire.suffix or None,
            **generation_fields(wire, document, _FIELDS, hints),
        )
    except RecursionError:
        raise too_deep() from None


def _choices(wire: WireCompletion) -> int:
    n = wire.n or 1
    if wire.best_of not in (None, n):
        raise UnsupportedFeature(
            f"`best_of` is {wire.best_of}, but every choice that is made is returned. Send only `n`.", param="best_of"
        )
    return n


def prompts_of(wire: str | list[str | int | list[int]], field: str, *, empty_text: bool) -> Prompts:
    """Return the prompts of a text, several texts, token ids (one prompt), or several lists of token ids. Raises
    InvalidRequest if both are mixed, or a prompt is empty (an empty text is valid if `empty_text`).
    """
    if isinstance(wire, str):
        wire = [wire]
    kinds = {type(item) for item in wire}
    if len(kinds) != 1:
        raise InvalidRequest(f"`{field}` mixes text and token ids. Send all of one kind.", param=field)
    if kinds == {int}:
        return (tuple([item for item in wire if isinstance(item, int)]),)
    prompts: list[str | tuple[int, ...]] = []
    for at, item in enumerate(wire):
        if not item and not (item == "" and empty_text):
            param = f"{field}[{at}]" if len(wire) > 1 else field
            raise InvalidRequest(f"`{param}` is empty. Send some text or token ids.", param=param)
        prompts.append(item if isinstance(item, str) else tuple(item) if isinstance(item, list) else ())
    return tuple(prompts)


# --- logprobs --------------------------------------------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]  # None or NaN if there is no logprob
    top_logprobs: list[dict[str, float | None]] | None
    text_offset: list[int]


class TokenOffsets:
    """The offset of each token in its choice's text, in characters. Parts of one character share its offset."""

    def __init__(self, chunk: Chunk, offset: int) -> None:
        """Begin with the first chunk that has tokens. `offset`: the number of characters sent before it."""
        self._decoder = _utf8(errors="replace")
        self._next = offset + _echo_length(chunk)

    def begin(self, token: TokenLogprob) -> int:
        """Return the offset at which the next token begins."""
        start = self._next
        self._next += len(self._decoder.decode(_bytes_of(token)))
        return start


def _echo_length(chunk: Chunk) -> int:
    """Return the length of the echoed prompt before the tokens; a stop string may have cut the last token's text."""
    tokens = b"".join(map(_bytes_of, chunk.logprobs)).decode(errors="replace")
    for cut in range(len(tokens)):
        if chunk.text.endswith(tokens[: len(tokens) - cut]):
            return max(0, len(chunk.text) - len(tokens) + cut)
    return 0


def _bytes_of(token: TokenLogprob | TokenAlternative) -> bytes:
    return token.token.encode(errors="replace") if token.bytes is None else bytes(token.bytes)


def _text_of(token: TokenLogprob | TokenAlternative) -> str:
    """Return the token's text, or, as OpenAI writes it, ``bytes:\\xe2\\x82`` for a token that is not whole UTF-8."""
    if token.bytes is None or bytes(token.bytes) == token.token.encode(errors="replace"):
        return token.token
    return _BYTES_PREFIX + "".join(f"\\x{byte:02x}" for byte in token.bytes)


def completion_logprobs(tokens: tuple[TokenLogprob, ...], k: int, offsets: TokenOffsets) -> bytes:
    return _encode(
        CompletionLogprobs(
            [_text_of(token) for token in tokens],
            [finite(token.logprob) for token in tokens],
            [_alternatives(token) for token in tokens] if k else None,
            [offsets.begin(token) for token in tokens],
        )
    )


def _alternatives(token: TokenLogprob) -> dict[str, float | None]:
    """Return the alternatives with the chosen token included, as OpenAI does: there may be one more than requested."""
    best: dict[str, float | None] = {_text_of(top): finite(top.logprob) for top in token.top}
    best[_text_of(token)] = finite(token.logprob)
    return best


def finite(logprob: float) -> float:
    """Replace an infinity by the lowest logprob. NaN, for none (first token of an echo), is encoded as null."""
    return LOWEST_LOGPROB if math.isinf(logprob) else logprob


def read_token_text(name: str) -> tuple[str, tuple[int, ...] | None]:
    """Return text and bytes of a completion's token; OpenAI writes ``bytes:\\xe2\\x82`` for what is not UTF-8."""
    if not _BYTES.fullmatch(name):
        return name, None
    raw = bytes.fromhex(name.removeprefix(_BYTES_PREFIX).replace("\\x", ""))
    return raw.decode(errors="replace"), tuple(raw)
