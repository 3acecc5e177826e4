"""The seam between the service and what generates: the engine child on the device, an OpenAI server in the cloud."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from typing import Protocol

import msgspec

from router.types import Chunk, Embeddings, Request, Target

_SAID = 200  # characters of a header that are kept


class UpstreamInfo:
    """What a cloud says about its answer, before the answer's first byte: which tier it is of, why, and whether it is
    less than was asked for.
    """

    def __init__(self) -> None:
        self.tier = ""
        self.why = ""
        self.degraded = False

    def take(self, headers: Mapping[str, str]) -> None:
        self.tier = headers.get("x-causeway-tier", "")[:_SAID]
        self.why = headers.get("x-causeway-tier-reason", "")[:_SAID]
        self.degraded = headers.get("x-causeway-degraded", "") == "true"

    def __str__(self) -> str:
        return f"answered by tier {self.tier}: {self.why}" if self.degraded else ""


class BackendRequest(msgspec.Struct, frozen=True):
    """One attempt's ask. `deadline` is monotonic seconds (the loop's clock); work must stop there, everywhere."""

    id: str  # the decision's id, for logs and `x-request-id`
    request: Request
    target: Target
    deadline: float
    first_token_by: float = math.inf  # monotonic seconds, for a target that streams
    confidence_tokens: int = 0  # > 0: report Confidence on the chunks of the first tokens (a handoff is possible)
    traceparent: str = ""
    policy: str = ""  # name@revision, for the other side's records
    keep: bool = True  # False: the policy keeps the answer out of caches, the cloud's too
    heard: UpstreamInfo = msgspec.field(default_factory=UpstreamInfo)


class Backend(Protocol):
    """Generates for the targets of one place. Raises router.errors.BackendError (with its phase) or InvalidRequest.

    Closing the iterator (``aclose``, or cancelling the task that iterates) stops the work within one decode step and
    frees its slot; nothing is left running.
    """

    def generate(self, call: BackendRequest) -> AsyncIterator[Chunk]: ...

    async def embed(self, call: BackendRequest) -> Embeddings: ...

    async def close(self) -> None: ...
