"""Sealed values: no nonce is used twice, also by a process that was forked after some were drawn."""

from __future__ import annotations

import os

from causeway_server.router.serving.at_rest.sealing import Sealer, head_of

KEY = "k1"
SEALER = Sealer({KEY: bytes(32)})
VALUES = 1000


def nonces() -> set[bytes]:
    begin = len(head_of(KEY))
    return {SEALER.seal(KEY, b"the same", "place")[begin : begin + 12] for _ in range(VALUES)}


def test_each_value_has_a_nonce_of_its_own() -> None:
    first, second = nonces(), nonces()
    assert len(first) == len(second) == VALUES
    assert first.isdisjoint(second)


def test_a_forked_process_draws_its_own() -> None:
    nonces()  # some that were drawn are left
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, b"".join(nonces()))
        os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        drawn = pipe.read()
    assert len(drawn) == 12 * VALUES
    assert nonces().isdisjoint({drawn[at : at + 12] for at in range(0, len(drawn), 12)})
