"""The token with which the rest of a shortened answer is asked for.

Gateways keep nothing: the token itself holds what was said so far, encrypted and signed (Fernet,
https://github.com/fyi/spec/blob/master/Spec.md: AES-128-CBC, HMAC-SHA256 and the time), with keys that all gateways
read from one file. It is good for one tenant and one question, and for a while.

What continues: one choice of plain text. The prompt is rendered as before and the text so far follows it, so a model
that answers greedily goes on as if it had never been cut, except where its tokenizer splits the text another way than
the model wrote it. Tools, schemas, stop strings, penalties and several choices have a state that the text does not
show: such answers are never shortened.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from models.chat.template import MARK
from router.decision.cache_key import fingerprint
from router.errors import ConfigError, InvalidRequest, PermissionDenied
from router.types import Request

from ..config.chat_format import escape_special_tokens
from ..config.tiers import Tier

PARAM = "causeway.continue"
_SCOPE = b"continue"
_VERSION = 1


class PartialAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What was said before the cut."""

    tier: str
    text: str
    tokens: int


class _Sealed(msgspec.Struct, frozen=True, array_like=True):
    version: int
    tenant: str
    question: bytes  # the request's fingerprint
    so_far: PartialAnswer


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_Sealed)


class ContinueTokens:
    """`wall_clock` is unix time, s: gateways and their restarts share it."""

    def __init__(self, keys: MultiFernet, ttl_s: float, *, wall_clock: Callable[[], float] = time.time) -> None:
        self._keys = keys
        self._ttl_s = ttl_s
        self._wall_clock = wall_clock

    def seal(self, tenant: str, request: Request, so_far: PartialAnswer) -> str:
        sealed = _ENCODER.encode(_Sealed(_VERSION, tenant, question_digest(request), so_far))
        return self._keys.encrypt_at_time(sealed, int(self._wall_clock())).decode()

    def open(self, tenant: str, request: Request) -> PartialAnswer:
        """What the token of `request` holds. Raises InvalidRequest, or PermissionDenied for another tenant's."""
        try:
            plain = self._keys.decrypt_at_time(request.resume.encode(), math.ceil(self._ttl_s), int(self._wall_clock()))
            sealed = _DECODER.decode(plain)
        except (InvalidToken, UnicodeEncodeError, msgspec.DecodeError):
            raise InvalidRequest(
                f"`{PARAM}` is no token of ours, or has expired. Ask the question anew.", param=PARAM
            ) from None
        if sealed.tenant != tenant:
            raise PermissionDenied(f"`{PARAM}` was given to somebody else.", param=PARAM)
        if sealed.version != _VERSION or sealed.question != question_digest(request):
            raise InvalidRequest(
                f"`{PARAM}` belongs to another question. Send it with the very request that was cut.", param=PARAM
            )
        return sealed.so_far


def load_continue_tokens(
    key_file: str, ttl_s: float, *, wall_clock: Callable[[], float] = time.time
) -> ContinueTokens | None:
    """None without a file. Raises ConfigError."""
    if not key_file:
        return None
    where = "degradation.continue_key_file"
    try:
        lines = Path(key_file).read_text(encoding="ascii").split()
        keys = [Fernet(line) for line in lines]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key_file}: {error}", where=where) from error
    if not keys:
        raise ConfigError(f"{key_file} has no key", where=where)
    return ContinueTokens(MultiFernet(keys), ttl_s, wall_clock=wall_clock)


def question_digest(request: Request) -> bytes:
    """The same for the request that was cut and for the one that asks for the rest."""
    return fingerprint(msgspec.structs.replace(request, resume=""), _SCOPE)


def is_resumable(request: Request) -> bool:
    wish = request.sampling
    return (
        request.n == 1
        and len(request.prompts) <= 1
        and not request.tools
        and (request.response_format is None or request.response_format.kind == "text")
        and not request.stop
        and not (wish.presence_penalty or wish.frequency_penalty)
        and (wish.repeat_penalty or 1.0) == 1.0
    )


def continued(tier: Tier, prompt: str, text: str) -> str:
    """The prompt, and behind it what was said. A control token that the text spells stays text."""
    chat_format = tier.chat_format
    if any(token in text for token in chat_format.special):
        for letter in sorted({token[0] for token in chat_format.special if token}):
            text = text.replace(letter, letter + MARK)
        text = text if chat_format.reads_marks else escape_special_tokens(text, chat_format.special)
    return prompt + text
