"""Live sessions at the gateway: their answers and transcripts, each a request of the tenant.

The token is verified for each request: an expired or revoked token gets no more answers. A session's audio counts as
bodies in memory, and so does the request of an answer.
"""

from __future__ import annotations

import base64
import logging
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from causeway_server.router.config import SessionConfig
from causeway_server.router.errors import AuthenticationFailed, CausewayError, IdentityUnavailable, MissingField
from causeway_server.router.openai.audio import Transcript, TranscriptionRequest
from causeway_server.router.realtime.response import SessionLimits, StartResponse, TranscribeAudio
from causeway_server.router.realtime.session import RealtimeSession
from causeway_server.router.serving.live.live_session import (
    Detect,
    LiveSession,
    SessionClient,
    SessionReply,
    SessionRequests,
)
from causeway_server.router.serving.logs import REQUEST, redacted
from causeway_server.router.serving.request import AiohttpRequest, client_certificate
from causeway_server.router.serving.tls.peers import PeerCertificate
from causeway_server.router.types import Request, RoutingHints

from ..accounts.identity.authenticator import Authenticator
from ..accounts.ledger import LedgerEntry
from ..core.principal import Principal
from ..core.request_context import FREE_BYTES, AnswerHead, BodyMemory, RequestContext
from ..tiers.config import NO_AUDIO
from .request_admission import RequestAdmission, RequestHeaders, read_headers
from .request_runner import RequestRunner

if TYPE_CHECKING:
    from ..parts.request_parts import RequestParts

_PARAM = "audio"
_PREFIX = "x-causeway-"
log = logging.getLogger(__name__)


class GatewayClient(SessionClient, frozen=True):
    """The client of one connection. `policy`: value of `x-causeway-policy`; `certificate`: its verified one."""

    authorization: str
    principal: Principal
    headers: RequestHeaders
    policy: str
    certificate: PeerCertificate | None


class GatewaySessions(msgspec.Struct, frozen=True):
    """The gateway's side of live sessions. `parts` None: no encoders; `detect` None: no turns are detected."""

    config: SessionConfig
    authenticator: Authenticator
    admission: RequestAdmission
    runner: RequestRunner
    bodies: BodyMemory
    parts: RequestParts | None = None
    detect: Detect | None = None

    async def client(self, http: AiohttpRequest, authorization: str) -> GatewayClient:
        """Authenticate. Raises AuthenticationFailed, IdentityUnavailable, PermissionDenied or InvalidRequest."""
        certificate = client_certificate(http)
        await self.authenticator.ready(authorization)
        principal = self.authenticator.principal(authorization, certificate)
        principal.require("chat")
        self.bodies.enter(http, principal.caller)
        headers = read_headers(http.headers.items())
        hints = RoutingHints(client=principal.device, deadline_ms=headers.deadline_ms, tags=headers.tags)
        policy = http.headers.get("x-causeway-policy", "")
        return GatewayClient(
            principal.owner, principal.caller, hints, authorization, principal, headers, policy, certificate
        )

    def open(
        self, session_id: str, model: str | None, client: GatewayClient
    ) -> tuple[RealtimeSession, SessionRequests[GatewayClient]]:
        """Open a session. Raises MissingField, ModelNotFound or PermissionDenied."""
        if not model:
            raise MissingField("The query has no `model`. Name a tier, as in `?model=TIER`.", param="model")
        self.admission.check_model(model, client.principal)
        config, no_audio = self.config, self._no_audio(client.principal)
        limits = SessionLimits(
            config.max_items,
            config.max_bytes,
            config.replay_bytes,
            max_audio_s=0.0 if no_audio else config.max_audio_s,
            max_clips=0 if self.parts is None else self.parts.max_parts,
            detects_turns=self.detect is not None,
        )
        requests = GatewaySessionRequests(self, model, client)
        session = RealtimeSession(
            session_id, model, client.hints, limits, lambda: secrets.token_hex(8), no_audio, requests.hold_audio
        )
        return session, requests

    def _no_audio(self, principal: Principal) -> str:
        """Return why a caller's sessions accept no audio, and the fix; "" if they accept it."""
        granted = principal.grants.modalities
        if granted is not None and "audio" not in granted:
            return f"This token may not send audio. It allows only {', '.join(granted)}."
        return "" if self.parts is not None and "audio" in self.parts.kinds else NO_AUDIO


class GatewaySessionRequests(SessionRequests[GatewayClient]):
    """The requests of one session."""

    def __init__(self, gateway: GatewaySessions, model: str, client: GatewayClient) -> None:
        self.client = client
        self.detect = gateway.detect
        self._gateway = gateway
        self._model = model
        self._open = True
        self._memory = None if gateway.parts is None else gateway.parts.session_memory()

    def hold_audio(self, size_bytes: int) -> None:
        """Count the session's audio. Raises RateLimited or Shed if the memory is used up."""
        if self._open:
            self._hold(self, size_bytes)

    def refusal(self) -> AuthenticationFailed | None:
        """Return why the token of the connection is no longer accepted; None if it is."""
        try:
            with suppress(IdentityUnavailable):  # It was accepted, and nothing says that it was revoked since.
                self._gateway.authenticator.principal(self.client.authorization, self.client.certificate)
        except AuthenticationFailed as error:
            return error
        return None

    def close(self) -> None:
        """End the session: its audio, including audio still arriving, no longer counts."""
        self._open = False
        self._gateway.bodies.release(self)

    async def answer(self, live: LiveSession[GatewayClient], start: StartResponse) -> None:
        """Answer a response. Raises CausewayError."""
        runner, arrived_at = self._gateway.runner, self._gateway.runner.clock()
        await live.understood()
        with self._entry("realtime", start.id) as entry:
            context = await self._admit(entry, start.request, start.size_bytes, arrived_at)
            self._hold(start, start.size_bytes)
            try:
                reply = SessionReply(start.response, live.flush, partial(_described, start.id))
                await runner.run(entry, context, arrived_at, reply)
            finally:
                self._gateway.bodies.release(start)

    async def transcribe(self, live: LiveSession[GatewayClient], audio: TranscribeAudio) -> Transcript:
        """Return the transcript of audio by the tier that reads the audio of messages. Raises CausewayError."""
        from ..parts.request_parts import audio_request  # imported where a tier understands audio

        runner, parts, arrived_at = self._gateway.runner, self._gateway.parts, self._gateway.runner.clock()
        assert parts is not None
        with self._entry("transcription", secrets.token_hex(8)) as entry:
            request = audio_request(self._model, live.session.request_hints)
            context = parts.at_speech_tier(await self._admit(entry, request, 0, arrived_at))
            entry.tier = context.tier.name
            with runner.responding(entry, context, arrived_at):
                transcription = TranscriptionRequest(base64.b64decode(audio.wav), context.tier.name)
                return await parts.transcribe(context, transcription, param=_PARAM)

    @contextmanager
    def _entry(self, route: str, request_id: str) -> Iterator[LedgerEntry]:
        """Open a request's entry in the ledger. Raises CausewayError for every fault."""
        REQUEST.set(request_id)
        headers = {"x-causeway-policy": self.client.policy}
        try:
            with self._gateway.runner.ledger_entry(route, request_id, headers) as entry:
                yield entry
        except CausewayError:
            raise
        except Exception as failure:
            log.error("A request of a live session failed unexpectedly: %s", redacted(failure))
            raise CausewayError("The gateway failed.") from failure

    async def _admit(self, entry: LedgerEntry, request: Request, size_bytes: int, arrived_at: float) -> RequestContext:
        """Admit a request. Raises CausewayError."""
        authenticator, client = self._gateway.authenticator, self.client
        principal = entry.principal = authenticator.principal(client.authorization, client.certificate)
        principal.require("chat")
        if (arrivals := self._gateway.bodies.arrivals) is not None:
            arrivals.note(b"", principal, private="private" in request.hints.tags)
        admitted = await self._gateway.admission.admit_parsed(
            request, client.headers, size_bytes, principal, arrived_at, entry
        )
        return msgspec.structs.replace(admitted, memory=self._memory)

    def _hold(self, owner: object, size_bytes: int) -> None:
        """Count memory for `owner`. Raises RateLimited or Shed."""
        if size_bytes > FREE_BYTES:
            self._gateway.bodies.hold(owner, self.client.principal.caller, size_bytes)
        else:
            self._gateway.bodies.release(owner)


def _described(request_id: str, head: AnswerHead) -> dict[str, object]:
    about = {name.removeprefix(_PREFIX).replace("-", "_"): value for name, value in head.headers}
    return {"request_id": request_id, **about}
