"""Answers of the device, as frozen dataclasses."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass


@dataclass(frozen=True)
class Decision:
    """The target that answered and the reason: the ``x-causeway-*`` response headers.

    Attributes:
        id: The decision record's id; `Causeway.decision` reads the record.
        route: ``edge``, ``cloud``, ``cache`` or ``none``.
        target: The name of the policy's target that answered.
        reason: The name of the policy's rule, or why a later target answered.
        cache: ``hit``, ``semantic``, ``stale``, ``miss``, ``bypass`` or ``coalesced``.
        cache_reason: Why the cache was bypassed.
        policy: The policy in force, ``name@revision``.
        degraded: Whether a failure moved the answer away from the policy's first choice.
        first_token_ms: Milliseconds from the call to the first text or tool call, measured by this client (streams).
    """

    id: str = ""
    route: str = ""
    target: str = ""
    reason: str = ""
    cache: str = ""
    policy: str = ""
    degraded: bool = False
    first_token_ms: float | None = None
    cache_reason: str = ""


@dataclass(frozen=True)
class Usage:
    """Token counts of one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Choice:
    """A choice, one of the `n` answers to a request."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = ""


@dataclass(frozen=True)
class Answer:
    """A complete answer. `text`, `tool_calls` and `finish_reason` are those of the first choice.

    Attributes:
        decision: The target that answered and the reason.
        choices: One entry per requested answer (`n`).
        usage: Token counts; zeros if the device reported none.
        model: The model's name as the target reported it.
        total_ms: Milliseconds from the call to the end of the answer, measured by this client.
    """

    decision: Decision
    choices: tuple[Choice, ...] = ()
    usage: Usage = Usage()
    model: str = ""
    total_ms: float = 0.0

    @property
    def text(self) -> str:
        return self.choices[0].text if self.choices else ""

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.choices[0].tool_calls if self.choices else ()

    @property
    def finish_reason(self) -> str:
        return self.choices[0].finish_reason if self.choices else ""


@dataclass(frozen=True)
class ToolCallDelta:
    """A part of tool call number `index`. Its first part has the `id` and the `name`."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


@dataclass(frozen=True)
class Chunk:
    """A streamed piece of choice `index`. The last chunk of an answer may hold the usage alone."""

    text: str = ""
    index: int = 0
    tool_calls: tuple[ToolCallDelta, ...] = ()
    finish_reason: str = ""
    usage: Usage | None = None


@dataclass(frozen=True)
class Embeddings:
    """Embedding vectors, one per input text: shape [n_texts][n_dimensions]."""

    vectors: tuple[tuple[float, ...], ...]
    decision: Decision
    usage: Usage = Usage()
    model: str = ""


@dataclass(frozen=True)
class Model:
    """A name that `model=` accepts. `owned_by` is ``causeway`` (auto), ``edge`` or ``cloud``."""

    id: str
    owned_by: str = ""


@dataclass(frozen=True)
class Job:
    """A request that was accepted to be answered later.

    Attributes:
        id: The job's id.
        status: ``queued``, ``waiting``, ``running``, ``succeeded``, ``failed``, ``dead``, ``cancelled`` or ``expired``.
        answer: The answer of a job that succeeded.
        error: The message of a job that ended without an answer.
        code: The code of that error.
        attempts: Number of attempts, including the one that succeeded.
        webhook: The URL that is notified of the job's end; "" for none.
        webhook_status: ``pending``, ``delivered``, ``failed`` or ``disabled`` (the receiver answered 410); "" before
            the job has ended.
    """

    id: str
    status: str
    answer: Answer | None = None
    error: str = ""
    code: str = ""
    attempts: int = 0
    webhook: str = ""
    webhook_status: str = ""

    @property
    def ended(self) -> bool:
        return self.status in ("succeeded", "failed", "dead", "cancelled", "expired")


Chunks = Generator[Chunk, None, None]
AsyncChunks = AsyncGenerator[Chunk, None]
