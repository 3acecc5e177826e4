"""The cache's key: everything about a request that changes its answer, and nothing else.

A field that is not named here is covered, so a new field of Request cannot make two requests collide. What is left out,
and why, is `IGNORED`.
"""

from __future__ import annotations

from hashlib import blake2b
from operator import attrgetter
from typing import Final

import msgspec

from .types import Request

SIZE_BYTES: Final = 16

IGNORED: Final[dict[str, str]] = {
    "stream": "how the answer is delivered; a kept answer is given either way",
    "include_usage": "the usage is kept with every answer",
    "user": "who asks; OpenAI uses it to watch for abuse, no model reads it",
    "hints": "covered by `prefer` alone: tags, client and deadline choose who may answer, which is the scope's part",
}

_covered = attrgetter(*[name for name in Request.__struct_fields__ if name not in IGNORED])
_ENCODER = msgspec.msgpack.Encoder()


def fingerprint(request: Request, scope: bytes) -> bytes:
    """16 bytes of BLAKE2b. `scope` keeps apart what the request does not say itself: the policy's revision, the client
    whose entries are private. msgpack is self-delimiting, so no two different requests encode alike."""
    return blake2b(_ENCODER.encode((scope, request.hints.prefer, _covered(request))), digest_size=SIZE_BYTES).digest()
