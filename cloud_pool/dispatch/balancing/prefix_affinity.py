"""Conversations stay where their prefix is warm: consistent hashing with bounded loads. Pure.

A key's endpoint is the next one clockwise on a ring of hashes; an endpoint that has its full share of the load passes
the key on to the next (Mirrokni, Thorup, Zadimoghaddam, "Consistent Hashing with Bounded Loads", SODA 2018). With c the
load factor, m the load including the new request and w an endpoint's weight, no endpoint gets more than ⌈c·m·w/Σw⌉. An
endpoint that is away moves only its own keys.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect
from collections.abc import Iterable, Mapping
from functools import lru_cache

import msgspec

from router.types import Request

_POINTS = 100  # of each endpoint on the ring: shares differ by about a tenth
_HEAD_CHARACTERS = 1024


def prefix_key(request: Request) -> bytes:
    """Return the prefix key of a request.

    For a chat it covers the tools and all messages up to and including the first user turn, so that further turns do
    not change it; for a plain prompt its first 1024 characters.
    """
    if request.kind != "chat":
        return _digest(b"".join(str(prompt)[:_HEAD_CHARACTERS].encode() for prompt in request.prompts[:1]))
    first = next((at for at, message in enumerate(request.messages) if message.role == "user"), 0)
    return _digest(msgspec.msgpack.encode((request.tools, request.messages[: first + 1])))


def load_bound(loads: Mapping[str, int], factor: float) -> int:
    """Return the most requests that an endpoint may have once one more request comes."""
    return math.ceil(factor * (1 + sum(loads.values())) / len(loads))


def preferred_endpoint(addresses: Iterable[str], loads: Mapping[str, int], key: bytes, factor: float) -> str | None:
    """Return the key's endpoint among `loads`, None if all are at their bound.

    `addresses` are all endpoints of the pool, so that keys stay where they are when some are away.
    """
    points, owners = _ring(tuple(sorted(addresses)))
    start = bisect(points, _point(key))
    seen = set()
    for step in range(len(points)):
        address = owners[(start + step) % len(points)]
        if address in seen:
            continue
        seen.add(address)
        if address in loads and loads[address] < load_bound(loads, factor):
            return address
    return None


@lru_cache(maxsize=64)
def _ring(addresses: tuple[str, ...]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Return the points in order, and the owner of each."""
    both = sorted((_point(f"{one}#{at}".encode()), one) for one in addresses for at in range(_POINTS))
    return tuple(point for point, _ in both), tuple(one for _, one in both)


def _point(text: bytes) -> int:
    return int.from_bytes(_digest(text), "big")


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=8).digest()
