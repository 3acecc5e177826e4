"""The encoder model in the Python backend, without Triton's types: it turns parts into facts.

Decoder and encoder are children of the model's process: if a file kills one of them, only that request fails, and the
next one gets a new child. Both are started, and the encoder's model is loaded, before the model is ready. Parts are
encoded one after the other, because concurrent encoding is not faster.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import msgspec

from causeway_server.models.parts.graph.branch import LocalBranch
from causeway_server.models.parts.process.messages import (
    AudioTerms,
    Found,
    PartLimits,
    Refusal,
    Refused,
    SegmentFound,
    WorkerSpec,
)
from causeway_server.models.parts.process.parent import WorkerFailed, WorkerTimeout
from causeway_server.router.errors import CausewayError, ClientGone
from causeway_server.router.types import Fact, Modality

from ..upstreams.triton.messages import EncodeJob, PartFailed, PartRead, PartReply
from .model_runtime import Responder

POLL_S = 0.05
_MAX_REQUEST_S = 600.0  # of a request that names no deadline
_DECODER_BYTES = 512 * 1024 * 1024


class EncoderOptions(msgspec.Struct, frozen=True):
    """Options of an encoder model. `python`: interpreter that has the encoder's packages."""

    kind: Modality
    encoder: WorkerSpec
    python: str
    limits: PartLimits = PartLimits()


class PartRequest(msgspec.Struct, frozen=True):
    """A request to an encoder. `job`: None for a probe of the process, which needs no child."""

    job: EncodeJob | None
    data: bytes = b""
    deadline_s: float | None = None  # seconds until the deadline
    call_name: str = ""  # name by which the call can be cancelled


class EncoderRuntime:
    """The children of one encoder model, and every request in it, in a separate event loop.

    `report` gets changes: requests in progress, requests so far, children started so far. Raises WorkerFailed if a
    child cannot be started or cannot load its model.
    """

    def __init__(self, options: EncoderOptions, report: Callable[[int, int, int], None]) -> None:
        self._kind = options.kind
        self._report = report
        self._branch = LocalBranch(
            options.kind, options.encoder, options.limits, _DECODER_BYTES, _MAX_REQUEST_S, "", options.python
        )
        self._by_call_name: dict[str, asyncio.Task[None]] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._requests = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="causeway-encoder", daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._warm(), self._loop).result()

    def submit(self, request: PartRequest, responder: Responder[PartReply]) -> None:
        """Start a request; every outcome goes to `responder`."""
        self._loop.call_soon_threadsafe(self._start, request, responder)

    def cancel(self, call_name: str) -> None:
        """End the request with this name if it is still in progress."""
        self._loop.call_soon_threadsafe(self._cancel, call_name)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._branch.close(), self._loop).result(timeout=5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)

    async def _warm(self) -> None:
        await self._branch.decoder.warm()
        if self._kind != "file":
            await self._branch.encoder.warm()
        self._tell()

    def _start(self, request: PartRequest, responder: Responder[PartReply]) -> None:
        work = self._loop.create_task(self._serve(request, responder))
        self._running.add(work)
        self._requests += request.job is not None
        work.add_done_callback(self._ended)
        if request.call_name:
            self._by_call_name[request.call_name] = work
            work.add_done_callback(lambda _: self._by_call_name.pop(request.call_name, None))
        self._tell()

    def _cancel(self, call_name: str) -> None:
        if call_name in self._by_call_name:
            self._by_call_name[call_name].cancel()

    def _ended(self, work: asyncio.Task[None]) -> None:
        self._running.discard(work)
        self._tell()

    def _tell(self) -> None:
        self._report(len(self._running), self._requests, self._branch.starts)

    async def _serve(self, request: PartRequest, responder: Responder[PartReply]) -> None:
        reading = asyncio.ensure_future(self._read(request, responder))
        try:
            while not reading.done():
                await asyncio.wait([reading], timeout=POLL_S)
                if responder.is_cancelled():
                    reading.cancel()
            responder.send(reading.result(), last=True)
        except asyncio.CancelledError:
            reading.cancel()
            responder.fail(ClientGone("The request was cancelled."))
        except Exception:
            responder.fail(CausewayError("The encoder failed."))
            raise

    async def _read(self, request: PartRequest, responder: Responder[PartReply]) -> PartReply:
        left_s = _MAX_REQUEST_S if request.deadline_s is None else min(request.deadline_s, _MAX_REQUEST_S)
        deadline, job = self._loop.time() + left_s, request.job
        if job is None:
            return PartRead(Found(Fact("", 1.0)))
        if job.kind != self._kind:
            return PartFailed(f"This model reads parts of the kind {self._kind}, not {job.kind}.")
        try:
            read = await self._branch.run(
                request.data,
                deadline,
                AudioTerms(job.language, job.prompt, job.temperature, job.words),
                (lambda segment: responder.send(SegmentFound(segment), last=False)) if job.tell else None,
            )
        except Refusal as refusal:
            return Refused(str(refusal), refusal.param)
        except WorkerFailed as failure:
            return PartFailed(str(failure), late=isinstance(failure, WorkerTimeout))
        return PartRead(read.found, read.seconds)
