"""The daemon's side of a worker child: start it when needed, ask it, and replace it when it dies or hangs."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from typing import Protocol

import msgspec

from ...child_process import child_environment, start_child
from ...llama_cpp.protocol import LENGTH, encode
from . import messages
from .messages import ChildReply, Refusal, Refused, Segment, SegmentFound, WorkerJob, WorkerResult, WorkerSpec

log = logging.getLogger(__name__)

_ENVIRONMENT = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
_LOAD_S = 120.0  # to load a model, whatever the deadlines of the jobs that wait; then the child is replaced
_decoder: msgspec.msgpack.Decoder[ChildReply] = msgspec.msgpack.Decoder(ChildReply)


class Tell(Protocol):
    """Receives a segment of an audio clip as soon as it is transcribed."""

    def __call__(self, segment: Segment, /) -> None: ...


class WorkerFailed(Exception):
    """The child died or cannot be started. The next job gets a new one."""


class WorkerTimeout(WorkerFailed):
    """The job did not end before its deadline; its child is gone."""


class WorkerProcess:
    """A worker in a child process. Its jobs run one after the other, and the child starts with the first one.

    `settle_s`: time for a cancelled job to end by itself, before the child is killed. `python` has its packages.
    """

    def __init__(self, spec: WorkerSpec, settle_s: float = 2.0, python: str = sys.executable) -> None:
        self._spec = spec
        self._python = python
        self._settle_s = settle_s
        self._load_by = 0.0  # loop time
        self._ready = False
        self._turn = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._settling: asyncio.Task[None] | None = None
        self._closed = False
        self.starts = 0  # children started so far

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def busy(self) -> bool:
        """Whether a job is running, or a cancelled one has not ended yet."""
        return self._turn.locked()

    async def run(self, job: WorkerJob, deadline: float, tell: Tell | None = None) -> WorkerResult:
        """Return the worker's result. Raises Refusal for the part, WorkerTimeout, or WorkerFailed if the child died.

        `deadline`: in the loop's time; waiting for earlier jobs counts. `tell` gets each segment that comes before the
        result; may not raise.
        """
        try:
            async with asyncio.timeout_at(deadline):
                result = await self._in_turn(job, tell)
        except TimeoutError:
            raise WorkerTimeout("the work took too long") from None
        if isinstance(result, Refused):
            raise Refusal(result.reason, result.param)
        return result

    async def warm(self) -> None:
        """Start the child and return when its model is loaded. Raises WorkerFailed."""
        async with self._turn:
            await self._ensure_child()
            await self._wait_until_ready()

    async def close(self) -> None:
        """End the child; later jobs fail."""
        self.end()
        if self._settling is not None:
            await self._settling

    def end(self) -> None:
        """End the child at once; later jobs fail. A cancelled job that has not ended yet fails, too."""
        self._closed = True
        self._end_child()

    async def _in_turn(self, job: WorkerJob, tell: Tell | None) -> WorkerResult:
        await self._turn.acquire()
        try:
            await self._ensure_child()
            await self._wait_until_ready()  # cancelled meanwhile: the child goes on loading, for the next job
        except BaseException:
            self._turn.release()
            raise
        try:
            result = await self._ask(job, tell)
        except asyncio.CancelledError:
            # The next job must not get this one's result, and the caller does not wait until that is certain.
            self._settling = asyncio.get_running_loop().create_task(self._settle())
            raise
        except BaseException:
            self._turn.release()
            raise
        self._turn.release()
        return result

    async def _ask(self, job: WorkerJob, tell: Tell | None) -> WorkerResult:
        assert self._writer is not None
        try:
            self._writer.write(encode(job))
            await self._writer.drain()
            while isinstance(result := await self._receive(), SegmentFound):
                if tell is not None:
                    tell(result.segment)
        except (OSError, EOFError, msgspec.DecodeError, UnicodeDecodeError) as error:
            self._end_child()
            raise WorkerFailed("its process died") from error
        assert not isinstance(result, messages.WorkerReady)
        return result

    async def _wait_until_ready(self) -> None:
        """Wait until the child is ready. Raises WorkerFailed if it died, or takes too long to load."""
        if self._ready:
            return
        try:
            async with asyncio.timeout_at(self._load_by):
                await self._receive()
        except TimeoutError:
            self._end_child()
            raise WorkerFailed(f"the worker process did not load within {_LOAD_S:g} s") from None
        except (OSError, EOFError, msgspec.DecodeError, UnicodeDecodeError) as error:
            self._end_child()
            raise WorkerFailed("the worker process died while it loaded") from error
        self._ready = True

    async def _receive(self) -> ChildReply:
        assert self._reader is not None
        (size,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        if size > messages.MAX_BYTES:
            raise EOFError("a frame is too long")
        return _decoder.decode(await self._reader.readexactly(size))

    async def _settle(self) -> None:
        """Wait briefly for the result of a cancelled job, or end the child; then the next job may start."""
        try:
            async with asyncio.timeout(self._settle_s):
                if self._writer is not None:
                    self._writer.write(encode(messages.CancelJob()))
                    while isinstance(await self._receive(), SegmentFound):
                        pass
        except TimeoutError:
            worker = self._spec.worker.rpartition(":")[2]
            log.warning(
                "The worker %s hung: its process is replaced %g s after its job was cancelled.", worker, self._settle_s
            )
            self._end_child()
        except (OSError, EOFError, msgspec.DecodeError, UnicodeDecodeError):
            self._end_child()
        finally:
            self._turn.release()

    async def _ensure_child(self) -> None:
        if self._closed:
            raise WorkerFailed("the worker is closed")
        if self._writer is not None and self._process is not None and self._process.poll() is None:
            return
        self._end_child()
        try:
            self._process, ours = start_child(
                "causeway_server.models.parts.process.child", _environment(self._python), self._python
            )
        except OSError as error:
            raise WorkerFailed(f"the worker process cannot be started: {error.strerror}") from error
        self.starts += 1
        self._load_by = asyncio.get_running_loop().time() + _LOAD_S
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(sock=ours, limit=1 << 20)
        except BaseException:
            ours.close()
            raise
        self._writer.write(encode(self._spec))

    def _end_child(self) -> None:
        process, writer = self._process, self._writer
        self._process = self._reader = self._writer = None
        self._ready = False
        if writer is not None:
            writer.transport.abort()
        if process is not None:
            process.kill()
            process.wait()  # of a killed child: returns at once


def _environment(python: str) -> dict[str, str]:
    environ = child_environment(**_ENVIRONMENT)
    if python != sys.executable:
        environ.pop("LD_LIBRARY_PATH", None)  # of this process's environment
    return environ
