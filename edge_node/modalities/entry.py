"""The paths of `/v1/audio/*`, and the sounds of live sessions. Nothing is imported before the first of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from aiohttp import web

from router.openai.audio import Transcript
from router.serving.request import Handler
from router.types import RoutingHints

if TYPE_CHECKING:
    from .audio import AudioApi, AudioService

TRANSCRIPTIONS = "/v1/audio/transcriptions"
SPEECH = "/v1/audio/speech"


class AudioEntry:
    """The way to the service of sound, which is constructed with the first sound.

    Args:
        make: constructs the service and its handlers.
    """

    def __init__(self, make: Callable[[], tuple[AudioService, AudioApi]]) -> None:
        self._make = make

    def paths(self) -> Mapping[str, tuple[str, Handler]]:
        """Methods and handler of each path."""
        return {TRANSCRIPTIONS: ("POST", self._transcriptions), SPEECH: ("POST", self._speech)}

    async def transcribe_live(self, decision_id: str, hints: RoutingHints, sound: bytes) -> Transcript:
        """Return the words of a sound, as a request of its own. Raises CausewayError."""
        service, _ = self._made
        return await service.transcribe_live(decision_id, hints, sound)

    async def transcribe_partial(self, hints: RoutingHints, sound: bytes) -> str:
        """Return the words so far of a sound that is still being sent; "" if unknown, or if other work would wait."""
        service, _ = self._made
        return await service.transcribe_partial(hints, sound)

    async def speak(self, text: str, voice: str, speed: float) -> bytes:
        """Return the sound of an answer, 16-bit PCM at 24 kHz. Raises CausewayError."""
        service, _ = self._made
        return await service.say(text, voice, speed)

    async def close(self) -> None:
        """End the processes of the voices, if there was a first sound."""
        if "_made" in self.__dict__:
            service, _ = self._made
            await service.close()

    async def _transcriptions(self, http: web.BaseRequest) -> web.StreamResponse:
        _, api = self._made
        return await api.transcriptions(http)

    async def _speech(self, http: web.BaseRequest) -> web.StreamResponse:
        _, api = self._made
        return await api.speech(http)

    @cached_property
    def _made(self) -> tuple[AudioService, AudioApi]:
        return self._make()
