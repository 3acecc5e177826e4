"""Ports of 127.0.0.1 for programs under test.

They lie below the kernel's ephemeral range, so no outgoing connection takes the port of a program that is down for a
moment, and each is claimed until this process ends, so no other test process takes it either.
"""

from __future__ import annotations

import itertools
import os
import socket
from contextlib import suppress

_FIRST, _COUNT = 10_000, 22_000  # the ephemeral range begins at 32768
_numbers = itertools.count(os.getpid() * 97)
_claims: list[socket.socket] = []


def free_port() -> int:
    """Return a port on which nothing listens."""
    for number in itertools.islice(_numbers, _COUNT):
        port = _FIRST + number % _COUNT
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            claim = socket.socket(socket.AF_UNIX)
            claim.bind(f"\0causeway-test-port-{port}")
            _claims.append(claim)
            return port
    raise OSError("every port is taken")
