"""The engine behind a socketpair: ``python -m causeway_server.models.llama_cpp.process.child FD``.

The main thread reads the daemon's messages, so that counting a prompt or cancelling a job never waits for a decode
step; the engine's thread writes each step's emissions. The child exits with the daemon, as the socket is closed then.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import socket
import sys
import threading

from causeway_server.router.errors import CausewayError, EngineCrashed

from ...child_process import outlive_signals
from .. import protocol
from ..engine import Engine
from ..protocol import Emission

log = logging.getLogger(__name__)
_READ_BYTES = 1 << 18
_SEND_BYTES = 1 << 20  # socket buffer: room for a daemon that is busy for a moment
_SWITCH_S = 0.0002  # after a decode the engine's thread must not wait the default 5 ms for the reader's
_OOM_SCORE = 300
EXIT_PROTOCOL_ERROR = 3
EXIT_ENGINE_FAILED = 4


class EngineChild:
    """An engine that the daemon controls over `link`."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._sending = threading.Lock()
        self._engine: Engine | None = None

    def serve(self) -> int:
        """Serve until the daemon closes the link; return the exit status."""
        reader = protocol.FrameReader(protocol.DAEMON_MESSAGES)
        # One buffer for all reads: allocating a large one each time and keeping little of it fragments the heap.
        data = memoryview(bytearray(_READ_BYTES))
        while size := self._link.recv_into(data):
            try:
                messages = reader.feed(data[:size])
            except protocol.FrameError as error:
                log.error("The daemon sent an invalid message: %s.", error)
                return EXIT_PROTOCOL_ERROR
            for message in messages:
                if not self._handle(message):
                    return EXIT_ENGINE_FAILED
        if self._engine is not None:
            self._engine.flush()
        return 0

    def _handle(self, message: protocol.DaemonMessage) -> bool:
        """Handle one message; return False if the child must exit."""
        if isinstance(message, protocol.Load):
            return self._load(message)
        engine = self._engine
        if engine is None:
            log.error("The daemon sent a request before it sent the model to load.")
            return False
        if isinstance(message, protocol.Submit):
            for job in message.jobs:
                engine.submit(job)
        elif isinstance(message, protocol.Cancel):
            for job_id in message.jobs:
                engine.cancel(job_id)
        elif isinstance(message, protocol.Count | protocol.Detokenize):
            self._send(_counted(engine, message))
        else:
            self._send(protocol.Pong(engine.stats()))
        return True

    def _load(self, message: protocol.Load) -> bool:
        engine = Engine(message.options, self._emit, self._fail)
        try:
            engine.start()
        except CausewayError as error:
            self._send(protocol.Failed(error.code, error.message))
            return False
        self._engine = engine
        # Objects created while loading live as long as the process: exempt them from garbage collection.
        gc.collect()
        gc.freeze()
        self._send(protocol.Ready(engine.info))
        return True

    def _emit(self, emissions: list[Emission]) -> None:
        assert self._engine is not None
        waiting, tokens_per_s = self._engine.load
        self._send(protocol.Step(tuple(emissions), waiting, tokens_per_s))

    def _fail(self, error: Exception) -> None:
        self._send(protocol.Failed(EngineCrashed.code, str(error)))
        os._exit(EXIT_ENGINE_FAILED)

    def _send(self, message: protocol.ChildMessage) -> None:
        frame = protocol.encode(message)
        try:
            with self._sending:
                self._link.sendall(frame)
        except OSError:
            os._exit(0)  # the daemon is gone, and every client with it


def _counted(engine: Engine, message: protocol.Count | protocol.Detokenize) -> protocol.Counted:
    try:
        if isinstance(message, protocol.Detokenize):
            return protocol.Counted(message.request_id, len(message.tokens), text=engine.detokenize(message.tokens))
        if message.ids:
            ids = engine.tokenize(message.prompt)
            return protocol.Counted(message.request_id, len(ids), ids)
        return protocol.Counted(message.request_id, engine.count(message.prompt))
    except CausewayError as error:
        return protocol.Counted(message.request_id, -1, error=error.code, detail=error.message, param=error.param or "")


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="engine[%(process)d] %(levelname)s %(name)s: %(message)s")
    outlive_signals(_OOM_SCORE)
    sys.setswitchinterval(_SWITCH_S)
    link = socket.socket(fileno=int(sys.argv[1]))
    link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BYTES)
    status = 0
    with contextlib.suppress(ConnectionError):
        status = EngineChild(link).serve()
    # Skip the interpreter's shutdown: a decode step may be running, and there is nothing to save.
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main()
