"""Truncated answers, and the token that asks for the rest of one.

Gateways keep no state: the token itself holds the text so far, encrypted and signed (Fernet,
https://github.com/fyi/spec/blob/master/Spec.md: AES-128-CBC, HMAC-SHA256 and the time), with keys that all gateways
read from one file. It is valid for one tenant and one question, for a limited time.

Only one choice of plain text can be continued. The prompt is rendered as before and the text so far follows it, so a
greedy model continues as if its answer had never been cut, unless the tokenizer splits the text into other tokens than
the model wrote. Tools, schemas, stop strings, penalties and several choices have a state that the text does not show:
such answers are never truncated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from causeway_server.models.chat.sandbox import MARK
from causeway_server.router.decision.decide import fingerprint
from causeway_server.router.errors import ConfigError, InvalidRequest, PermissionDenied
from causeway_server.router.types import Chunk, Request

from ..tiers.tier import Tier, escape_special_tokens

PARAM = "causeway.continue"
_SCOPE = b"continue"
_VERSION = 1
_HALF_CHARACTER = "\ufffd"
"""The output of an engine for an incomplete character whose remaining bytes would have come with the next token."""


class PartialAnswer(msgspec.Struct, frozen=True, array_like=True):
    """The answer up to the cut."""

    tier: str
    text: str
    tokens: int


class _TokenContent(msgspec.Struct, frozen=True, array_like=True):
    version: int
    tenant: str
    question: bytes  # fingerprint of the request
    so_far: PartialAnswer


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(_TokenContent)


class ContinueTokens(msgspec.Struct, frozen=True):
    """Issues and reads tokens."""

    keys: MultiFernet
    ttl_s: float
    # Unix seconds; the wall clock is comparable between gateways and across restarts
    wall_clock: Callable[[], float] = time.time

    def issue(self, tenant: str, request: Request, so_far: PartialAnswer) -> str:
        content = _ENCODER.encode(_TokenContent(_VERSION, tenant, question_digest(request), so_far))
        return self.keys.encrypt_at_time(content, int(self.wall_clock())).decode()

    def read(self, tenant: str, request: Request) -> PartialAnswer:
        """Return the content of the request's token.

        Raises:
            InvalidRequest: The token is not valid, has expired or belongs to another request.
            PermissionDenied: The token belongs to another tenant.
        """
        try:
            plain = self.keys.decrypt_at_time(request.resume.encode(), math.ceil(self.ttl_s), int(self.wall_clock()))
            content = _DECODER.decode(plain)
        except (InvalidToken, UnicodeEncodeError, msgspec.DecodeError, UnicodeDecodeError):
            raise InvalidRequest(
                f"`{PARAM}` is not a valid token, or has expired. Send the request again without it.", param=PARAM
            ) from None
        if content.tenant != tenant:
            raise PermissionDenied(f"`{PARAM}` was issued to another tenant.", param=PARAM)
        if content.version != _VERSION or content.question != question_digest(request):
            raise InvalidRequest(
                f"`{PARAM}` belongs to another request. Send it with exactly the request that was truncated.",
                param=PARAM,
            )
        return content.so_far


def load_continue_tokens(
    key_file: str, ttl_s: float, *, wall_clock: Callable[[], float] = time.time
) -> ContinueTokens | None:
    """Read the keys; None without a file. Raises ConfigError."""
    if not key_file:
        return None
    where = "degradation.continue_key_file"
    try:
        lines = Path(key_file).read_text(encoding="ascii").split()
        keys = [Fernet(line) for line in lines]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key_file}: {error}", where=where) from error
    if not keys:
        raise ConfigError(f"{key_file} contains no key.", where=where)
    return ContinueTokens(MultiFernet(keys), ttl_s, wall_clock=wall_clock)


def question_digest(request: Request) -> bytes:
    """Return a digest that is equal for the truncated request and for the request that asks for the rest."""
    return fingerprint(msgspec.structs.replace(request, resume=""), _SCOPE)


def is_resumable(request: Request) -> bool:
    sampling = request.sampling
    return (
        request.n == 1
        and len(request.prompts) <= 1
        and all(isinstance(prompt, str) for prompt in request.prompts)
        and not request.tools
        and (request.response_format is None or request.response_format.kind == "text")
        and not request.stop
        and not (sampling.presence_penalty or sampling.frequency_penalty)
        and (sampling.repeat_penalty or 1.0) == 1.0
    )


def continued(tier: Tier, prompt: str, text: str) -> str:
    """Return the prompt followed by the text so far. Text that spells a control token stays plain text."""
    chat_format = tier.chat_format
    if any(token in text for token in chat_format.special):
        for letter in sorted({token[0] for token in chat_format.special if token}):
            text = text.replace(letter, letter + MARK)
        text = text if chat_format.is_ours else escape_special_tokens(text, chat_format.special)
    return prompt + text


class Truncator(msgspec.Struct):
    """Truncates one answer to `limit` tokens, and adds the continue token to its last chunk."""

    continue_tokens: ContinueTokens
    tenant: str
    request: Request
    tier: str
    limit: int
    partial: PartialAnswer  # content of the earlier parts of the answer
    texts: list[str] = []
    tokens: int = 0

    def seen(self, chunk: Chunk) -> Chunk:
        """Return the chunk to send: the last chunk of an answer that reached the limit carries the token."""
        self.tokens += chunk.tokens
        if chunk.finish_reason != "length" or self.tokens < self.limit:
            self.texts.append(chunk.text)
            return chunk
        text = chunk.text.rstrip(_HALF_CHARACTER)
        so_far = PartialAnswer(
            self.tier, "".join([self.partial.text, *self.texts, text]), self.partial.tokens + self.tokens
        )
        token = self.continue_tokens.issue(self.tenant, self.request, so_far)
        return msgspec.structs.replace(chunk, text=text, resume=token)
