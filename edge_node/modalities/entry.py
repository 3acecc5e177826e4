"""The paths of `/v1/audio/*`. Nothing of them is imported before the first such request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from .api import AudioApi

TRANSCRIPTIONS = "/v1/audio/transcriptions"
SPEECH = "/v1/audio/speech"
Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class AudioEntry:
    """What the daemon has of these paths.

    Args:
        make: constructs the handlers.
    """

    def __init__(self, make: Callable[[], AudioApi]) -> None:
        self._make = make
        self._api: AudioApi | None = None

    def paths(self) -> Mapping[str, tuple[str, Handler]]:
        """Methods and handler of each path."""
        return {TRANSCRIPTIONS: ("POST", self._transcriptions), SPEECH: ("POST", self._speech)}

    async def _transcriptions(self, http: web.BaseRequest) -> web.StreamResponse:
        return await self._open().transcriptions(http)

    async def _speech(self, http: web.BaseRequest) -> web.StreamResponse:
        return await self._open().speech(http)

    def _open(self) -> AudioApi:
        if self._api is None:
            self._api = self._make()
        return self._api
