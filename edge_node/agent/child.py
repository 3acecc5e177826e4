"""The child process of `inspection`: reads one request from stdin, asks for files, writes one answer."""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Iterator

import msgspec

from causeway_server.router.bundle.refusals import DiskFull, UpdateRefused

from .inspection import BundleRequest, FetchFailed, FetchFile, Refusal, Request, frame

_LENGTH = struct.Struct(">I")
_NICE = 10  # requests come first


def main() -> None:
    os.nice(_NICE)
    output = sys.stdout.buffer
    request = msgspec.msgpack.decode(_read_frame(), type=Request)
    try:
        if isinstance(request, BundleRequest):
            from .dry_run import examine

            reply = frame(examine(request))
        else:
            from .verifier import check_updates

            reply = frame(check_updates(request, _fetch, time.monotonic))
    except UpdateRefused as refusal:
        reply = frame(Refusal(refusal.code, refusal.message))
    except OSError as error:
        reply = frame(Refusal(DiskFull.code, f"{error.filename}: {error.strerror or error}"))
    output.write(reply)
    output.flush()


def _fetch(path: str) -> Iterator[bytes]:
    sys.stdout.buffer.write(frame(FetchFile(path)))
    sys.stdout.buffer.flush()
    while True:
        reply = msgspec.msgpack.decode(_read_frame(), type=bytes | FetchFailed)
        if isinstance(reply, FetchFailed):
            raise (FileNotFoundError if reply.not_there else OSError)(reply.message)
        if not reply:
            return
        yield reply


def _read_frame() -> bytes:
    header = sys.stdin.buffer.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        sys.exit(1)  # the daemon has exited
    return sys.stdin.buffer.read(_LENGTH.unpack(header)[0])


if __name__ == "__main__":
    main()
