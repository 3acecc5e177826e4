"""One request on its tier: Request → prompts → Triton → Chunks. The gateway's hops after parsing, in order:

admission   a place in the tier, or a bounded wait          admission.Admission
prompt      the chat template of the tier's model           tiers.Tier.prompts
Triton      one call for each prompt, n sequences in each   pool.pool.Pool.lease, triton.Triton.generate
Chunks      text → text and tool calls; usage at the end    Choice
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

import msgspec

from router.errors import CausewayError, CloudFailed, StreamBroken, UnsupportedFeature
from router.tools import ToolCallParser, tool_schema
from router.types import Chunk, FinishReason, Request, TokenLogprob, Usage

from .admission import Admission, Priority
from .merging import merged
from .parameters import SamplingParameters, from_request
from .pool.pool import Pool
from .pool.prefix import key_of
from .tensors import Ask, Delta
from .tiers import Tier


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One caller's ask for one tier."""

    id: str
    request: Request
    tier: Tier
    deadline: float  # monotonic, s
    priority: Priority = "standard"
    traceparent: str = ""


class Service:
    """`pools` and `admissions` by the tier's name."""

    def __init__(
        self,
        pools: Mapping[str, Pool],
        admissions: Mapping[str, Admission],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pools = pools
        self._admissions = admissions
        self._clock = clock

    async def answer(self, call: Call) -> AsyncGenerator[Chunk, None]:
        """The answer, piece by piece. Raises CausewayError; closing it stops the work in Triton and frees the place."""
        refuse_unable(call.request)
        asks = self._asks(call)
        admission = self._admissions[call.tier.name]
        async with admission.place(call.priority, call.deadline - self._clock()):
            pool, key = self._pools[call.tier.name], key_of(call.request)
            choices = [Choice(call.request, index) for index in range(len(asks) * call.request.n)]
            usage = Usage()
            for chunk in _echo(call.request, choices):
                yield chunk
            async with aclosing(merged([self._leased(pool, ask, key) for ask in asks])) as deltas:
                async for prompt, delta in deltas:
                    usage = _counted(usage, delta)
                    first = prompt * call.request.n
                    for at in range(len(delta.texts)):
                        for chunk in choices[first + at].take(delta, at):
                            yield chunk
            if not all(choice.ended for choice in choices):
                raise StreamBroken("the model ended without saying why", phase="stream")
            yield Chunk(usage=usage)

    async def _leased(self, pool: Pool, ask: Ask, key: bytes) -> AsyncGenerator[Delta, None]:
        """One endpoint's answer, and how it did."""
        with pool.lease(key=key) as lease:
            try:
                async with aclosing(lease.triton.generate(ask)) as deltas:
                    async for delta in deltas:
                        lease.first_token(self._clock() - lease.began_at)
                        yield delta
            except CausewayError as error:
                lease.failed(error)
                raise
            lease.succeeded()

    def _asks(self, call: Call) -> list[Ask]:
        """Raises InvalidRequest."""
        tier = call.tier
        parameters = from_request(
            call.request,
            max_tokens=tier.max_tokens,
            schema=tool_schema(call.request),
            guided_key=tier.config.guided,
            temperature=tier.wording.temperature,
        )
        return [
            Ask(
                model=tier.model,
                prompt=prompt,
                parameters=_for_prompt(parameters, at * call.request.n),
                deadline=call.deadline,
                request_id=call.id,
                traceparent=call.traceparent,
            )
            for at, prompt in enumerate(tier.prompts(call.request))
        ]


class Choice:
    """Choice `index` of the answer: its text becomes text and tool calls."""

    def __init__(self, request: Request, index: int) -> None:
        self._index = index
        self._parser = ToolCallParser(request) if request.tools else None
        self.ended = False

    def take(self, delta: Delta, at: int) -> list[Chunk]:
        """What sequence `at` of this response says. Raises CloudFailed for an end that is none."""
        if self.ended:
            return []
        text, reason = delta.texts[at], _finish_reason(delta.finish_reasons[at])
        self.ended = reason is not None
        if self._parser is None:
            if not (text or reason or delta.new_tokens[at] or delta.logprobs[at]):
                return []
            return [self._chunk(text, delta.new_tokens[at], delta.logprobs[at], reason)]
        return self._parsed(text, delta.new_tokens[at], delta.logprobs[at], reason)

    def said(self, text: str) -> Chunk:
        return Chunk(text=text, index=self._index)

    def _chunk(self, text: str, tokens: int, logprobs: tuple[TokenLogprob, ...], reason: FinishReason | None) -> Chunk:
        return Chunk(text=text, index=self._index, tokens=tokens, logprobs=logprobs, finish_reason=reason)

    def _parsed(
        self, text: str, tokens: int, logprobs: tuple[TokenLogprob, ...], reason: FinishReason | None
    ) -> list[Chunk]:
        assert self._parser is not None
        text, calls = self._parser.feed(text)
        if reason is not None:
            rest, last = self._parser.finish()
            text, calls = text + rest, (*calls, *last)
        if reason == "stop" and self._parser.called:
            reason = "tool_calls"
        if not (text or calls or reason or tokens or logprobs):
            return []
        chunk = self._chunk(text, tokens, logprobs, reason)
        return [msgspec.structs.replace(chunk, tool_calls=calls) if calls else chunk]


def refuse_unable(request: Request) -> None:
    """What the tensors cannot say. Raises UnsupportedFeature."""
    if request.kind == "embedding":
        raise UnsupportedFeature("tiers generate text; embeddings are made on the device", param="model")
    if request.suffix is not None:
        raise UnsupportedFeature("`suffix`: the tiers do not fill in the middle. Remove it.", param="suffix")
    if request.echo and request.logprobs is not None:
        raise UnsupportedFeature(
            "`echo` with `logprobs`: the tiers give none for the prompt. Remove one.", param="echo"
        )


def _echo(request: Request, choices: list[Choice]) -> list[Chunk]:
    if not request.echo:
        return []
    prompts = [prompt for prompt in request.prompts if isinstance(prompt, str)]
    return [choice.said(prompts[at // request.n]) for at, choice in enumerate(choices) if prompts[at // request.n]]


def _for_prompt(parameters: SamplingParameters, offset: int) -> SamplingParameters:
    """Each prompt of a list draws anew, also under one seed."""
    if parameters.seed is None or not offset:
        return parameters
    return msgspec.structs.replace(parameters, seed=parameters.seed + offset)


def _finish_reason(said: str | None) -> FinishReason | None:
    if said is None:
        return None
    if said == "stop":
        return "stop"
    if said == "length":
        return "length"
    raise CloudFailed(f"the model ended the answer with {said!r}", phase="stream")


def _counted(usage: Usage, delta: Delta) -> Usage:
    # The backend says the prompt's length with each response or with the last one only: count it once.
    prompt = delta.input_tokens if delta.final else 0
    made = sum(delta.new_tokens)
    if not prompt and not made:
        return usage
    return Usage(usage.prompt_tokens + prompt, usage.completion_tokens + made)
