"""A worker behind a socketpair: ``python -m causeway_server.models.parts.process.child FD``.

The first message names the worker; then each job gets one result. The child exits when the daemon exits, because the
socket is closed then. It may not write files or leave a core dump, and the kernel's out-of-memory killer ends it before
the daemon.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import resource
import select
import signal
import socket
import sys
from typing import Protocol

import msgspec

from ...child_process import outlive_signals
from ...llama_cpp.protocol import LENGTH, encode
from . import messages

_OOM_SCORE = 500  # before the engine's children, and long before the daemon


class Worker(Protocol):
    """Does one kind of work. It is constructed with the `WorkerSpec`."""

    def run(self, job: messages.WorkerJob, link: Link) -> messages.WorkerResult:
        """Return the result of a job (any, if `link.cancelled` during long work). Raises Refusal."""
        ...


class Link:
    """The socket to the daemon."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link

    @property
    def cancelled(self) -> bool:
        """Whether the daemon has cancelled the job or has exited. It sends no other message during a job."""
        return bool(select.select([self._link], [], [], 0)[0])

    def receive(self) -> bytes:
        """Return the next message. Raises EOFError if the daemon has exited."""
        (size,) = LENGTH.unpack(self._exactly(LENGTH.size))
        if size > messages.MAX_BYTES:
            raise EOFError("a frame is too long")
        return self._exactly(size)

    def send(self, reply: messages.ChildReply) -> None:
        self._link.sendall(encode(reply))

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            block = self._link.recv(min(size - len(data), 1 << 20))
            if not block:
                raise EOFError
            data += block
        return bytes(data)


def serve(link: Link) -> None:
    """Serve until the daemon closes the link. Raises EOFError then, and any error that the worker raises."""
    spec = msgspec.msgpack.decode(link.receive(), type=messages.WorkerSpec)
    _confine(spec.memory_bytes)
    module, _, name = spec.worker.partition(":")
    worker: Worker = getattr(importlib.import_module(module), name)(spec)
    link.send(messages.WorkerReady())
    decoder = msgspec.msgpack.Decoder(messages.WorkerJob)
    while True:
        job = decoder.decode(link.receive())
        if isinstance(job, messages.CancelJob):  # of the job that has just ended
            continue
        try:
            result = worker.run(job, link)
        except messages.Refusal as refusal:
            result = messages.Refused(str(refusal), refusal.param)
        except MemoryError:
            result = messages.Refused("the part needs more memory than its process may have. Send a smaller part")
        link.send(result)
        del job, result  # each may have megabytes


def _confine(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="worker[%(process)d] %(levelname)s %(name)s: %(message)s")
    outlive_signals(_OOM_SCORE)
    with contextlib.suppress(EOFError, ConnectionError):
        serve(Link(socket.socket(fileno=int(sys.argv[1]))))
    os._exit(0)  # nothing to save, and libraries may hang in their own exit


if __name__ == "__main__":
    main()
