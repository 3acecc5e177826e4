"""The interface between serving and the backends: the engine child on the device, an OpenAI server in the cloud."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from causeway_server.router.errors import BackendError
from causeway_server.router.jobs.job import JobEvent
from causeway_server.router.residency import Regions
from causeway_server.router.types import Chunk, Embeddings, Priority, Request, Target

if TYPE_CHECKING:
    from causeway_server.models.constraints.grammars import EnforceableRequest
    from causeway_server.models.llama_cpp.protocol import SoftTokens
    from causeway_server.router.serving.http_client import HttpResponse
    from causeway_server.router.serving.upstream.responses import TextRelay
    from causeway_server.router.serving.upstream.server import StreamReader


class UpstreamInfo(msgspec.Struct, frozen=True):
    """Tier metadata from the cloud's response headers: the tier, why it was chosen, whether it is degraded.
    `modalities`: how the cloud handled the parts that it read itself.
    """

    tier: str
    reason: str
    degraded: bool
    modalities: str = ""
    trimmed: str = ""  # number of messages that the cloud left out to fit a context
    loosened: str = ""  # names of offered tools whose arguments are not constrained to their schemas

    def __str__(self) -> str:
        return f"answered by tier {self.tier}: {self.reason}" if self.degraded else ""


class JobTerms(msgspec.Struct, frozen=True):
    """A request that is a job may wait in the cloud, and its key makes it idempotent there. `pin` records the target
    that it is about to be sent to, and returns False for a job that was cancelled meanwhile.
    """

    key: str  # the cloud's Idempotency-Key
    priority: Priority
    pin: Callable[[str], Awaitable[bool]]


class CloudJobEnded(BackendError, code="cloud_job_ended", retryable=False):
    """The cloud ended the job without an answer; another attempt with its key gets the same result."""

    def __init__(self, event: JobEvent, body: bytes, message: str) -> None:
        """Create the error. `event`: how the device's job ends, too. `body`: the cloud's error object, JSON."""
        super().__init__(message, phase="stream")
        self.event = event
        self.body = body


class EngineWork(msgspec.Struct, frozen=True):
    """The engines' unfinished sequences and answers, and the tokens that they have generated since the start."""

    jobs: int = 0
    answers: int = 0
    tokens: int = 0


class BegunCall(msgspec.Struct, frozen=True):
    """A request that was sent to a cloud in callbacks, at `started` (monotonic s), and whose answer a task awaits."""

    response: HttpResponse
    started: float
    reader: StreamReader | None = None  # of its stream, once that has begun


class BackendRequest(msgspec.Struct, frozen=True):
    """The request of one attempt to a backend. Deadlines are monotonic seconds (the loop's clock)."""

    id: str  # the decision's id, for logs and `x-request-id`
    request: Request
    target: Target
    deadline: float  # deadline of the request, at which all its work stops
    first_token_by: float = math.inf  # deadline of the first token, for a target that streams
    confidence_tokens: int = 0  # > 0: report Confidence on the chunks of the first tokens (a handoff is possible)
    traceparent: str = ""
    policy: str = ""  # name@revision, for the upstream's records
    cacheable: bool = True  # False: the policy keeps the answer out of caches, including the cloud's
    durable: bool = False  # False: no content of the request may be written to a disk
    report_upstream: Callable[[UpstreamInfo], None] = lambda _: None  # called before the first chunk
    report_loosened: Callable[[EnforceableRequest], None] = lambda _: None  # called before the first chunk
    job: JobTerms | None = None  # set if the request is a job
    soft: tuple[SoftTokens, ...] = ()  # soft tokens whose markers are in the request's text; for targets on the device
    relay: TextRelay | None = None  # relay for chunks that consist of text alone
    is_shadow: bool = (
        False  # compared with an answer that the client already has: its failure must not count against the target
    )
    choices: int = 1  # number of requested answers
    regions: Regions = None  # regions that the request may reach; None: any
    begun: BegunCall | None = None  # set if it was sent already
    encoded: bytes = b""  # the client's body, of a chat of texts alone (`TextChat`); "": it must be encoded


class Backend(Protocol):
    """Generates for the targets at one location. Raises router.errors.BackendError (with its phase) or InvalidRequest.
    Closing the iterator (``aclose``, or its task) ends the work within one decode step and frees its resources.
    """

    def generate(self, call: BackendRequest) -> AsyncIterator[Chunk]: ...

    async def embed(self, call: BackendRequest) -> Embeddings: ...

    def complete(self, call: BackendRequest) -> Awaitable[Sequence[Chunk]] | None:
        """Return the whole answer, within the request's deadlines; None if the target sends it in pieces."""
        ...

    async def close(self) -> None: ...
