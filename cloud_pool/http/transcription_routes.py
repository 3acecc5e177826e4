"""OpenAI's `/v1/audio/transcriptions`: transcripts of audio, by an encoder tier."""

from __future__ import annotations

import asyncio

import msgspec

from causeway_server.models.parts.process.messages import Segment
from causeway_server.router.errors import CausewayError, ClientGone
from causeway_server.router.openai.answer import error_event
from causeway_server.router.openai.audio import (
    JSON_FORMATS,
    TranscriptionRequest,
    encode_delta,
    encode_done,
    encode_transcript,
    parse_form,
    parse_transcription,
)
from causeway_server.router.serving.logs import REQUEST
from causeway_server.router.serving.request import AiohttpRequest, read_credential
from causeway_server.router.serving.responses import (
    JSON,
    STREAMED,
    EventStream,
    ServerResponse,
    body_response,
    header_lines,
)
from causeway_server.router.types import RoutingHints

from ..accounts.ledger import LedgerEntry
from ..core.request_context import RequestContext, answer_head
from ..degradation.fallback import REQUESTED
from ..http.request_admission import RequestAdmission
from ..http.request_runner import RequestRunner
from ..parts.request_parts import RequestParts, audio_request
from .request_admission import read_headers

TEXT = "text/plain; charset=utf-8"


class TranscriptionRoutes(msgspec.Struct, frozen=True):
    """The handler of the path."""

    admission: RequestAdmission
    runner: RequestRunner
    parts: RequestParts  # understands audio clips

    async def transcription(self, http: AiohttpRequest) -> ServerResponse:
        arrived_at = self.runner.clock()
        with self.runner.ledger_entry("transcription", REQUEST.get(), http.headers) as entry:
            context, request = await self._admit(http, arrived_at, entry)
            head = answer_head(context.tier.name, REQUESTED, region=context.tier.config.region)
            entry.response_headers = dict(head.headers)
            headers = {"x-request-id": context.id, **entry.response_headers}
            if not request.stream:
                with self.runner.responding(entry, context, arrived_at):
                    transcript = await self.parts.transcribe(context, request)
                    headers["Content-Type"] = JSON if request.format in JSON_FORMATS else TEXT
                    return body_response(encode_transcript(transcript, request), headers=headers)
            stream = EventStream(http, header_lines({**STREAMED, **headers}))
            try:
                with self.runner.responding(entry, context, arrived_at):
                    await self._stream(context, request, stream)
            except ClientGone:
                raise
            except CausewayError as error:
                if not stream.sends:
                    raise
                stream.end(error_event(error))
            return stream

    async def _admit(
        self, http: AiohttpRequest, arrived_at: float, entry: LedgerEntry
    ) -> tuple[RequestContext, TranscriptionRequest]:
        """Admit the request. Raises CausewayError."""
        principal = self.admission.caller(read_credential(http), entry, http)
        inbound = read_headers(http.headers.items())
        body = await self.admission.read(http, principal, form=True)
        request = parse_transcription(parse_form(body, http.headers["Content-Type"]))
        hints = RoutingHints(client=principal.device, deadline_ms=inbound.deadline_ms, tags=inbound.tags)
        parsed = audio_request(request.model, hints, stream=request.stream)
        context = await self.admission.admit_parsed(parsed, inbound, 0, principal, arrived_at, entry)
        context.tier.check_ability("audio")
        return context, request

    async def _stream(self, context: RequestContext, request: TranscriptionRequest, stream: EventStream) -> None:
        """Send the text of each segment as soon as it is understood. Raises CausewayError."""
        segments: asyncio.Queue[Segment | None] = asyncio.Queue()
        transcription = asyncio.ensure_future(self.parts.transcribe(context, request, segments.put_nowait))
        transcription.add_done_callback(lambda _: segments.put_nowait(None))
        try:
            while (segment := await segments.get()) is not None:
                if segment.text:
                    stream.send(encode_delta(f" {segment.text}" if stream.sends else segment.text))
                    await stream.drain()
            transcript = await transcription
        finally:
            transcription.cancel()
        words = b"" if stream.sends or not transcript.text else encode_delta(transcript.text)  # all of it was known
        stream.end(words + encode_done(transcript))
        await stream.drain()
