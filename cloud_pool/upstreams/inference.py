"""The requests to a tier's upstream, its answers, their cost in tokens, and the interface of every kind of upstream.

The tokens that a request has used are counted until its last call ends, even after its client has left. Each call
counts separately, because a retry or another tier may request a sequence again: of these calls the one that generated
most is billed, or the latest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from causeway_server.router.errors import CausewayError
from causeway_server.router.types import Chunk, Request, TextPart, TokenLogprob, Usage

from .triton.messages import EncodeJob, SamplingParameters

if TYPE_CHECKING:
    from ..observability.tracing import Trace

BYTES_PER_TOKEN = 4  # of English text; other languages have more tokens
PROBE_S = 3.0
"""Maximum time of a probe, unless it has another one."""


class CallMeter:
    """Count of one call for one sequence. `input_tokens` is 0 until the model has reported it."""

    __slots__ = ("_on_end", "ended", "estimated_tokens", "input_tokens", "output_tokens")

    def __init__(self, estimated_tokens: int, on_end: Callable[[], None]) -> None:
        self.estimated_tokens = estimated_tokens  # of the prompt
        self.input_tokens = 0
        self.output_tokens = 0
        self.ended = False
        self._on_end = on_end

    def end(self) -> None:
        """End the count: the model has stopped, or cannot be reached. Only the first call counts."""
        if not self.ended:
            self.ended = True
            self._on_end()


class SequenceMeter:
    """Meters of the calls for one sequence. `prompt`: number of its prompt, which its choices share."""

    def __init__(self, prompt: int, on_end: Callable[[], None]) -> None:
        self.prompt = prompt
        self.calls: list[CallMeter] = []
        self._on_end = on_end

    def begin(self, estimated_tokens: int) -> CallMeter:
        """Return the meter of a new call. `estimated_tokens`: tokens of the prompt, if the model reports no number."""
        call = CallMeter(estimated_tokens, self._on_end)
        self.calls.append(call)
        return call

    @property
    def billed(self) -> CallMeter:
        """The call that is billed; there is at least one."""
        return max(reversed(self.calls), key=lambda call: call.output_tokens)


class Consumption(msgspec.Struct, frozen=True):
    """Tokens used by a request. `estimated`: whether some of its prompt tokens are an estimate."""

    usage: Usage = Usage()
    estimated: bool = False


class TokenMeter:
    """Meters of all sequences of a request."""

    def __init__(self) -> None:
        self._sequences: dict[int, SequenceMeter] = {}
        self._listeners: list[Callable[[], None]] = []
        self.audio_ms = 0  # length of the audio that encoders read for the request

    def heard(self, usage: Usage) -> Usage:
        """Return the usage with the audio that encoders read."""
        return msgspec.structs.replace(usage, audio_ms=self.audio_ms) if self.audio_ms else usage

    def sequence(self, number: int, prompt: int) -> SequenceMeter:
        """Return the meter of a sequence, the same one at each attempt."""
        return self._sequences.setdefault(number, SequenceMeter(prompt, self._check))

    @property
    def settled(self) -> bool:
        """Whether no call is in progress."""
        return all(call.ended for sequence in self._sequences.values() for call in sequence.calls)

    def on_settled(self, listener: Callable[[], None]) -> None:
        """Call `listener` once, now or when the last call in progress has ended."""
        if self.settled:
            listener()
        else:
            self._listeners.append(listener)

    async def wait(self) -> None:
        """Wait until no call is in progress."""
        settled = asyncio.Event()
        self.on_settled(settled.set)
        await settled.wait()

    def consumption(self, *, abandoned: bool) -> Consumption:
        """Return the consumption of the request so far.

        An unreported prompt costs its estimate if the client has left (`abandoned`), nothing if the upstream failed
        first.
        """
        prompts: dict[int, tuple[int, bool]] = {}  # tokens, and whether they are an estimate
        output_tokens = 0
        for sequence in self._sequences.values():
            if not sequence.calls:
                continue
            call = sequence.billed
            output_tokens += call.output_tokens
            known = prompts.get(sequence.prompt)
            if call.input_tokens:
                prompts[sequence.prompt] = (call.input_tokens, False)
            elif known is None and (abandoned or call.output_tokens):
                prompts[sequence.prompt] = (call.estimated_tokens, True)
        usage = Usage(sum(tokens for tokens, _ in prompts.values()), output_tokens)
        return Consumption(usage, any(estimated for _, estimated in prompts.values()))

    def _check(self) -> None:
        if self._listeners and self.settled:
            listeners, self._listeners = self._listeners, []
            for listener in listeners:
                listener()


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
    images: tuple[str, ...] = ()  # in base64, in the order of their places in the prompt
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
            return len(self.part.data) // BYTES_PER_TOKEN
        if self.openai is not None:
            return _text_length(self.openai) // BYTES_PER_TOKEN
        return len(self.prompt) // BYTES_PER_TOKEN if isinstance(self.prompt, str) else len(self.prompt)


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
    length = 0
    for prompt in request.prompts:
        length += len(prompt) * (1 if isinstance(prompt, str) else BYTES_PER_TOKEN)
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
        """Run a tiny inference, the only proof that a model works; `embed`: for a vector. Raises CausewayError."""
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
