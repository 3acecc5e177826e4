"""`/v1/audio/transcriptions` in OpenAI's form: a sound's words, by a tier that is an encoder of sounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial

from aiohttp import hdrs, web

from models.modalities.process.messages import Segment
from router.errors import CausewayError
from router.openai.audio import (
    JSON_FORMATS,
    Transcript,
    TranscriptionRequest,
    encode_delta,
    encode_done,
    encode_transcript,
    parse_transcription,
)
from router.openai.audio.form import parse_form
from router.serving.logs import REQUEST
from router.serving.responses import JSON
from router.types import Chunk, RoutingHints, Usage

from ..accounts.ledger import LedgerEntry
from ..core.request_context import RequestContext, answer_head
from ..degradation.fallback_plan import REQUESTED
from ..http.request_admission import RequestAdmission
from ..http.request_reader import read_headers
from ..http.request_runner import RequestRunner
from ..http.responses import OnChunk, stream_response
from ..parts.request_parts import RequestParts, sound_request

TEXT = "text/plain; charset=utf-8"


class TranscriptionRoutes:
    """The handler.

    Args:
        admission: reads and admits requests.
        runner: records their outcomes.
        parts: understands sounds.
    """

    def __init__(self, admission: RequestAdmission, runner: RequestRunner, parts: RequestParts) -> None:
        self._admission = admission
        self._runner = runner
        self._parts = parts

    async def transcription(self, http: web.BaseRequest) -> web.StreamResponse:
        arrived_at = self._runner.clock()
        with self._runner.ledger_entry("transcription", REQUEST.get(), http.headers) as entry:
            try:
                context, request = await self._admit(http, arrived_at, entry)
            except CausewayError as error:
                self._runner.refuse(entry, error)
                raise
            respond = partial(self._respond, http, context, request)
            return await self._runner.respond(entry, context, arrived_at, respond)

    async def _admit(
        self, http: web.BaseRequest, arrived_at: float, entry: LedgerEntry
    ) -> tuple[RequestContext, TranscriptionRequest]:
        """Raises CausewayError."""
        principal = self._admission.caller(http.headers.get(hdrs.AUTHORIZATION, ""), entry, http)
        inbound = read_headers(http.headers.items(), entry.id)
        body = await self._admission.read(http, principal, form=True)
        request = parse_transcription(parse_form(body, http.headers[hdrs.CONTENT_TYPE]))
        hints = RoutingHints(client=principal.device, deadline_ms=inbound.deadline_ms, tags=inbound.tags)
        parsed = sound_request(request.model, hints, stream=request.stream)
        context = await self._admission.admit_parsed(parsed, inbound, 0, principal, arrived_at, entry)
        context.tier.check_ability("audio")
        return context, request

    async def _respond(
        self, http: web.BaseRequest, context: RequestContext, request: TranscriptionRequest, on_chunk: OnChunk
    ) -> web.StreamResponse:
        headers = {"x-request-id": context.id, **dict(answer_head(context.tier.name, REQUESTED).headers)}
        if request.stream:
            encoder = _TranscriptEncoder()
            return await stream_response(http, self._words(context, request, encoder), on_chunk, encoder, headers)
        transcript = await self._parts.transcribe(context, request)
        on_chunk(Chunk(usage=Usage()))
        body = encode_transcript(transcript, request)
        headers["Content-Type"] = JSON if request.format in JSON_FORMATS else TEXT
        return web.Response(body=body, headers=headers)

    async def _words(
        self, context: RequestContext, request: TranscriptionRequest, encoder: _TranscriptEncoder
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the words of each segment as soon as it is understood. Raises CausewayError."""
        segments: asyncio.Queue[Segment | None] = asyncio.Queue()
        transcription = asyncio.ensure_future(self._parts.transcribe(context, request, segments.put_nowait))
        transcription.add_done_callback(lambda _: segments.put_nowait(None))
        try:
            while (segment := await segments.get()) is not None:
                yield Chunk(segment.text)
            encoder.transcript = await transcription
            yield Chunk(usage=Usage())
        finally:
            transcription.cancel()


class _TranscriptEncoder:
    """The events of a streamed transcript. `transcript`: once it is whole."""

    def __init__(self) -> None:
        self.transcript: Transcript | None = None
        self._started = False

    @property
    def finished(self) -> bool:
        return self.transcript is not None

    def start(self) -> bytes:
        return b""

    def chunk(self, chunk: Chunk) -> bytes:
        text = chunk.text
        if self.transcript is not None and not self._started:  # all of it was known
            text = self.transcript.text
        if not text:
            return b""
        separator = " " if self._started else ""
        self._started = True
        return encode_delta(separator + text)

    def end(self) -> bytes:
        return b"" if self.transcript is None else encode_done(self.transcript)
