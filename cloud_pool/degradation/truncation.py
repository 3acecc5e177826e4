"""Shortening an answer: how far, and the token that its last piece carries."""

from __future__ import annotations

import msgspec

from router.types import Chunk, Request

from .continue_token import ContinueTokens, PartialAnswer

_HALF = "\ufffd"
"""What an engine says for half a character: the other half would have come with the next token."""


class Truncator:
    """Of one answer of one choice that may make `limit` tokens and no more. `before` is what earlier parts said."""

    def __init__(
        self,
        continue_tokens: ContinueTokens,
        tenant: str,
        request: Request,
        tier: str,
        limit: int,
        before: PartialAnswer | None,
    ) -> None:
        self.limit = limit
        self._continuing = continue_tokens
        self._tenant = tenant
        self._request = request
        self._tier = tier
        self._texts = [before.text] if before else []
        self._before = before.tokens if before else 0
        self._tokens = 0

    def seen(self, chunk: Chunk) -> Chunk:
        """The chunk as it goes out: the last one of an answer that reached the limit says how to go on."""
        self._tokens += chunk.tokens
        if chunk.finish_reason != "length" or self._tokens < self.limit:
            self._texts.append(chunk.text)
            return chunk
        text = chunk.text.rstrip(_HALF)
        so_far = PartialAnswer(self._tier, "".join([*self._texts, text]), self._before + self._tokens)
        token = self._continuing.seal(self._tenant, self._request, so_far)
        return msgspec.structs.replace(chunk, text=text, resume=token)
