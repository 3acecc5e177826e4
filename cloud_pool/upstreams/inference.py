"""The requests to a tier's upstream, its answers, and the interface that every kind of upstream has."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Protocol

import msgspec

from causeway_server.router.errors import CausewayError
from causeway_server.router.types import Chunk, Request, TextPart, TokenLogprob, Usage

from .token_meter import SequenceMeter
from .triton.messages import EncodeJob, SamplingParameters

if TYPE_CHECKING:
    from ..observability.tracing import Trace

_BYTES_PER_TOKEN = 4  # of English text; other languages have more tokens
PROBE_S = 3.0
"""Maximum time of a probe, unless it has another one."""


class EncodePart(msgspec.Struct, frozen=True):
    """A part of a request and the extraction requested for it, for an encoder model."""

    job: EncodeJob
    data: bytes


class InferenceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a tier to generate one sequence."""

    model: str
    prompt: str | tuple[int, ...]  # text, or token ids (our own model only)
    parameters: SamplingParameters
    embed: bool = False  # make the prompt's vector, as JSON in the answer's text, instead of an answer
    part: EncodePart | None = None  # read this instead of the prompt
    openai: Request | None = None  # send this, with one sequence, to an OpenAI server; `prompt` is empty then
    deadline: float  # monotonic, s
    caller: str = ""  # callers share the time of embeddings in our own model; a digest, as Triton's logs may name it
    request_id: str = ""
    traceparent: str = ""
    trace: Trace | None = None  # of the client's request
    meter: SequenceMeter | None = None  # counts what it costs; None: the call is not billed

    @property
    def estimated_tokens(self) -> int:
        """Estimated number of tokens prefilled before the first answer; a part counts as if its bytes were text."""
        if self.part is not None:
            return len(self.part.data) // _BYTES_PER_TOKEN
        if self.openai is not None:
            return _text_length(self.openai) // _BYTES_PER_TOKEN
        return len(self.prompt) // _BYTES_PER_TOKEN if isinstance(self.prompt, str) else len(self.prompt)


class Delta(msgspec.Struct, frozen=True):
    """A response of a sequence; the last one may hold only `final`."""

    text: str = ""
    finish_reason: str | None = None
    new_tokens: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    input_tokens: int = 0  # 0: not known yet
    final: bool = False
    chunk: Chunk | None = None  # what the client gets, from an upstream that parses tool calls and thoughts itself
    usage: Usage | None = None  # of the sequence, where the upstream reports more than numbers of tokens


def _text_length(request: Request) -> int:
    """Return the length of the request's texts in characters, with token ids as if they were text."""
    length = sum(len(prompt) * (1 if isinstance(prompt, str) else _BYTES_PER_TOKEN) for prompt in request.prompts)
    for message in request.messages:
        content = message.content
        if isinstance(content, tuple):
            length += sum(len(part.text) for part in content if isinstance(part, TextPart))
        else:
            length += len(content or "")
    return length


class Upstream(Protocol):
    """A server of any kind that generates for tiers."""

    def generate(self, request: InferenceRequest, /) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of one sequence. Raises CausewayError; closing the generator stops the work."""
        ...

    async def probe(self, model: str, timeout_s: float = PROBE_S, *, embed: bool = False) -> None:
        """Run a tiny inference, because only that proves that the model works. Raises CausewayError.

        Args:
            embed: Whether to request a vector, for models that only embed.
        """
        ...

    def last_received_at(self, model: str) -> float:
        """Return when the model last sent anything, on any call (monotonic, s); minus infinity before that."""
        ...

    def fail_calls(self, model: str, error: CausewayError, *, begun: bool = True) -> None:
        """Fail the model's calls in progress with `error`; `begun` False: only those without a response yet."""
        ...

    def renew(self) -> None:
        """Replace a connection through which nothing arrives any more."""
        ...

    async def close(self) -> None: ...
