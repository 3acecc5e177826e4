"""Chats that do not fit the context of a tier with `context_overflow: trim_middle` are answered without their oldest
turns (`models/chat/overflow.py`). It costs nothing until the tier refuses one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import msgspec

from causeway_server.models.chat.overflow import TrimmedRequest, trim_middle
from causeway_server.router.errors import ContextLengthExceeded, UnsupportedFeature
from causeway_server.router.openai.tokens import TokenizeRequest, TokenList
from causeway_server.router.parts.reading import first_part

from ..core.request_context import TRIMMED_HEADER, AnswerHead, Generate, Piece, RequestContext
from .tokenizers import TierTokenizers


class TrimmingService(msgspec.Struct, frozen=True):
    """The service, with trimming of chats that its tiers refuse as too long."""

    generate: Generate
    tokenizers: TierTokenizers

    def answer(self, context: RequestContext) -> AsyncGenerator[Piece, None]:
        """Yield the AnswerHead, then the chunks, as `Service.answer`."""
        if context.tier.config.context_overflow == "refuse":
            return self.generate(context)
        return self._answer(context)

    async def _answer(self, context: RequestContext) -> AsyncGenerator[Piece, None]:
        begun = False
        try:
            async with aclosing(self.generate(context)) as pieces:
                async for piece in pieces:
                    begun = True
                    yield piece
            return
        except ContextLengthExceeded:
            trimmed = None if begun else await self._trimmed(context)
            if trimmed is None:
                raise
        context = msgspec.structs.replace(context, request=trimmed.request)
        async with aclosing(self.generate(context)) as pieces:
            async for piece in pieces:
                if isinstance(piece, AnswerHead):
                    headers = (*piece.headers, (TRIMMED_HEADER, str(trimmed.left_out)))
                    yield msgspec.structs.replace(piece, headers=headers, keep=False)
                else:
                    yield piece

    async def _trimmed(self, context: RequestContext) -> TrimmedRequest | None:
        """Return the request in a form that fits its tier; None if there is none, or the tier has no tokenizer."""
        tier = context.tier
        request = context.request if context.guard is None else await context.guard.check(context.request)
        if request.kind != "chat" or first_part(request)[0]:
            return None

        async def tokenize(asked: TokenizeRequest) -> TokenList:
            return await self.tokenizers.tokenize(tier, asked, context.deadline)

        try:
            return await trim_middle(request, tier.config.context_tokens, tokenize)
        except UnsupportedFeature:
            return None
