"""One embedding request: a permit and a call to Triton for each input, the vectors in order.

No other tier ever answers, because vectors of two models cannot be compared. A long list enters the tier's queue in
parts of `max_sequences`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack

import msgspec

from router.errors import CloudFailed, UnsupportedFeature
from router.types import Embeddings, Request, Usage

from ..core.request_context import AnswerHead, RequestContext, answer_head
from ..degradation.fallback import REQUESTED, TierFallback
from ..degradation.tier_attempt import TierAttempt, TierFailed, TierRuntime, sole_attempt
from ..tiers.tier import InferencePrompt
from ..upstreams.triton.messages import SamplingParameters
from ..upstreams.triton.tensors import Delta, InferenceRequest

Vector = tuple[float, ...]
_read_vector = msgspec.json.Decoder(Vector).decode


async def embed(
    context: RequestContext,
    runtimes: Mapping[str, TierRuntime],
    fallback: TierFallback,
    clock: Callable[[], float],
) -> tuple[AnswerHead, Embeddings]:
    """Return the answer's head and the vectors, one for each input. Raises CausewayError.

    Args:
        runtimes: by the tier's name.
        fallback: records what became of each attempt at a tier.
        clock: monotonic time in seconds.
    """
    tier, inputs = context.tier, context.request.prompts
    tier.check_ability("embedding")
    vectors: list[Vector] = []
    tokens = 0
    most = tier.config.max_sequences
    for at in range(0, len(inputs), most):
        request = msgspec.structs.replace(context.request, prompts=inputs[at : at + most])
        part = msgspec.structs.replace(context, request=request)
        for delta in await _deltas(part, at, sole_attempt(part, runtimes, fallback, clock)):
            vectors.append(_vector(delta, request))
            tokens += delta.input_tokens
    return answer_head(tier.name, REQUESTED), Embeddings(tuple(vectors), Usage(prompt_tokens=tokens))


async def _deltas(context: RequestContext, first: int, attempt: TierAttempt) -> list[Delta]:
    """Return each input's first delta, which has its vector. Raises CausewayError. `first`: of all inputs."""
    inputs = enumerate(context.request.prompts, first)
    requests = [_inference_request(context, prompt, number) for number, prompt in inputs]
    async with AsyncExitStack() as resources:
        try:
            index, delta = await attempt.begin(resources, context, lambda: requests, b"")
        except TierFailed as failure:
            raise failure.error from None
        found = {index: delta}
        if attempt.stream is not None:
            async for _ in attempt.stream:
                pass
            attempt.report_tokens(delta.input_tokens)
        else:
            async for index, delta in attempt.merged:
                found.setdefault(index, delta)
    return [found[index] for index in range(len(requests))]


def _inference_request(context: RequestContext, prompt: InferencePrompt, number: int) -> InferenceRequest:
    return InferenceRequest(
        model=context.tier.model,
        prompt=prompt,
        parameters=SamplingParameters(),
        embed=True,
        deadline=context.deadline,
        caller=hashlib.blake2b(context.tenant.encode(), digest_size=8).hexdigest() if context.tenant else "",
        request_id=context.id,
        traceparent=context.traceparent,
        trace=context.trace,
        meter=context.meter.sequence(number, number),
    )


def _vector(delta: Delta, request: Request) -> Vector:
    """Raises CloudFailed, or UnsupportedFeature if the request names another number of dimensions."""
    try:
        vector = _read_vector(delta.text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CloudFailed(f"the tier's model made no vector: {error}", phase="first_token") from None
    if not vector:
        raise CloudFailed("the tier's model made an empty vector", phase="first_token")
    if request.dimensions not in (None, len(vector)):
        raise UnsupportedFeature(f"This model's embeddings have {len(vector)} dimensions.", param="dimensions")
    return vector
