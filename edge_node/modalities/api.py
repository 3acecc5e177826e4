"""`/v1/audio/transcriptions` and `/v1/audio/speech` in OpenAI's form; imported with the first such request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from aiohttp import hdrs, web

from models.modalities.process.messages import Segment
from router.errors import CausewayError, ClientGone
from router.openai import check_media_type, error_event
from router.openai.audio import (
    JSON_FORMATS,
    SpeechRequest,
    TranscriptionRequest,
    encode_delta,
    encode_done,
    encode_transcript,
    parse_speech,
    parse_transcription,
)
from router.openai.audio.form import check_form, parse_form
from router.policy.compiled import Policy
from router.serving.responses import JSON, STREAMED, EventStream, error_response, header_lines

from ..clock import Clock
from ..http.request_reader import RequestReader, routing_hints
from ..serving.generation import policy_label
from .audio import AudioCall, AudioService
from .sound import PCM_HZ, SpokenText


class AudioApi:
    """The handlers.

    Args:
        policy: the active one.
        new_id: makes the id of a decision record.
    """

    def __init__(
        self,
        service: AudioService,
        reader: RequestReader,
        clock: Clock,
        *,
        policy: Callable[[], Policy],
        new_id: Callable[[], str],
    ) -> None:
        self._service = service
        self._reader = reader
        self._clock = clock
        self._policy = policy
        self._new_id = new_id

    async def transcriptions(self, http: web.BaseRequest) -> web.StreamResponse:
        """POST /v1/audio/transcriptions. Raises CausewayError for what is refused before it has an id."""
        call = self._call(http)
        media_type = http.headers.get(hdrs.CONTENT_TYPE, "")
        check_form(http.headers.get(hdrs.CONTENT_TYPE), http.headers.get(hdrs.CONTENT_ENCODING))
        request = parse_transcription(parse_form(await self._reader.body(http), media_type))
        if request.stream:
            return await self._stream(http, call, request)

        async def answer() -> tuple[bytes, str]:
            transcript = await self._service.transcribe(call, request)
            body = encode_transcript(transcript, request)
            return body, JSON if request.format in JSON_FORMATS else "text/plain; charset=utf-8"

        return await self._answer(call, answer)

    async def speech(self, http: web.BaseRequest) -> web.StreamResponse:
        """POST /v1/audio/speech. Raises CausewayError for what is refused before it has an id."""
        call = self._call(http)
        check_media_type(http.headers.get(hdrs.CONTENT_TYPE), http.headers.get(hdrs.CONTENT_ENCODING))
        request = parse_speech(await self._reader.body(http))
        if request.format == "pcm":
            return await self._play(http, call, request)

        async def answer() -> tuple[bytes, str]:
            return (await self._service.speak(call, request)).wav(), "audio/wav"

        return await self._answer(call, answer)

    async def _play(self, http: web.BaseRequest, call: AudioCall, request: SpeechRequest) -> web.StreamResponse:
        """Send the samples of each sentence as soon as it is spoken. An error after the first cuts the connection."""
        stream: EventStream | None = None
        form = f"audio/pcm; rate={PCM_HZ}"
        lines = header_lines({**self._ids(call), "x-causeway-route": "edge", "Content-Type": form})

        async def play(sentence: SpokenText) -> None:
            nonlocal stream
            samples = await asyncio.to_thread(sentence.pcm, PCM_HZ)
            stream = stream or EventStream(http, lines)
            stream.send(samples)
            await stream.drain()

        try:
            await self._service.play(call, request, play)
        except ClientGone:
            raise
        except CausewayError as error:
            if stream is None:
                return error_response(error, self._ids(call))
            if http.transport is not None:
                http.transport.abort()  # the body ends without its last chunk
            raise ClientGone("the sound broke after its begin, and its connection was cut") from error
        stream = stream or EventStream(http, lines)
        stream.end()
        return stream

    async def _stream(
        self, http: web.BaseRequest, call: AudioCall, request: TranscriptionRequest
    ) -> web.StreamResponse:
        """Send the words of each segment as soon as it is understood. An error after the first ones is an event."""
        stream: EventStream | None = None
        lines = header_lines({**self._ids(call), "x-causeway-route": "edge", **STREAMED})

        def tell(segment: Segment) -> None:
            nonlocal stream
            with contextlib.suppress(ClientGone):  # the server cancels the request of a client that is gone
                text = segment.text if stream is None else f" {segment.text}"
                stream = stream or EventStream(http, lines)
                stream.send(encode_delta(text))

        try:
            transcript = await self._service.transcribe(call, request, tell)
            words = b"" if stream is not None or not transcript.text else encode_delta(transcript.text)
            last = words + encode_done(transcript)
        except ClientGone:
            raise
        except CausewayError as error:
            if stream is None:
                return error_response(error, self._ids(call))
            last = error_event(error)
        stream = stream or EventStream(http, lines)
        stream.end(last)
        return stream

    def _ids(self, call: AudioCall) -> dict[str, str]:
        return {
            "x-request-id": call.id,
            "x-causeway-decision": call.id,
            "x-causeway-policy": policy_label(self._policy()),
        }

    def _call(self, http: web.BaseRequest) -> AudioCall:
        hints = routing_hints(http.headers, self._reader.caller(http))
        return AudioCall(self._new_id(), hints, self._clock.monotonic())

    async def _answer(self, call: AudioCall, answer: Callable[[], Awaitable[tuple[bytes, str]]]) -> web.Response:
        ids = self._ids(call)
        try:
            body, media_type = await answer()
        except ClientGone:
            raise
        except CausewayError as error:
            return error_response(error, ids)
        headers = {"Content-Type": media_type, "x-causeway-route": "edge", **ids}
        return web.Response(body=body, headers=headers)
