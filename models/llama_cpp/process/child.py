"""The engine behind a socketpair: ``python -m models.llama_cpp.process.child FD``.

The main thread reads what the daemon says, so that counting a prompt or cancelling a job never waits for a decode step;
the engine's thread writes what each step made. The child ends when the daemon does: the socket closes with it.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import threading
from pathlib import Path

from router.errors import CausewayError, EngineCrashed

from ..engine import Engine
from ..protocol import Emission
from . import frames

_log = logging.getLogger(__name__)
_READ_BYTES = 1 << 18
_SEND_BYTES = 1 << 20  # room for a daemon that is busy for a moment
_SWITCH_S = 0.0002  # the engine's thread comes back from decoding and must not wait 5 ms for the reader's
_OOM_SCORE = "300"  # out of memory the kernel shall take this process, not the daemon
PROTOCOL_BROKEN = 3
ENGINE_BROKEN = 4


class EngineChild:
    """One engine, one daemon."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._sending = threading.Lock()
        self._engine: Engine | None = None

    def serve(self) -> int:
        """Until the daemon goes; the exit status."""
        reader = frames.to_child()
        # One buffer for all: to ask for a fresh one each time, and keep little of it, tears the heap to pieces.
        data = memoryview(bytearray(_READ_BYTES))
        while size := self._link.recv_into(data):
            try:
                messages = reader.feed(data[:size])
            except frames.FrameError as error:
                _log.error("the daemon sent what is no message: %s", error)
                return PROTOCOL_BROKEN
            for message in messages:
                if not self._handle(message):
                    return ENGINE_BROKEN
        return 0

    def _handle(self, message: frames.ToChild) -> bool:
        """False when there is nothing left to live for."""
        if isinstance(message, frames.Load):
            return self._load(message)
        engine = self._engine
        if engine is None:
            _log.error("the daemon asked for something before it said what to load")
            return False
        if isinstance(message, frames.Submit):
            for job in message.jobs:
                engine.submit(job)
        elif isinstance(message, frames.Cancel):
            for job_id in message.jobs:
                engine.cancel(job_id)
        elif isinstance(message, frames.Count):
            self._count(engine, message)
        else:
            self._send(frames.Pong(message.ask, engine.stats()))
        return True

    def _load(self, message: frames.Load) -> bool:
        engine = Engine(message.options, self._emit, self._broken)
        try:
            engine.start()
        except CausewayError as error:
            self._send(frames.Failed(error.code, error.message))
            return False
        self._engine = engine
        # What was made while loading stays: the collector need not look at it again.
        gc.collect()
        gc.freeze()
        self._send(frames.Ready(engine.info))
        return True

    def _count(self, engine: Engine, message: frames.Count) -> None:
        try:
            tokens = engine.count(message.prompt)
        except CausewayError:
            tokens = -1
        self._send(frames.Counted(message.ask, tokens))

    def _emit(self, emissions: list[Emission]) -> None:
        assert self._engine is not None
        waiting, tokens_per_s = self._engine.load
        self._send(frames.Step(tuple(emissions), waiting, tokens_per_s))

    def _broken(self, error: Exception) -> None:
        self._send(frames.Failed(EngineCrashed.code, str(error)))
        os._exit(ENGINE_BROKEN)

    def _send(self, message: frames.FromChild) -> None:
        frame = frames.encode(message)
        try:
            with self._sending:
                self._link.sendall(frame)
        except OSError:
            os._exit(0)  # the daemon is gone, and with it everybody who could want an answer


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="engine[%(process)d] %(levelname)s %(name)s: %(message)s")
    # Ctrl-C and a service manager's stop reach the whole group; the daemon drains first, then it closes the link.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    sys.setswitchinterval(_SWITCH_S)
    link = socket.socket(fileno=int(sys.argv[1]))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
    status = 0
    with contextlib.suppress(ConnectionError):
        status = EngineChild(link).serve()
    # Not through the interpreter's end: a decode step may be running, and nothing is left to save.
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main()
