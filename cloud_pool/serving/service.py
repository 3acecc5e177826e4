"""The path of a parsed request through the tiers: Request → fallback steps → prompts → Triton → Chunks. Its hops:

parts       audio, images and files → text in the prompt     parts.request_parts.RequestParts.read
fallback    which tiers to try, in order, each with its reason  degradation.fallback.TierFallback
prompt      the chat template of the tier's model               config.tiers.Tier.prompts
admission   a permit for each sequence, or a bounded wait       admission.AdmissionController
dispatch    one call for each sequence: n for each prompt       dispatch.dispatcher.Dispatcher.generate
Chunks      text → text and tool calls; usage at the end        AnswerBuilder

1. A tier sends its first delta: the AnswerHead names the tier and the reason, and no other tier is tried any more.
2. The tier refuses, fails or is too slow, and the request is not the cause: try the next tier within the same deadline;
   after a variant of the tier, try the tier's own model, for which a variant leaves at least half of the time.
3. It fails because of the request: return that error.
4. No tier is left: return a stale answer to the same question, if there is one.
5. Otherwise raise the error with the soonest Retry-After of all tiers.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from causeway_server.models.constraints.grammars import EnforceableRequest, check_schemas
from causeway_server.router import errors
from causeway_server.router.parts.reading import EXAMINED, first_part, images_of
from causeway_server.router.reasoning import ReasoningParser, Thinking, thinks
from causeway_server.router.tool_calls.parser import ToolCallParser
from causeway_server.router.tool_calls.schema import NO_FRAME, answer_schema, call_frame
from causeway_server.router.types import (
    Chunk,
    Embeddings,
    FinishReason,
    Modality,
    Request,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)

from ..core.request_context import AnswerHead, CachedAnswer, Generate, Piece, RequestContext, answer_head
from ..degradation.fallback import REQUESTED, DegradationMetrics, FallbackRequest, FallbackStep, Kind, TierFallback
from ..degradation.tier_attempt import TierAttempt, TierFailed, TierRuntime, sole_attempt
from ..degradation.tier_health import Stress, caller_position
from ..dispatch.endpoint_selection import prefix_key
from ..tiers.tier import InferencePrompt, Tier
from ..tiers.variants import TierVariants
from ..upstreams.features import check_features
from ..upstreams.inference import Delta, InferenceRequest
from ..upstreams.triton.messages import SamplingParameters, from_request
from ..upstreams.triton.trtllm import check_parameters
from .guard import GatewayGuard, GuardedRequest

if TYPE_CHECKING:
    from ..parts.request_parts import ReadParts, RequestParts

Shadowed = Callable[[Generate, RequestContext], AsyncGenerator[Piece, None]]
"""The type of `ShadowCopies.answer`."""
FindStale = Callable[[Request, str], Awaitable[CachedAnswer | None]]
"""Returns a stale answer to the same request of a tenant, if there is one. Never raises."""


async def nothing_stale(request: Request, tenant: str) -> CachedAnswer | None:
    return None


class BegunAnswer(msgspec.Struct, eq=False):
    """An answer that was begun in callbacks. `builder` and `head` are there from the first token on."""

    steps: tuple[FallbackStep, ...]
    attempt: TierAttempt
    builder: AnswerBuilder | None = None
    head: AnswerHead = AnswerHead()


class _Uncounted(nullcontext[None]):
    """The arm of an answer where no tier has variants."""

    def failed(self) -> None:
        """No-op."""

    def ended(self) -> None:
        """No-op."""


_UNCOUNTED = _Uncounted()


class Service(msgspec.Struct, frozen=True):
    """The service, which answers requests from the tiers."""

    runtimes: Mapping[str, TierRuntime]  # runtimes by the tier's name
    fallback: TierFallback  # planner of the tiers to try
    find_stale: FindStale = nothing_stale  # looks up a stale answer when every tier has failed
    parts: RequestParts | None = None  # reader of audio, images and files; None if no tier takes any
    metrics: DegradationMetrics | None = None  # counters of fallback and degraded answers
    clock: Callable[[], float] = time.monotonic  # monotonic clock, seconds
    variants: TierVariants = msgspec.field(default_factory=TierVariants)  # chooser of each tier's model
    guard: GatewayGuard | None = None  # rules about embeddings; `GatewayGuard.around` applies them to `answer`
    shadow: Shadowed | None = None  # copies requests to shadow variants; None: there are none

    async def embed(self, context: RequestContext) -> tuple[AnswerHead, Embeddings]:
        """Return the answer's head and the vectors of an embedding request, in order. Raises CausewayError.

        Each input is a sequence, with its own permit and call; a long list enters the tier's queue in parts of
        `max_sequences`. No other tier ever answers, because vectors of two models cannot be compared.
        """
        tier = context.tier
        tier.check_ability("embedding")
        guarded = None if self.guard is None else GuardedRequest(self.guard)
        if guarded is not None:
            context = msgspec.structs.replace(context, request=await guarded.check(context.request))
        inputs = context.request.prompts
        vectors: list[Vector] = []
        tokens = 0
        most = tier.config.max_sequences
        for at in range(0, len(inputs), most):
            request = msgspec.structs.replace(context.request, prompts=inputs[at : at + most])
            part = msgspec.structs.replace(context, request=request)
            attempt = sole_attempt(part, self.runtimes, self.fallback, self.clock)
            for delta in await _deltas(part, at, attempt):
                vectors.append(_vector(delta, request))
                tokens += delta.input_tokens
        head = answer_head(tier.name, REQUESTED, region=tier.config.region)
        head = head if guarded is None else guarded.mark(head)
        return head, Embeddings(tuple(vectors), Usage(prompt_tokens=tokens))

    def answer(self, context: RequestContext, begun: BegunAnswer | None = None) -> AsyncGenerator[Piece, None]:
        """Return the generator of an answer, as `_answer`; a tier with shadow variants copies the request."""
        if self.shadow is not None and self.variants.copies and begun is None:
            return self.shadow(self._answer, context)
        return self._answer(context, begun) if begun is None or begun.builder is None else _rest(begun, begun.builder)

    def begin(self, context: RequestContext) -> BegunAnswer | None:
        """Begin an answer that one server streams over HTTP, without waiting, as `_answer` would.

        Returns what was begun, for callbacks and for `go_on`; None, and nothing was done, for any other answer.
        """
        request, tier = context.request, context.tier
        if tier.config.upstream.kind != "openai" or request.kind != "chat" or request.n > 1:
            return None
        if request.hints.tags or context.session is not None or self.variants.active:
            return None
        for message in request.messages:
            if type(message.content) is tuple:
                return None
        sole = None if self.fallback.config.truncated_answer_tokens else self.fallback.sole.get(tier.config.name)
        key = b"" if sole and not self.runtimes[tier.config.name].dispatch.by_prefix else prefix_key(request)
        steps = sole or self._steps(context, key)
        if steps[0].truncated:
            return None
        runtime = self.runtimes[steps[0].tier]
        tier = tier if runtime.tier.config.name == tier.config.name else runtime.tier
        attempt = TierAttempt(self.fallback, steps[0], runtime, self.clock)
        if tier.config.upstream.kind == "openai":
            attempt.begin_now(context, partial(_http_requests, context, request, tier), key)
        return BegunAnswer(steps, attempt)

    def first_token(self, context: RequestContext, begun: BegunAnswer) -> AnswerBuilder:
        """Set head and builder of a begun answer, whose first token is here. Returns the builder."""
        begun.head = self._head(context, begun.steps[0], {}, False, "", "")
        begun.builder = builder = AnswerBuilder(context.request, answer_id=context.id)
        return builder

    async def _answer(self, context: RequestContext, begun: BegunAnswer | None = None) -> AsyncGenerator[Piece, None]:
        """Yield the AnswerHead, then the chunks; closing the generator stops the work in Triton and frees the permit.

        `begun`: the answer of `begin`, which goes on. Raises CausewayError if no tier answered, or the answer broke.
        """
        check_supported(context.request)
        parts_at = PartsByTier(context, self.parts)
        key = prefix_key(context.request)
        stress: dict[str, Stress] = {}
        failures: list[TierFailed] = []
        steps = self._steps(context, key) if begun is None else begun.steps
        first = None if begun is None else begun.attempt
        for step, tier in ((one, model) for one in steps for model in self._tried(one, context)):
            limit = self._limit(context, step, tier)
            tried = msgspec.structs.replace(step, trial=True, last=False) if tier.variant else step
            attempt = first or TierAttempt(self.fallback, tried, self.runtimes[step.tier], self.clock)
            first = None
            enforceable = await _enforceable(context.request, tier)
            arm = self.variants.arm(tier, context.request, self.clock) if self.variants.active else _UNCOUNTED
            async with attempt:
                try:
                    parts = await parts_at.tier(step, tier)
                    sent, enforceable = await _sent(context, parts, tier, enforceable)
                    sent = msgspec.structs.replace(sent, max_tokens=limit) if limit else sent
                    requests = partial(self._inference_requests, context, enforceable.request, sent, tier)
                    sequence, delta = await attempt.begin(context, requests, key)
                except TierFailed as failure:  # (2)
                    stress[step.tier] = failure.stress
                    failures.append(failure)
                    arm.failed()
                    continue
                head = self._head(context, step, stress, limit > 0, enforceable.names, tier.variant)
                yield head if parts is None else parts.mark(head)  # (1)
                builder = AnswerBuilder(context.request, tier.chat_format.thinking, context.id)
                for chunk in builder.echo() if context.request.echo else ():
                    yield chunk
                for chunk in builder.add(sequence, delta):
                    yield chunk
                with arm, builder.unless_ended():
                    # Two loops: nearly every request is one sequence, and each step here is paid once per token.
                    if attempt.stream is not None:
                        async for delta in attempt.stream:
                            for chunk in builder.add(0, delta):
                                yield chunk
                    else:
                        async for sequence, delta in attempt.merged:
                            for chunk in builder.add(sequence, delta):
                                yield chunk
                attempt.report_tokens(builder.tokens)
                arm.ended()
                yield builder.end()
                return
        stale = None if context.is_exclusive else await self.find_stale(context.request, context.tenant)
        if stale is None:
            raise context.pinned_error(combined_error(failures, self._broken(step)))  # (5)
        yield self._stale_head(context, stale, stress)  # (4)
        for chunk in stale.chunks:
            yield chunk

    def _tried(self, step: FallbackStep, context: RequestContext) -> tuple[Tier, ...]:
        """Return the models of a step's tier in the order in which they are tried."""
        is_adapted = context.tier.adapted and context.tier.name == step.tier
        tier = context.tier if is_adapted else self.runtimes[step.tier].tier
        session = context.session
        if session is not None and session.pinned == step.tier and (self.variants.active or session.variant):
            asked = self.variants.named(tier, session.variant)
            if session.only and not asked:
                raise session.gone("That tier no longer has the variant of the session.")
            others = () if session.only else self.variants.tried(tier, context.request)
            return (*asked, *(one for one in others if one not in asked))
        return self.variants.tried(tier, context.request) if self.variants.active else (tier,)

    def _steps(self, context: RequestContext, key: bytes) -> tuple[FallbackStep, ...]:
        position = caller_position(context.tenant, context.request.hints.client, key)
        session, only, pinned = context.session, context.critical, ""
        if session is not None and session.pinned in self.runtimes and (session.only or not only):
            if context.allowed_tiers is None or session.pinned in context.allowed_tiers:
                pinned, only, position = session.pinned, only or session.only, 0.0  # no lowered share moves it
            elif session.only:
                raise session.gone("This request may not use that tier.")
        may_truncate = self.fallback.config.truncated_answer_tokens > 0 and _is_plain(context.request)
        left_s = context.deadline - self.clock()
        request = FallbackRequest(
            context.tier.name, left_s, position, only, context.allowed_tiers, pinned, may_truncate
        )
        return self.fallback.fallback_steps(request, context.priority)

    def _limit(self, context: RequestContext, step: FallbackStep, tier: Tier) -> int:
        """Return the number of tokens to which the answer is truncated; 0: it may have its full length."""
        limit = self.fallback.config.truncated_answer_tokens
        return limit if step.truncated and limit < (context.request.max_tokens or tier.max_tokens) else 0

    def _inference_requests(
        self, context: RequestContext, enforceable: Request, request: Request, tier: Tier
    ) -> list[InferenceRequest]:
        """Render the request for `tier`, with n sequences per prompt. Raises InvalidRequest.

        `enforceable`: with the schemas that the engine can enforce. `request`: parts as text or placeholders.
        """
        chat_format = tier.chat_format
        if tier.config.upstream.kind == "openai":
            return _http_requests(context, request, tier)
        parameters = from_request(
            request,
            max_tokens=tier.max_tokens,
            schema=answer_schema(enforceable, calls_only=chat_format.answers == "calls", form=chat_format.tools),
            frame=call_frame(request, chat_format.tools) if chat_format.is_ours else NO_FRAME,
            thinking=chat_format.thinking if chat_format.is_ours else "",
            guided_key=tier.config.guided_key,
            temperature=chat_format.temperature,
            copy_source=tier.copy_source(request),
            adapter=tier.config.adapter,
        )
        if (kind := tier.config.upstream.kind) == "trtllm" or kind == "trtllm_llmapi":
            check_parameters(kind, parameters)
        prompts: Sequence[InferencePrompt] = tier.prompts(request)
        images = images_of(request) if "image" in tier.config.can else ()
        return [
            InferenceRequest(
                model=tier.model,
                prompt=prompt,
                images=images,
                parameters=_with_seed(parameters, index * request.n + choice),
                deadline=context.deadline,
                request_id=context.id,
                traceparent=context.traceparent,
                trace=context.trace,
                meter=context.meter.sequence(index * request.n + choice, index),
            )
            for index, prompt in enumerate(prompts)
            for choice in range(request.n)
        ]

    def _head(
        self,
        context: RequestContext,
        step: FallbackStep,
        stress: Mapping[str, Stress],
        truncated: bool,
        loosened: str,
        variant: str,
    ) -> AnswerHead:
        is_fallback, reason = step.tier != context.tier.name, step.reason(stress)
        if is_fallback and not step.skipped:
            reason = "session"  # by the tier of the last turn
        if self.metrics is not None:
            self.metrics.answered(context.tier.name, step.tier, step.nearest_reason(stress))
            kinds: tuple[tuple[Kind, bool], ...] = (("tier", is_fallback), ("partial", truncated))
            for kind, holds in kinds:
                if holds:
                    self.metrics.degraded(kind)
        if truncated:
            reason += "; truncated"
        return answer_head(
            step.tier,
            reason,
            degraded=is_fallback or truncated,
            keep=not truncated,
            loosened=loosened,
            variant=variant,
            region=self.runtimes[step.tier].tier.config.region,
        )

    def _broken(self, step: FallbackStep) -> list[TierFailed]:
        """Return the failures of the tiers that this step skips because they are broken."""
        return [
            TierFailed(
                errors.BreakerOpen(
                    f"{name} failed repeatedly, so its breaker is open.",
                    retry_after_s=self.fallback.retry_after_s(name),
                ),
                stress,
            )
            for name, stress in step.skipped
            if stress == "broken"
        ]

    def _stale_head(self, context: RequestContext, stale: CachedAnswer, stress: Mapping[str, Stress]) -> AnswerHead:
        if self.metrics is not None:
            self.metrics.degraded("stale")
        reason = "; ".join([*(f"{tier}={why}" for tier, why in stress.items()), "stale"])
        return answer_head(stale.head.model or context.tier.name, reason, degraded=True, stale_s=stale.age_s)


class PartsByTier:
    """The parts of one request, read once for the tiers that get the same kinds. `parts` None: no tier takes any."""

    def __init__(self, context: RequestContext, parts: RequestParts | None) -> None:
        self._context = context
        self._parts = parts
        self._read: dict[tuple[Modality, ...], ReadParts | None] = {}  # by the kinds that a tier gets itself

    async def tier(self, step: FallbackStep, tier: Tier) -> ReadParts | None:
        """Read audio, images and files; None: there are none, or the tier gets all of them itself.

        Raises TierFailed for a kind that this tier, unlike the named one, cannot be given; CausewayError for the named
        tier, or an invalid part.
        """
        if not first_part(self._context.request)[0]:
            return None
        native = tier.config.native_parts
        if native not in self._read:
            try:
                self._read[native] = await self._read_for(native)
            except errors.UnsupportedFeature as error:
                if not step.skipped:
                    raise
                raise TierFailed(error, "unable") from error
        return self._read[native]

    async def _read_for(self, native: tuple[Modality, ...]) -> ReadParts | None:
        request = self._context.request
        check_parts(request, native if self._parts is None else (*native, *self._parts.kinds))
        assert self._parts is not None, "Parts that pass the check are of kinds that it reads or checks."
        if native:
            self._parts.check_native(request, native)
        return await self._parts.read(self._context, native) if first_part(request, native)[0] else None


async def _rest(begun: BegunAnswer, builder: AnswerBuilder) -> AsyncGenerator[Piece, None]:
    """Yield what follows of a begun answer after the chunks that were sent."""
    async with begun.attempt as attempt:
        with builder.unless_ended():
            async for delta in attempt.rest():
                for chunk in builder.add(0, delta):
                    yield chunk
        attempt.report_tokens(builder.tokens)
        yield builder.end()


async def _enforceable(request: Request, tier: Tier) -> EnforceableRequest:
    """Check the schemas for a tier of our engine; others enforce what they support. Raises InvalidGrammar."""
    if not tier.chat_format.is_ours or not (request.tools or request.response_format is not None):
        return EnforceableRequest(request)
    return await check_schemas(request, calls_only=tier.chat_format.answers == "calls")


async def _sent(
    context: RequestContext, parts: ReadParts | None, tier: Tier, enforceable: EnforceableRequest
) -> tuple[Request, EnforceableRequest]:
    """Return what the tier gets of a request, and the schemas that it holds. Raises GuardRefused or GuardFailed."""
    request = context.request if parts is None else parts.as_text(tier.chat_format.transcripts)
    if context.guard is None:
        return request, enforceable
    sent = request
    for text in (request,) if parts is None else map(parts.as_text, EXAMINED):
        if (allowed := await context.guard.check(text)) != text:
            sent = allowed  # masked, with the values of this form; the last one is as written
    if sent.tools == request.tools and sent.response_format == request.response_format:
        return sent, enforceable
    return sent, await _enforceable(sent, tier)


def check_supported(request: Request) -> None:
    """Raise UnsupportedFeature for a request that Triton's tensors cannot express."""
    if request.echo and not all(isinstance(prompt, str) for prompt in request.prompts):
        raise errors.UnsupportedFeature(
            "`echo` does not work with token ids, because the tiers repeat only text. Remove `echo`, or send text.",
            param="echo",
        )
    if request.suffix is not None:
        raise errors.UnsupportedFeature(
            "`suffix` is not supported, because no tier fills in text before a suffix. Remove `suffix`.", param="suffix"
        )
    if request.echo and request.logprobs is not None:
        raise errors.UnsupportedFeature(
            "`echo` does not work with `logprobs`, because the tiers do not compute logprobs of the prompt. Remove "
            "one of them.",
            param="echo",
        )


def check_parts(request: Request, kinds: Collection[Modality]) -> None:
    """Raise UnsupportedFeature for a part that no tier reads. `kinds`: the kinds that are read."""
    path, kind = first_part(request, kinds)
    if path:
        raise errors.UnsupportedFeature(
            f"`{path}`: no tier of this gateway reads such a part. Send its content as text, or ask the gateway's "
            f"operator to configure an encoder (a tier with `can: [{kind}]`).",
            param=path,
        )


def combined_error(failures: Sequence[TierFailed], broken: Sequence[TierFailed] = ()) -> errors.CausewayError:
    """Combine several tiers' errors: a saturated one's, with the shortest Retry-After, if there is one.

    `broken`: failures of tiers that were not asked, which count if those that were could not have answered.
    """
    able = [failure for failure in failures if failure.stress != "unable"] or [*broken, *failures]
    chosen = next((failure for failure in able if failure.stress == "saturated"), able[0])
    error, waits_s = chosen.error, [one.error.retry_after_s for one in (*failures, chosen)]
    error.retry_after_s = min((wait_s for wait_s in waits_s if wait_s is not None), default=None)
    return error


def _http_requests(context: RequestContext, request: Request, tier: Tier) -> list[InferenceRequest]:
    """Return the requests for a server with OpenAI's API, one for each sequence. Raises UnsupportedFeature."""
    tier.check_ability(request.kind)
    if tier.config.upstream.without:
        check_features(request, tier.name, tier.config.upstream)
    made, sequences, limit = [], request.sequences, request.max_tokens or tier.config.max_tokens or None
    if limit is not None and tier.config.context_tokens:
        limit = min(limit, tier.config.context_tokens)  # vLLM refuses more, and no answer is longer
    for sequence in range(sequences):
        prompt, sampling = sequence // request.n, request.sampling
        if sampling.seed is not None:
            sampling = msgspec.structs.replace(sampling, seed=sampling.seed + sequence)
        asked = msgspec.structs.replace(
            request,
            prompts=request.prompts[prompt : prompt + 1],
            n=1,
            max_tokens=limit,
            sampling=sampling,
            echo=False,  # the builder of the answer repeats the prompt
            stream=True,
        )
        made.append(
            InferenceRequest(
                model=tier.model,
                prompt="",
                parameters=SamplingParameters(),
                openai=asked,
                deadline=context.deadline,
                request_id=context.id if sequences == 1 else f"{context.id}-{sequence}",
                traceparent=context.traceparent,
                trace=context.trace,
                meter=context.meter.sequence(sequence, prompt),
            )
        )
    return made


def _is_plain(request: Request) -> bool:
    """Return whether an answer may be truncated: it is text, without calls and without a schema."""
    form = request.response_format
    return not request.tools and (form is None or form.kind == "text")


def _with_seed(parameters: SamplingParameters, offset: int) -> SamplingParameters:
    """Give each sequence of a request a different seed."""
    if parameters.seed is None or not offset:
        return parameters
    return msgspec.structs.replace(parameters, seed=parameters.seed + offset)


_FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length"}


class AnswerBuilder:
    """Builds an answer's chunks from deltas: a choice for each sequence, n for each of the request's prompts.

    `thinking`: how the model thinks first. `answer_id`: call ids derive from it.
    """

    def __init__(self, request: Request, thinking: Thinking = "", answer_id: str = "") -> None:
        self._request = request
        if thinking and not thinks(request, thinking):
            thinking = ""
        self._choices = [_ChoiceBuilder(request, index, thinking, answer_id) for index in range(request.sequences)]
        self._completion_tokens = 0
        self._prompt_tokens = 0
        self._cached_tokens = 0  # of the prompts, in the upstream's KV cache

    def echo(self) -> list[Chunk]:
        """Return the prompts as chunks, for a request that wants them echoed."""
        request = self._request
        texts = [prompt for prompt in request.prompts if isinstance(prompt, str) for _ in range(request.n)]
        return [Chunk(text=text, index=index) for index, text in enumerate(texts) if text]

    def add(self, sequence: int, delta: Delta) -> list[Chunk]:
        """Return the chunks of one response to this sequence of the request. Raises CloudFailed."""
        self._completion_tokens += delta.new_tokens
        choice = self._choices[sequence]
        chunks = choice.add(delta)
        if choice.ended and not choice.prompt_tokens and sequence % self._request.n == 0:
            # The backend sends the prompt's length with each response or with the last one only: count it once, and for
            # only one of the n sequences of a prompt.
            choice.prompt_tokens = delta.input_tokens
            self._prompt_tokens += delta.input_tokens
            self._cached_tokens += delta.usage.cached_tokens if delta.usage is not None else 0
        return chunks

    @property
    def tokens(self) -> int:
        """Return the tokens of prompts and choices so far."""
        return self._prompt_tokens + self._completion_tokens

    @contextmanager
    def unless_ended(self) -> Iterator[None]:
        """Suppress an error if every choice has its finish reason, because the answer is then complete."""
        try:
            yield
        except errors.CausewayError:
            if not self.ended:
                raise

    @property
    def ended(self) -> bool:
        """Whether every choice has its finish reason."""
        return all(choice.ended for choice in self._choices)

    def end(self) -> Chunk:
        """Return the usage chunk. Raises StreamBroken if a choice has no finish reason."""
        if not self.ended:
            raise errors.StreamBroken("The model ended without a finish reason.", phase="stream")
        thoughts = sum([choice.reasoning_tokens for choice in self._choices])
        return Chunk(usage=Usage(self._prompt_tokens, self._completion_tokens, self._cached_tokens, thoughts))


class _ChoiceBuilder:
    """Builds one choice of the answer: converts its text to text and tool calls."""

    def __init__(self, request: Request, index: int, thinking: Thinking, answer_id: str) -> None:
        self._index = index
        self._reasoning = ReasoningParser(inside=thinking == "open") if thinking else None
        self._parser = ToolCallParser(request, index, answer_id) if request.tools else None
        self.ended = False
        self._reported_reasoning = 0  # tokens, by an upstream that parses thoughts itself
        self.prompt_tokens = 0  # 0: not known yet, or counted for another choice

    def add(self, delta: Delta) -> list[Chunk]:
        """Return the chunks of a response. Raises CloudFailed for an unknown finish reason."""
        if delta.usage is not None:
            self._reported_reasoning = delta.usage.reasoning_tokens
        if self.ended:
            return []
        if delta.chunk is not None:
            self.ended = delta.chunk.finish_reason is not None
            return [msgspec.structs.replace(delta.chunk, index=self._index) if self._index else delta.chunk]
        text, tokens, logprobs = delta.text, delta.new_tokens, delta.logprobs
        reason = None if delta.finish_reason is None else _finish_reason(delta.finish_reason)
        self.ended = reason is not None
        if not (text or reason or tokens or logprobs):
            return []
        if self._parser is not None or self._reasoning is not None:
            return self._parse(text, tokens, logprobs, reason)
        return [Chunk(text=text, index=self._index, tokens=tokens, logprobs=logprobs, finish_reason=reason)]

    @property
    def reasoning_tokens(self) -> int:
        return self._reported_reasoning if self._reasoning is None else self._reasoning.tokens

    def _parse(
        self, text: str, tokens: int, logprobs: tuple[TokenLogprob, ...], reason: FinishReason | None
    ) -> list[Chunk]:
        thought, calls = "", tuple[ToolCallDelta, ...]()
        if self._reasoning is not None:
            thought, text = self._reasoning.feed(text, tokens)
            if reason is not None:
                last_thought, rest = self._reasoning.finish()
                thought, text = thought + last_thought, text + rest
        if self._parser is not None:
            text, calls = self._parser.feed(text)
            if reason is not None:
                rest, last = self._parser.finish(cut=reason == "length")
                text, calls = text + rest, (*calls, *last)
            if reason == "stop" and self._parser.called:
                reason = "tool_calls"
        if not (text or thought or calls or reason or tokens or logprobs):
            return []
        chunk = Chunk(text=text, index=self._index, tokens=tokens, logprobs=logprobs, finish_reason=reason)
        return [msgspec.structs.replace(chunk, tool_calls=calls, reasoning=thought) if calls or thought else chunk]


def _finish_reason(name: str) -> FinishReason:
    reason = _FINISH_REASONS.get(name)
    if reason is None:
        raise errors.CloudFailed(f"The model ended the answer with the unknown finish reason {name!r}.", phase="stream")
    return reason


Vector = tuple[float, ...]
_read_vector = msgspec.json.Decoder(Vector).decode


async def _deltas(context: RequestContext, first: int, attempt: TierAttempt) -> list[Delta]:
    """Return each input's first delta, which has its vector. `first`: the first of these. Raises CausewayError."""
    requests = [
        InferenceRequest(
            model=context.tier.model,
            prompt=prompt,
            parameters=SamplingParameters(),
            openai=_one_input(context.request, prompt) if context.tier.config.upstream.kind == "openai" else None,
            embed=True,
            deadline=context.deadline,
            caller=hashlib.blake2b(context.tenant.encode(), digest_size=8).hexdigest() if context.tenant else "",
            request_id=context.id,
            traceparent=context.traceparent,
            trace=context.trace,
            meter=context.meter.sequence(number, number),
        )
        for number, prompt in enumerate(context.request.prompts, first)
    ]
    async with attempt:
        try:
            index, delta = await attempt.begin(context, lambda: requests, b"")
        except TierFailed as failure:
            raise failure.error from None
        deltas = {index: delta}
        if attempt.stream is not None:
            async for _ in attempt.stream:
                pass
            attempt.report_tokens(delta.input_tokens)
        else:
            async for index, delta in attempt.merged:
                deltas.setdefault(index, delta)
    return [deltas[index] for index in range(len(requests))]


def _one_input(request: Request, prompt: InferencePrompt) -> Request:
    return msgspec.structs.replace(request, prompts=(prompt,))


def _vector(delta: Delta, request: Request) -> Vector:
    """Return the delta's vector. Raises CloudFailed; UnsupportedFeature for other dimensions."""
    try:
        vector = _read_vector(delta.text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise errors.CloudFailed(f"The tier's model returned no vector: {error}", phase="first_token") from None
    if not vector:
        raise errors.CloudFailed("The tier's model returned an empty vector.", phase="first_token")
    if request.dimensions not in (None, len(vector)):
        raise errors.UnsupportedFeature(
            f"This model's embeddings have {len(vector)} dimensions. Remove `dimensions`, or set it to this number.",
            param="dimensions",
        )
    return vector
