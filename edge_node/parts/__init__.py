"""Audio as a request of its own: the paths of `/v1/audio/*`, and the audio of live sessions.

The modules `audio`, which answers these requests, and `speaker`, which synthesises speech, are imported on demand.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from causeway_server.router.serving.request import AiohttpRequest
from causeway_server.router.serving.responses import Handler, ServerResponse

if TYPE_CHECKING:
    from .audio import AudioApi, AudioService

TRANSCRIPTIONS = "/v1/audio/transcriptions"
SPEECH = "/v1/audio/speech"


class LazyAudio:
    """Constructs the audio service when it is first used."""

    def __init__(self, make: Callable[[], tuple[AudioService, AudioApi]]) -> None:
        self._make = make

    def paths(self) -> Mapping[str, tuple[str, Handler]]:
        return {TRANSCRIPTIONS: ("POST", self._transcriptions), SPEECH: ("POST", self._speech)}

    @property
    def service(self) -> AudioService:
        """The service, constructed at its first use."""
        return self._made[0]

    async def close(self) -> None:
        """End the processes of the voices, if the service was used."""
        if "_made" in self.__dict__:
            await self.service.close()

    async def _transcriptions(self, http: AiohttpRequest) -> ServerResponse:
        return await self._made[1].transcriptions(http)

    async def _speech(self, http: AiohttpRequest) -> ServerResponse:
        return await self._made[1].speech(http)

    @cached_property
    def _made(self) -> tuple[AudioService, AudioApi]:
        return self._make()
