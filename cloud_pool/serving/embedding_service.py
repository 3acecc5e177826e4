"""One embedding request: a permit of its tier, one call to Triton for each input, the vectors in order.

No other tier ever answers, because vectors of two models cannot be compared. The inputs follow each other, so that a
request never has more sequences in Triton than permits: one.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing

import msgspec

from router.errors import CloudFailed, UnsupportedFeature
from router.types import Embeddings, Request, Usage

from ..config.tiers import InferencePrompt
from ..degradation.fallback import TierFallback
from ..degradation.fallback_plan import REQUESTED, FallbackRequest
from ..upstreams.triton.sampling_parameters import SamplingParameters
from ..upstreams.triton.tensors import Delta, InferenceRequest
from .request_context import AnswerHead, RequestContext, answer_head
from .tier_attempt import TierAttempt, TierFailed, TierRuntime

Vector = tuple[float, ...]
_read_vector = msgspec.json.Decoder(Vector).decode


class EmbeddingService:
    """Makes the vectors of embedding requests.

    Args:
        runtimes: by the tier's name.
        fallback: records what became of each attempt at a tier.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        runtimes: Mapping[str, TierRuntime],
        fallback: TierFallback,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runtimes = runtimes
        self._fallback = fallback
        self._clock = clock

    async def embed(self, context: RequestContext) -> tuple[AnswerHead, Embeddings]:
        """Return the answer's head and the vectors, one for each input. Raises CausewayError."""
        tier, dispatch = context.tier, self._runtimes[context.tier.name].dispatch
        tier.check_ability("embedding")
        requests = [_inference_request(context, prompt) for prompt in context.request.prompts]
        vectors, tokens = [], 0
        async with AsyncExitStack() as resources:
            attempt = self._attempt(context)
            try:
                _, delta = await attempt.begin(resources, context, lambda: requests[:1], b"")
            except TierFailed as failure:
                raise failure.error from None
            assert attempt.stream is not None
            async for _ in attempt.stream:
                pass
            vectors.append(_vector(delta, context.request))
            tokens += delta.input_tokens
            for request in requests[1:]:
                delta = await _only_delta(dispatch.generate(request, hedged=context.priority != "bulk"))
                vectors.append(_vector(delta, context.request))
                tokens += delta.input_tokens
            attempt.report_tokens(tokens)
        return answer_head(tier.name, REQUESTED), Embeddings(tuple(vectors), Usage(prompt_tokens=tokens))

    def _attempt(self, context: RequestContext) -> TierAttempt:
        name, left_s = context.tier.name, context.deadline - self._clock()
        only = FallbackRequest(name, left_s, critical=True)
        (step,) = self._fallback.fallback_steps(only, context.priority)
        runtime = self._runtimes[name]
        return TierAttempt(self._fallback, step, runtime.admission, runtime.dispatch, self._clock)


def _inference_request(context: RequestContext, prompt: InferencePrompt) -> InferenceRequest:
    return InferenceRequest(
        model=context.tier.model,
        prompt=prompt,
        parameters=SamplingParameters(),
        embed=True,
        deadline=context.deadline,
        request_id=context.id,
        traceparent=context.traceparent,
        trace=context.trace,
    )


async def _only_delta(stream: AsyncGenerator[Delta, None]) -> Delta:
    """Read a call to its end. A vector comes in one response; an empty one may follow."""
    first: Delta | None = None
    async with aclosing(stream):
        async for delta in stream:
            first = first or delta
    assert first is not None  # dispatch raises for an answer without a first delta
    return first


def _vector(delta: Delta, request: Request) -> Vector:
    """Raises CloudFailed, or UnsupportedFeature if the request names another number of dimensions."""
    try:
        vector = _read_vector(delta.texts[0])
    except (IndexError, msgspec.DecodeError) as error:
        raise CloudFailed(f"the tier's model made no vector: {error}", phase="first_token") from None
    if not vector:
        raise CloudFailed("the tier's model made an empty vector", phase="first_token")
    if request.dimensions not in (None, len(vector)):
        raise UnsupportedFeature(f"This model's embeddings have {len(vector)} dimensions.", param="dimensions")
    return vector
