"""What one session asks of the gateway: its answers, and the words of its sounds, each a request of its tenant.

The token is verified at each of them: one that has expired or was revoked gets no more answers. The session's sounds
count as bodies in memory, and so does the request of an answer.
"""

from __future__ import annotations

import base64
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from router.errors import CausewayError
from router.openai.audio import Transcript, TranscriptionRequest
from router.realtime import StartResponse, TranscribeSound
from router.serving.live.live_session import Detect, LiveSession
from router.types import Chunk, Request, Usage

from ..accounts.identity.authenticator import Authenticator
from ..accounts.identity.principal import Principal
from ..accounts.ledger import LedgerEntry
from ..http.body_memory import FREE_BYTES, BodyMemory
from ..http.request_admission import RequestAdmission
from ..http.request_reader import RequestHeaders
from ..http.request_runner import RequestRunner
from ..http.responses import OnChunk
from ..observability.logs import REQUEST, redacted
from ..parts.config import NO_SOUND
from ..serving.request_context import RequestContext
from .delivery import SessionDelivery

if TYPE_CHECKING:
    from ..parts.request_parts import RequestParts

_PARAM = "audio"
_log = logging.getLogger("causeway.cloud.sessions")


class SessionServices(msgspec.Struct, frozen=True):
    """The gateway as sessions use it.

    Args:
        authenticator: authenticates clients.
        admission: admits requests.
        runner: answers them.
        bodies: bounds what of sessions and requests is in memory.
        parts: reads sounds, pictures and files; None: no tier is an encoder.
        detect: detects speech; None: sessions detect no turns.
    """

    authenticator: Authenticator
    admission: RequestAdmission
    runner: RequestRunner
    bodies: BodyMemory
    parts: RequestParts | None = None
    detect: Detect | None = None

    def no_sound(self, principal: Principal) -> str:
        """Return why a caller's sessions take no sound, and what to do; "" if they take it."""
        granted = principal.grants.modalities
        if granted is not None and "audio" not in granted:
            return f"this token may not send audio: it allows {', '.join(granted)}."
        return "" if self.parts is not None and "audio" in self.parts.kinds else NO_SOUND

    @property
    def max_sounds(self) -> int:
        """How many sounds a conversation may have."""
        return 0 if self.parts is None else self.parts.max_parts


class SessionCaller(msgspec.Struct, frozen=True):
    """Who uses a session over one connection. `headers`: of the connection, but for `policy`: `x-causeway-policy`."""

    authorization: str
    principal: Principal
    headers: RequestHeaders
    policy: str


class SessionRequests:
    """The requests of one session.

    Args:
        services: the gateway.
        model: the tier's name or alias.
        caller: its client; replaced when another connection resumes the session.
    """

    def __init__(self, services: SessionServices, model: str, caller: SessionCaller) -> None:
        self.caller = caller
        self._services = services
        self._model = model
        self._open = True
        self._memory = None if services.parts is None else services.parts.session_memory()

    def hold_sound(self, size_bytes: int) -> None:
        """Count the session's sounds. Raises RateLimited or Shed: there is no room for so much."""
        if self._open:
            self._hold(self, size_bytes)

    def close(self) -> None:
        """The session has ended: its sounds no longer count, and what still comes counts no more."""
        self._open = False
        self._services.bodies.release(self)

    async def answer(self, live: LiveSession, start: StartResponse) -> None:
        """Answer a response. Raises CausewayError."""
        runner, arrived_at = self._services.runner, self._services.runner.clock()
        await live.understood()
        with self._entry("realtime", start.id) as entry:
            try:
                context = await self._admit(entry, start.request, start.size_bytes, arrived_at)
                self._hold(start, start.size_bytes)
            except CausewayError as error:
                runner.refuse(entry, error)
                raise
            try:
                await runner.run(entry, context, arrived_at, SessionDelivery(start.response, live.flush, start.id))
            finally:
                self._services.bodies.release(start)

    async def transcribe(self, live: LiveSession, sound: TranscribeSound) -> Transcript:
        """Return the words of a sound, by the tier that reads the sounds of messages. Raises CausewayError."""
        from ..parts.request_parts import sound_request  # imported where a tier understands sounds

        runner, parts, arrived_at = self._services.runner, self._services.parts, self._services.runner.clock()
        assert parts is not None
        with self._entry("transcription", secrets.token_hex(8)) as entry:
            try:
                request = sound_request(self._model, live.session.request_hints)
                context = parts.at_speech_tier(await self._admit(entry, request, 0, arrived_at))
            except CausewayError as error:
                runner.refuse(entry, error)
                raise
            entry.tier = context.tier.name

            async def respond(on_chunk: OnChunk) -> Transcript:
                asked = TranscriptionRequest(base64.b64decode(sound.wav), context.tier.name)
                transcript = await parts.transcribe(context, asked, param=_PARAM)
                on_chunk(Chunk(usage=Usage()))
                return transcript

            transcript = await runner.respond(entry, context, arrived_at, respond)
            assert isinstance(transcript, Transcript)
            return transcript

    @contextmanager
    def _entry(self, route: str, request_id: str) -> Iterator[LedgerEntry]:
        """One request's entry in the ledger. Raises CausewayError, whatever fails."""
        REQUEST.set(request_id)
        headers = {"x-causeway-policy": self.caller.policy}
        try:
            with self._services.runner.ledger_entry(route, request_id, headers) as entry:
                yield entry
        except CausewayError:
            raise
        except Exception as failure:
            _log.error("a request of a session failed unexpectedly: %s", redacted(failure))
            raise CausewayError("The gateway failed.") from failure

    async def _admit(self, entry: LedgerEntry, request: Request, size_bytes: int, arrived_at: float) -> RequestContext:
        """Raises CausewayError."""
        principal = entry.principal = self._services.authenticator.principal(self.caller.authorization)
        principal.require("chat")
        headers = msgspec.structs.replace(self.caller.headers, id=entry.id)
        admitted = await self._services.admission.admit_parsed(
            request, headers, size_bytes, principal, arrived_at, entry
        )
        return msgspec.structs.replace(admitted, memory=self._memory)

    def _hold(self, owner: object, size_bytes: int) -> None:
        """Raises RateLimited or Shed."""
        if size_bytes > FREE_BYTES:
            self._services.bodies.hold(owner, self.caller.principal.caller, size_bytes)
        else:
            self._services.bodies.release(owner)
