"""The stream of an answer, as an OpenAI server sends it: server-sent events → chunks."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from ...errors import CausewayError, CloudUnreadable, Phase
from ...openai.upstream.decode import SSEParser, StreamDecoder, decode_answer
from ...types import Chunk
from ..http_client import HttpClientError, HttpResponse
from .responses import MAX_ANSWER_BYTES, UpstreamCall, client_error, too_large, too_slow

_END_S = 0.05  # time for the end of a body whose answer is complete
_USAGE_S = 1.0  # time after the end of every choice, for the usage and the end of the body
_BLANK = b"\xef\xbb\xbf \t\r\n"


class StreamReader:
    """Reads a streamed answer: server-sent events → chunks.

    Args:
        until: Deadline of the first chunk, monotonic seconds; the request's deadline is that of the rest.
        pause_s: Maximum time between two pieces of the rest.
    """

    def __init__(self, response: HttpResponse, call: UpstreamCall, until: float, *, pause_s: float = math.inf) -> None:
        response.bound(until)
        response.listener = None if call.relay is None else self
        self._response = response
        self._pause_s = pause_s
        self._relay = call.relay
        self._call = call
        self._parser = SSEParser()
        self._decoder = StreamDecoder(call.id, call.sequences)
        self._document: list[bytes] | None = None  # pieces of an answer that is JSON although a stream was requested
        self._size_bytes = 0
        self._has_events = False
        self._phase: Phase = "first_token"
        self._error: CausewayError | None = None

    async def next(self) -> Sequence[Chunk]:
        """Return the next chunks; none after the last.

        Raises:
            CloudTimeout, StreamBroken: The answer is late, or stops before its end.
            CloudUnreadable, CloudFailed: The bytes are not an answer, or report an error.
        """
        if self._error is not None:
            raise self._error
        while not self._decoder.done:
            data = await self._read()
            if data:
                if chunks := self._take(data):
                    return chunks
            elif self._document is None:
                if self._size_bytes and not self._has_events:
                    raise CloudUnreadable(f"{self._call.name}'s stream has no events.")
                return self._decoder.finish()
            else:
                self._decoder.done = True
                return decode_answer(b"".join(self._document), self._call.id)
        return ()

    def arrived(self) -> bool:
        """Offer an event of text alone to the relay (`BodyListener`); return whether it took the event."""
        if self._relay is None or self._phase != "stream" or self._document is not None or not self._parser.idle:
            return False
        data = self._response.peek()
        if self._size_bytes + len(data) > MAX_ANSWER_BYTES:
            return False
        texts, index = self._decoder.feed_texts(data)
        if not texts or not self._relay.take(texts, index):
            return False
        self._size_bytes += len(data)
        self._response.take()
        return True

    async def _read(self) -> bytes:
        """Return the next bytes; none at the end, or if only the end of the body is missing."""
        if self._pause_s < math.inf and self._phase == "stream" and not self._decoder.whole:
            self._response.bound(min(self._call.deadline, asyncio.get_running_loop().time() + self._pause_s))
        try:
            data = await self._response.read()
        except (TimeoutError, HttpClientError) as error:
            if self._decoder.whole:
                return b""
            if isinstance(error, TimeoutError):
                raise too_slow(self._call, self._phase) from error
            raise client_error(error, self._call.name, "stream") from error
        if not self._size_bytes and data.lstrip(_BLANK)[:1] == b"{":  # no event begins like this
            self._document = []
        self._size_bytes += len(data)
        if self._size_bytes > MAX_ANSWER_BYTES:
            raise too_large(self._call)
        return data

    def _take(self, data: bytes) -> Sequence[Chunk]:
        if self._document is not None:
            self._document.append(data)
            return ()
        if self._parser.idle and (text := self._decoder.feed_text(data)) is not None:
            return (text,)
        chunks = self._decode(data)
        if self._decoder.whole:
            self._response.bound(min(self._call.deadline, asyncio.get_running_loop().time() + _USAGE_S))
        elif chunks and self._phase == "first_token":
            self._phase = "stream"
            self._response.bound(self._call.deadline)
        return chunks

    def _decode(self, data: bytes) -> list[Chunk]:
        """Return the chunks of all events that `data` completes. An error after chunks is raised by the next call."""
        chunks: list[Chunk] = []
        try:
            for event in self._parser.feed(data):
                self._has_events = True
                chunks += self._decoder.feed(event.data)
        except CausewayError as error:
            if not chunks:
                raise
            self._error = error
        return chunks

    def close(self) -> None:
        """Release the response: the connection can be reused if only the end of the body is missing."""
        self._response.listener = None
        self._response.release(_END_S if self._decoder.done else 0.0)
