"""Copies of requests for a tier's shadow variants, whose answers are compared with those that were shown.

A copy of a request of text alone is sent when the tier's own model has answered it, with the priority `bulk`. It counts
in the variant's trial, and costs its client nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

import msgspec
from anyio.abc import TaskGroup

from causeway_server.router.errors import CausewayError, DeadlineExceeded, QueueFull, Shed
from causeway_server.router.openai.answer import coalesce
from causeway_server.router.parts.reading import first_part
from causeway_server.router.serving.logs import redacted
from causeway_server.router.types import Chunk, Request

from ..core.request_context import VARIANT_HEADER, AnswerHead, Generate, Piece, RequestContext
from ..tiers.tier import Tier
from ..tiers.variants import TierVariants
from ..upstreams.inference import TokenMeter

log = logging.getLogger(__name__)
_AT_ONCE: Final = 16
_COPY_S: Final = 60.0


class ShadowCopies(msgspec.Struct, frozen=True):
    """The copies of requests, but of private ones. `running`: the `id` of the chunks that each is compared with."""

    variants: TierVariants
    tasks: TaskGroup
    is_private: Callable[[Request], bool] = lambda _: False
    running: set[int] = msgspec.field(default_factory=set)

    def answer(self, generate: Generate, context: RequestContext) -> AsyncGenerator[Piece, None]:
        """Yield the AnswerHead, then the chunks, as `generate`."""
        varied = self.variants.shadow_of(context.tier, context.request)
        request = context.request
        if varied is None or first_part(request)[0] or self.is_private(request):
            return generate(context)
        return self._compared(generate, context, varied)

    async def _compared(self, generate: Generate, context: RequestContext, varied: Tier) -> AsyncGenerator[Piece, None]:
        chunks, is_own = list[Chunk](), False
        async with aclosing(generate(context)) as pieces:
            async for piece in pieces:
                if isinstance(piece, AnswerHead):
                    is_own = piece.keep and piece.model == context.tier.name and not piece.header(VARIANT_HEADER)
                else:
                    chunks.append(piece)
                yield piece
        if is_own and len(self.running) < _AT_ONCE:
            self.running.add(id(chunks))
            self.tasks.start_soon(self._copy, generate, context, varied, chunks)

    async def _copy(self, generate: Generate, context: RequestContext, varied: Tier, shown: list[Chunk]) -> None:
        """Ask the variant, and count how its answer compares with the one that was shown."""
        began, copy = time.monotonic(), _copy_of(context, varied)
        try:
            try:
                async with aclosing(generate(copy)) as pieces:
                    found = [piece async for piece in pieces if not isinstance(piece, AnswerHead)]
                result = "same" if _texts(found) == _texts(shown) else "differs"
            except (QueueFull, Shed, DeadlineExceeded):
                return  # the tier has no room for copies now, or the answer takes longer than a copy may
            except CausewayError:
                result = "failed"
            group = self.variants.group(varied.name, context.request)
            self.variants.count(varied, group or 0, result, duration_s=time.monotonic() - began)
        except Exception as fault:  # it must not end the other tasks of the process
            log.error(
                "Request %s: its copy to the shadow variant %s failed unexpectedly: %s",
                context.id,
                varied.variant,
                redacted(fault),
            )
        finally:
            self.running.discard(id(shown))


def _copy_of(context: RequestContext, varied: Tier) -> RequestContext:
    return msgspec.structs.replace(
        context,
        id=f"{context.id}-shadow",
        tier=msgspec.structs.replace(varied, adapted=varied.variant),  # no other model of the tier answers
        deadline=time.monotonic() + _COPY_S,
        priority="bulk",
        critical=True,
        session=None,
        trace=None,
        meter=TokenMeter(),
    )


def _texts(chunks: list[Chunk]) -> list[tuple[str, list[tuple[str | None, str]]]]:
    """Return the text and the calls of each choice. Raises StreamBroken."""
    return [(each.text, [(call.name, call.arguments) for call in each.tool_calls]) for each in coalesce(chunks)[0]]
