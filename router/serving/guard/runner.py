"""The guard's detectors in a server: bounded in time, and off the event loop where they take long."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection
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
    """Runs the detectors. `model`: model that finds names and addresses; None: they are not found."""

    def __init__(self, model: TextModel | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._model = model
        self._clock = clock

    async def facts(self, request: Request, settings: GuardSettings, *, unread: bool = False) -> GuardFacts:
        """Return what a request contains. Never raises: a request that cannot be read counts as `on_failure` says.
        `unread`: whether a part of the request could not be read as text.
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
                return work(detector(min(_INLINE_S, settings.timeout_s)))
        async with asyncio.timeout(settings.timeout_s):
            return await asyncio.to_thread(work, detector(settings.timeout_s))


async def restored(chunks: AsyncIterator[Chunk], restorer: Restorer) -> AsyncGenerator[Chunk, None]:
    """Yield an answer's chunks with values, as they arrive. Closing it closes `chunks`, an asynchronous generator."""
    try:
        async for chunk in chunks:
            yield restorer.chunk(chunk)
    finally:
        if isinstance(chunks, AsyncGenerator):
            await chunks.aclose()
    for chunk in restorer.end():
        yield chunk
