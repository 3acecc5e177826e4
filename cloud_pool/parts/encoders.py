"""Encoder tiers as branches of the encoder graph: a part goes through a tier's admission and dispatch as a prompt does.

    part ── permit of the tier ── endpoint ── Triton: decoder child, encoder child ── fact

A file that cannot be read is the client's error, and the tier is healthy. Only a fault of the tier itself (no
capacity, no endpoint, a dead process) counts as its failure, for its breaker, retries and repair.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack

import msgspec

from models.modalities.graph.branch import Branch, PartJob, ReadPart
from models.modalities.process.messages import Refusal, Refused, SegmentFound
from models.modalities.process.parent import Tell, WorkerFailed, WorkerTimeout
from router.errors import CausewayError, CloudFailed, CloudTimeout, DeadlineExceeded
from router.types import Modality

from ..core.request_context import RequestContext
from ..degradation.fallback import TierFallback
from ..degradation.tier_attempt import TierAttempt, TierFailed, TierRuntime, sole_attempt
from ..tiers.config import PartsConfig
from ..tiers.tier import Tier, encoders_of
from ..upstreams.triton.messages import EncodeJob, PartFailed, PartRead, PartReply, SamplingParameters, read_reply
from ..upstreams.triton.tensors import Delta, EncodePart, InferenceRequest


class EncoderTiers:
    """Makes the branches that read the parts of a request.

    Args:
        runtimes: all tiers by name.
        fallback: records what became of each attempt at a tier.
        clock: monotonic time in seconds.
    """

    def __init__(
        self,
        runtimes: Mapping[str, TierRuntime],
        fallback: TierFallback,
        config: PartsConfig,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runtimes = runtimes
        self._fallback = fallback
        self._config = config
        self._clock = clock
        self._by_kind = encoders_of(runtime.tier for runtime in runtimes.values())
        self.kinds = tuple(self._by_kind)

    def tier_of(self, kind: Modality) -> str:
        """Return the name of the tier that reads this kind of part in messages."""
        return self._by_kind[kind]

    def tier(self, name: str) -> Tier:
        return self._runtimes[name].tier

    def branches(self, context: RequestContext) -> dict[Modality, Branch]:
        """Return the branches for a request, by kind of part."""
        return {kind: self.branch(kind, self.tier(name), context) for kind, name in self._by_kind.items()}

    def branch(self, kind: Modality, tier: Tier, context: RequestContext) -> Branch:
        """Return the branch for a request's parts of this kind, at a tier that reads them."""
        config = self._config
        timeout_s = config.audio_timeout_s if kind == "audio" else config.image_timeout_s
        # One sequence for each part, whatever the request itself asks for; its trace has the spans of the calls.
        request = msgspec.structs.replace(context.request, n=1, prompts=())
        part_context = msgspec.structs.replace(context, tier=tier, request=request, tokens=1.0)
        return TierBranch(kind, part_context, timeout_s, config.language, self._attempt)

    def _attempt(self, context: RequestContext) -> TierAttempt:
        return sole_attempt(context, self._runtimes, self._fallback, self._clock)


class TierBranch:
    """Reads one kind of part by a tier, for one request: `models.modalities.graph.branch.Branch`.

    Its WorkerFailed is caused by the tier's CausewayError, if the tier has failed.
    """

    def __init__(
        self,
        kind: Modality,
        context: RequestContext,
        timeout_s: float,
        language: str,
        attempt: Callable[[RequestContext], TierAttempt],
    ) -> None:
        self.timeout_s = timeout_s
        self._kind = kind
        self._context = context
        self._language = language
        self._attempt = attempt

    async def run(
        self,
        job: PartJob,
        deadline: float,
        language: str = "",
        prompt: str = "",
        temperature: float = 0.0,
        tell: Tell | None = None,
        *,
        words: bool = False,
    ) -> ReadPart:
        """As `Branch.run`."""
        encode = EncodeJob(self._kind, language or self._language, prompt, temperature, tell is not None, words)
        context = msgspec.structs.replace(self._context, deadline=deadline)
        request = InferenceRequest(
            model=context.tier.model,
            prompt="",
            parameters=SamplingParameters(),
            part=EncodePart(encode, job.data),
            deadline=deadline,
            request_id=context.id,
            traceparent=context.traceparent,
            trace=context.trace,
        )
        try:
            return await self._read(context, request, tell)
        except TierFailed as failure:
            raise _unread(failure.error) from failure.error
        except CausewayError as error:
            raise _unread(error) from error

    async def _read(self, context: RequestContext, request: InferenceRequest, tell: Tell | None) -> ReadPart:
        attempt = self._attempt(context)
        untraced = msgspec.structs.replace(context, trace=None)  # its wait is the request's own tier's
        async with AsyncExitStack() as resources:
            _, delta = await attempt.begin(resources, untraced, lambda: [request], b"")
            assert attempt.stream is not None
            found = _taken(_reply(delta), tell)
            async for delta in attempt.stream:
                found = found or _taken(_reply(delta), tell)
        if found is None:
            raise CloudFailed("the encoder ended without an answer", phase="stream")
        return found


def _reply(delta: Delta) -> PartReply | None:
    """None: the end of the call. Raises CloudFailed."""
    try:
        return read_reply(delta.text) if delta.text else None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CloudFailed(f"the tier's model is no encoder of ours: {error}", phase="first_token") from None


def _taken(reply: PartReply | None, tell: Tell | None) -> ReadPart | None:
    """Return what was read; None: the reply is of another kind. Raises Refusal, WorkerTimeout or WorkerFailed."""
    if isinstance(reply, SegmentFound) and tell is not None:
        tell(reply.segment)
    if isinstance(reply, Refused):
        raise Refusal(reply.reason, reply.param)
    if isinstance(reply, PartFailed):
        raise (WorkerTimeout if reply.late else WorkerFailed)(reply.reason)
    return ReadPart(reply.found, reply.seconds) if isinstance(reply, PartRead) else None


def _unread(error: CausewayError) -> WorkerFailed:
    late = isinstance(error, (DeadlineExceeded, CloudTimeout))
    return (WorkerTimeout if late else WorkerFailed)(f"{error.code}: {error.message}")
