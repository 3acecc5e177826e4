"""The guard's detectors in a server: bounded in time, and off the event loop where they take long."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import suppress
from typing import Final, TypeVar

from ...errors import GuardFailed
from ...guard.facts import NOTHING, UNKNOWN, Detector, GuardFacts, GuardSettings, TextModel, facts_of
from ...guard.mask import Masked, Restorer, mask
from ...guard.texts import has_unread, text_length
from ...types import Chunk, Request
from ..logs import redacted

log = logging.getLogger(__name__)
_INLINE: Final = 20_000  # characters that the detectors mostly read within a millisecond or two
_INLINE_S: Final = 0.005  # after this time a text full of numbers goes to a thread
_T = TypeVar("_T")


class GuardRunner:
    """Runs the detectors.

    Args:
        model: Model that finds names and addresses; None: they are not found.
    """

    def __init__(self, model: TextModel | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._clock = clock

    async def facts(self, request: Request, settings: GuardSettings, *, unread: bool = False) -> GuardFacts:
        """Return what a request contains. Never raises: a request that cannot be read counts as `on_failure` says.

        Args:
            unread: Whether a part of the request could not be read as text.
        """
        try:
            found = await self._within(request, settings, lambda detector: facts_of(request, detector))
        except Exception as failure:
            log.warning("The guard's detectors failed: %s", redacted(failure))
            return UNKNOWN if settings.on_failure == "hit" else NOTHING
        return UNKNOWN if settings.on_failure == "hit" and (unread or has_unread(request)) else found

    async def masked(self, request: Request, classes: Collection[str], settings: GuardSettings) -> Masked:
        """Return the request with placeholders. Raises GuardFailed, unless a failure counts as clean."""
        strict = settings.on_failure == "hit"
        if strict and has_unread(request):
            raise GuardFailed("A part of the request is not text, so it cannot be masked.", phase="connect")
        try:
            return await self._within(request, settings, lambda detector: mask(request, classes, detector))
        except Exception as failure:
            log.warning("A request could not be masked: %s", redacted(failure))
            if strict:
                raise GuardFailed("The request could not be masked in time.", phase="connect") from None
            return Masked(request, {})

    async def _within(self, request: Request, settings: GuardSettings, work: Callable[[Detector], _T]) -> _T:
        now = self._clock()

        def detector(time_s: float) -> Detector:
            return Detector(settings.phone_regions, self._model, lambda: self._clock() > now + time_s)

        if self._model is None and text_length(request) <= _INLINE:
            with suppress(TimeoutError):
                return work(detector(_INLINE_S))
        async with asyncio.timeout(settings.timeout_s):
            return await asyncio.to_thread(work, detector(settings.timeout_s))


class RestoredChunks:
    """An answer's chunks with values, as they arrive. Closing it closes the source."""

    def __init__(self, chunks: AsyncIterator[Chunk], restorer: Restorer) -> None:
        self._chunks = chunks
        self._restorer = restorer
        self._left: list[Chunk] | None = None  # None until the source has ended

    def __aiter__(self) -> RestoredChunks:
        return self

    async def __anext__(self) -> Chunk:
        if self._left is None:
            try:
                return self._restorer.chunk(await anext(self._chunks))
            except StopAsyncIteration:
                self._left = list(self._restorer.end())
        if not self._left:
            raise StopAsyncIteration
        return self._left.pop(0)

    async def aclose(self) -> None:
        close = getattr(self._chunks, "aclose", None)
        if close is not None:
            await close()
