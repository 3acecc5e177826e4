"""One WebSocket connection: the handshake, frames in and out, and what becomes of a peer that does not read.

Frames are written straight to the transport: an event costs one write and no turn of the loop.
"""

from __future__ import annotations

import asyncio

import anyio.abc
from aiohttp import WSMsgType, hdrs, web

from ...errors import CausewayError, InvalidRequest
from ...realtime.event_log import MEANING, CloseCode, EventsLost, encode_refusal, text_frame
from ..request import members

PROTOCOL = "realtime"
"""The subprotocol that OpenAI's browser clients offer."""

_CLOSE_S = 2.0  # for the peer to answer a close frame, or to read it
_REASON_BYTES = 123  # of a close frame
_FRAMES_PER_TURN = 16  # of a peer that floods, before others have their turn


class RealtimeSocket:
    """A connection that asks for a WebSocket.

    Args:
        http: the request.
        tasks: the parent of what closes the connection.
        max_frame_bytes: larger messages close the connection (1009).
        ping_s: time between two pings; a peer that answers none in half of it is gone.
    """

    def __init__(
        self, http: web.BaseRequest, tasks: anyio.abc.TaskGroup, *, max_frame_bytes: int, ping_s: float
    ) -> None:
        self._http = http
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._received = 0
        self._closing = False
        self.closed_by_peer = False
        """Whether the peer sent a close frame, as opposed to a cut connection or a fault."""
        # Compression would cost each connection hundreds of kilobytes.
        self.response = web.WebSocketResponse(
            timeout=_CLOSE_S,
            heartbeat=ping_s,
            compress=False,
            max_msg_size=max_frame_bytes,
            protocols=(PROTOCOL,),
            decode_text=False,
        )

    async def open(self) -> None:
        """Answer the handshake. Raises InvalidRequest."""
        offered = members(self._http.headers.getall(hdrs.SEC_WEBSOCKET_PROTOCOL, (PROTOCOL,)))
        if PROTOCOL not in offered:
            raise InvalidRequest(
                f"Offer the subprotocol `{PROTOCOL}`, or none.", param=str(hdrs.SEC_WEBSOCKET_PROTOCOL)
            )
        if not self.response.can_prepare(self._http):
            raise InvalidRequest("This path speaks WebSocket, version 13. Connect with a WebSocket client.")
        await self.response.prepare(self._http)

    async def frame(self) -> bytes | None:
        """The next text message; None once a side has closed. Raises CancelledError when the connection is cut."""
        self._received += 1
        if self._received % _FRAMES_PER_TURN == 0:
            await asyncio.sleep(0)
        message = await self.response.receive()
        if message.type is WSMsgType.TEXT:
            payload: bytes = message.data
            return payload
        self.closed_by_peer = message.type is WSMsgType.CLOSE and not self._closing
        if message.type is WSMsgType.BINARY:
            self._closing = True
            await self._close(CloseCode.NOT_TEXT)
        return None

    @property
    def is_open(self) -> bool:
        transport = self._http.transport
        return not (self._closing or self.response.closed or transport is None or transport.is_closing())

    @property
    def is_behind(self) -> bool:
        """Whether the peer reads more slowly than is written: `drained` waits for it."""
        return self._http.protocol.writing_paused

    def write(self, event: bytes) -> None:
        """Write one event, if the connection is open."""
        transport = self._http.transport
        if self.is_open and transport is not None:
            transport.write(text_frame(event))

    async def drained(self, stalled_s: float) -> None:
        """Wait until the peer has read. Raises TimeoutError if it reads nothing for so long, or ConnectionError."""
        async with asyncio.timeout(stalled_s):
            await self._http.writer.drain()

    async def refuse(self, error: CausewayError) -> None:
        """Tell why there is no session for this connection, and close it."""
        self.write(encode_refusal(error))
        self.close(CloseCode.EVENTS_LOST if isinstance(error, EventsLost) else CloseCode.UNKNOWN_SESSION)
        while await self.frame() is not None:
            pass

    def close(self, code: CloseCode) -> None:
        """Close the connection after what was written. A peer that does not answer is disconnected."""
        if self.is_open:
            self._closing = True
            self._tasks.start_soon(self._close, code)

    async def _close(self, code: CloseCode) -> None:
        try:
            await self.response.close(code=code, message=MEANING[code].encode()[:_REASON_BYTES], drain=False)
        finally:
            self._loop.call_later(_CLOSE_S, self._abort)

    def _abort(self) -> None:
        if self._http.transport is not None:
            self._http.transport.abort()
