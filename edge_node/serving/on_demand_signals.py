"""The signals of a request that take time: its length in tokens, the estimate of quality, facts about its parts.

They are computed if the policy names them, or for the record. A signal that cannot be computed stays absent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from causeway_server.router.errors import EncoderFailed
from causeway_server.router.parts.reading import EXAMINED, Form
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.policy.signals import GUARD_SIGNALS
from causeway_server.router.serving.guard.runner import GuardRunner
from causeway_server.router.serving.logs import redacted
from causeway_server.router.types import AttemptRecord, Request

from ..clock import Clock
from ..signals.candidates import CandidateEstimates
from ..signals.estimators import QUALITY
from .generation import Generation

if TYPE_CHECKING:
    from .part_encoders import PartEncoders

log = logging.getLogger(__name__)


class TokenCounter(Protocol):
    """Counts the tokens of a request's prompt. `model`: one on the device; "": that of the first edge target."""

    def __call__(self, request: Request, model: str = "", /) -> Awaitable[int | None]: ...


QualityEstimator = Callable[[Policy, Request], float | None]
_TOKENS = "request.prompt_tokens"
LENGTH = frozenset({_TOKENS})
_COUNT_TIMEOUT_S = 1.0  # timeout of the engine's count of a prompt's tokens


@dataclass(eq=False, repr=False)
class OnDemandSignals:
    """Computes the on-demand signals of one device. `count_tokens` and `estimate_quality` (`edge.quality`), about the
    edge model, are None without an engine; `encoders` turn parts into text, if there are any; `candidates` estimates
    the targets of `best_of`.
    """

    clock: Clock
    _: KW_ONLY
    count_tokens: TokenCounter | None = None
    estimate_quality: QualityEstimator | None = None
    encoders: PartEncoders | None = None
    record_all: bool = False  # whether to compute them for every decided request, for its record
    candidates: CandidateEstimates = field(default_factory=CandidateEstimates)
    guard: GuardRunner = field(default_factory=GuardRunner)  # detectors of personal data and keys

    def concerns(self, request: Request) -> bool:
        """Return whether the request has a part that requires the child processes of encoders."""
        return self.encoders is not None and self.encoders.concerns(request)

    async def compute(self, generation: Generation, signals: frozenset[str]) -> None:
        """Set the estimates of the generation: the on-demand ones among `signals`. Never raises."""
        generation.unrecorded = tuple([name for name in generation.unrecorded if name not in signals])
        if self.encoders is not None and self.encoders.concerns(generation.request):
            await self.encoders.estimate(generation, signals)
        wants_facts = not GUARD_SIGNALS.isdisjoint(signals) and generation.estimates.pii_count is None
        if wants_facts:
            await self._examine(generation)
        if QUALITY not in signals and _TOKENS not in signals:
            return
        request = await self._as_text(generation)
        if QUALITY in signals and generation.estimates.quality is None:
            self._estimate(generation, request)
        if _TOKENS in signals and generation.estimates.prompt_tokens is None:
            await self._count(generation, request)

    async def compare(self, generation: Generation) -> None:
        """Set the estimates of the targets that the policy's `best_of` compares. Never raises."""
        await self.compute(generation, LENGTH)
        try:
            found = self.candidates.estimate(generation.policy, await self._as_text(generation), self.clock.monotonic())
            generation.estimates = msgspec.structs.replace(generation.estimates, candidates=found)
        except Exception as failure:
            log.warning("The targets of `best_of` could not be compared: %s", redacted(failure))

    def observe(self, generation: Generation, attempts: Sequence[AttemptRecord]) -> None:
        """Take the times of finished attempts and the length of the answer into account."""
        self.candidates.observe(attempts, self.clock.monotonic())
        if generation.target is not None and attempts and attempts[-1].state == "done":
            self.candidates.learn(generation.request, generation.target, generation.usage.completion_tokens)

    def _estimate(self, generation: Generation, request: Request) -> None:
        if self.estimate_quality is None:
            return
        try:
            quality = self.estimate_quality(generation.policy, request)
            generation.estimates = msgspec.structs.replace(generation.estimates, quality=quality)
        except Exception as failure:
            log.warning("%s could not be estimated: %s", QUALITY, redacted(failure))

    async def _examine(self, generation: Generation) -> None:
        """Set the signals of the guard. A part that an encoder could not read in time may contain anything."""
        first, *others = [await self._as_text(generation, form) for form in EXAMINED]
        read = () if generation.facts is None else generation.facts.facts.values()
        settings = generation.policy.guard_settings
        found = await self.guard.facts(first, settings, unread=any(fact is None for fact in read))
        for other in others:
            if other != first:
                found = found.joined(await self.guard.facts(other, settings))
        generation.estimates = msgspec.structs.replace(
            generation.estimates, pii_classes=found.classes, pii_count=found.pii, key_count=found.secrets
        )

    async def _count(self, generation: Generation, request: Request) -> None:
        if self.count_tokens is None:
            return
        try:
            async with asyncio.timeout_at(min(generation.deadline, self.clock.monotonic() + _COUNT_TIMEOUT_S)):
                tokens = await self.count_tokens(request)
                generation.estimates = msgspec.structs.replace(generation.estimates, prompt_tokens=tokens)
        except TimeoutError:
            log.warning("%s was not counted in time, because the engine is busy or does not respond.", _TOKENS)
        except Exception as failure:
            log.warning("%s could not be counted: %s", _TOKENS, redacted(failure))

    async def _as_text(self, generation: Generation, form: Form | None = None) -> Request:
        """Return the request with its words, without its audio or images. `form`: that of transcripts; None: the one
        that the first edge target's model reads.
        """
        if self.encoders is None or not self.encoders.concerns(generation.request):
            return generation.request
        try:
            model = next((target.model for target in generation.policy.targets if target.at == "edge"), "")
            return await self.encoders.fuse(generation, self.encoders.kinds, form or self.encoders.transcripts(model))
        except EncoderFailed:
            return generation.request  # a target that takes the parts themselves may still answer
