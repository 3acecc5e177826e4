"""The handling of a `Generate` call from its metadata to its status. It is a request like any other, with one outcome.

1. The token is verified before the input is read.
2. The input must end within `server.read_timeout_s`; its chunks count as a body in memory as they come.
3. A call that is cancelled, or whose deadline passes, cancels its handler, and with it the work in Triton.
4. A client that reads nothing for `STALLED_S` counts as gone: the work stops and its permit is released. gRPC cannot
reset one
   stream from the server's side, so the call itself ends when the client reads or leaves, or its connection is too old.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Iterable
from typing import Any, NamedTuple

import anyio
import msgspec
from google.protobuf.message import DecodeError
from grpc import StatusCode

from causeway_server.router.errors import BodyTooLarge, CausewayError, InvalidRequest, QueueFull, RequestTimeout
from causeway_server.router.openai.answer import encode_error, error_headers
from causeway_server.router.serving.logs import REQUEST, redacted
from causeway_server.router.serving.request import read_request_id
from causeway_server.router.serving.responses import STALLED_S
from causeway_server.router.serving.tls.peers import PeerCertificate
from causeway_server.router.trackers import FairShare
from causeway_server.router.types import RoutingHints

from ..accounts.ledger import LedgerEntry
from ..core.principal import Principal
from ..core.request_context import FREE_BYTES, BodyMemory, RequestContext
from ..http.request_admission import RequestAdmission, RequestHeaders, read_headers
from ..http.request_runner import RequestRunner
from .answer_output import CallReply, Outbox
from .request_input import RequestInput

_CHUNK_BYTES = 64  # that a chunk takes in memory beside its text
_RETRY_S = 1.0
log = logging.getLogger(__name__)
_BY_HTTP_STATUS = {
    401: StatusCode.UNAUTHENTICATED,
    403: StatusCode.PERMISSION_DENIED,
    404: StatusCode.NOT_FOUND,
    408: StatusCode.DEADLINE_EXCEEDED,
    409: StatusCode.ABORTED,
    413: StatusCode.RESOURCE_EXHAUSTED,  # as gRPC itself says of a message that is too large
    429: StatusCode.RESOURCE_EXHAUSTED,
    499: StatusCode.CANCELLED,
    502: StatusCode.UNAVAILABLE,
    503: StatusCode.UNAVAILABLE,
    504: StatusCode.DEADLINE_EXCEEDED,
}


class _IncomingCall(NamedTuple):
    call: Any
    headers: dict[str, str]
    request_id: str
    chunks: AsyncIterable[Any]
    certificate: PeerCertificate | None


class GenerateCalls(msgspec.Struct):
    """The handler of `Generate`."""

    admission: RequestAdmission
    runner: RequestRunner
    bodies: BodyMemory  # memory limit of the input
    shares: FairShare  # limit of the calls in progress, with a share for each tenant
    read_timeout_s: float  # time limit for the whole input of a call, seconds
    stalled_s: float = STALLED_S  # time without a read after which a client counts as gone, seconds
    active: int = 0  # number of calls in progress
    idle: asyncio.Event = msgspec.field(default_factory=asyncio.Event)  # set while there are no calls

    def __post_init__(self) -> None:
        self.idle.set()

    async def generate(self, chunks: AsyncIterable[Any], call: Any, certificate: PeerCertificate | None = None) -> None:
        """Handle one call of a client with this certificate. Every error becomes a status with HTTP's message."""
        headers = dict(reversed(_lines(call)))  # of a name that comes twice, the first value
        incoming = _IncomingCall(call, headers, read_request_id(headers), chunks, certificate)
        REQUEST.set(incoming.request_id)
        outbox = Outbox(call, self.stalled_s)
        async with anyio.create_task_group() as writes:
            writes.start_soon(outbox.run)
            failed = await self._failure(incoming, outbox)
            outbox.close()
        if failed is not None:
            await call.abort(status_code(failed), failed.message, trailing_metadata(failed, incoming.request_id))

    async def drain(self, timeout_s: float) -> None:
        """Wait until no call is in progress any more, at most for `timeout_s`."""
        with anyio.move_on_after(timeout_s):
            await self.idle.wait()

    async def _failure(self, incoming: _IncomingCall, outbox: Outbox) -> CausewayError | None:
        """Answer the call; return the error if it fails."""
        self.active += 1
        self.idle.clear()
        try:
            await self._answer(incoming, outbox)
        except CausewayError as error:
            return error
        except Exception as failure:
            log.error("A gRPC call failed unexpectedly: %s", redacted(failure))
            return CausewayError("The gateway failed.")
        finally:
            self.bodies.release(incoming.call)
            self.shares.release(id(incoming.call))
            self.active -= 1
            if not self.active:
                self.idle.set()
        return None

    async def _answer(self, incoming: _IncomingCall, outbox: Outbox) -> None:
        call, headers, request_id, _, certificate = incoming
        arrived_at = self.runner.clock()
        with self.runner.ledger_entry("generate", request_id, headers) as entry:
            # (1)
            await self.admission.authenticator.ready(headers.get("authorization", ""))
            principal = self.admission.caller(headers.get("authorization", ""), entry, certificate=certificate)
            context = await self._admit(incoming, arrived_at, entry, principal)
            await self.runner.run(entry, context, arrived_at, CallReply(call, outbox, context))

    async def _admit(
        self, incoming: _IncomingCall, arrived_at: float, entry: LedgerEntry, principal: Principal
    ) -> RequestContext:
        call = incoming.call
        if not self.shares.hold(id(call), principal.caller):
            raise QueueFull(
                f"Your tenant has {self.shares.held_by(principal.caller)} calls in progress, which is its "
                f"share of {self.shares.capacity} (grpc.max_calls).",
                retry_after_s=_RETRY_S,
            )
        inbound = _with_deadline(read_headers(_lines(call)), call.time_remaining())
        collected = await self._collect(incoming.chunks, principal, call)
        body, parse = collected.body()
        if (arrivals := self.admission.bodies.arrivals) is not None:
            arrivals.note(body, principal, private="private" in inbound.tags)
        body = await self.admission.with_files(body, principal, call)
        parsed = parse(body, RoutingHints(client=principal.device, deadline_ms=inbound.deadline_ms, tags=inbound.tags))
        return await self.admission.admit_parsed(parsed, inbound, len(body), principal, arrived_at, entry)

    async def _collect(self, chunks: AsyncIterable[Any], principal: Principal, call: Any) -> RequestInput:
        """Collect the input (2). Raises InvalidRequest, BodyTooLarge, RequestTimeout, RateLimited or Shed."""
        collected, size, most = RequestInput(), 0, self.admission.max_body_bytes(principal)
        try:
            async with asyncio.timeout(self.read_timeout_s):
                async for chunk in chunks:
                    size += chunk.ByteSize() + _CHUNK_BYTES
                    if size > most:
                        raise BodyTooLarge(f"The input is larger than {most} bytes. Send a smaller input.")
                    if size > FREE_BYTES:
                        self.bodies.hold(call, principal.caller, size)
                    collected.add(chunk)
                # (3) A cancelled call looks like the end of its input first: its cancellation arrives here.
                await asyncio.sleep(0)
        except TimeoutError:
            raise RequestTimeout(
                f"The input did not end within {self.read_timeout_s:g} s. Close your side of the stream after the "
                "last InputChunk."
            ) from None
        except DecodeError:
            raise InvalidRequest("A message is not an InputChunk of causeway.v1.") from None
        return collected


def _lines(call: Any) -> list[tuple[str, str]]:
    """Return the metadata as header lines; binary values are ignored."""
    metadata: Iterable[tuple[str, str | bytes]] = call.invocation_metadata()
    return [(name, value) for name, value in metadata if isinstance(value, str)]


def _with_deadline(headers: RequestHeaders, remaining_s: float | None) -> RequestHeaders:
    """Return the headers with the earlier of two deadlines: gRPC's and the header's."""
    if remaining_s is None:
        return headers
    remaining_ms = int(remaining_s * 1000)
    sooner = remaining_ms if headers.deadline_ms is None else min(remaining_ms, headers.deadline_ms)
    return msgspec.structs.replace(headers, deadline_ms=sooner)


def status_code(error: CausewayError) -> StatusCode:
    """Return the gRPC code of an error's HTTP status."""
    other = StatusCode.INVALID_ARGUMENT if error.status < 500 else StatusCode.INTERNAL
    return _BY_HTTP_STATUS.get(error.status, other)


def trailing_metadata(error: CausewayError, request_id: str) -> tuple[tuple[str, str | bytes], ...]:
    """Return the trailing metadata: the request's id, the error's code, HTTP's error body, and its headers."""
    headers = tuple((name.lower(), value) for name, value in error_headers(error).items())
    return (
        ("x-request-id", request_id),
        ("x-causeway-error-code", error.code),
        ("x-causeway-error-bin", encode_error(error)),
        *headers,
    )
