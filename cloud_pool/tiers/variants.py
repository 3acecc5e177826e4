"""Variants of tiers: the model that answers each request, counts of both arms, verdicts, and scores of clients.

A variant has its tier's endpoints, permits and chat format; another model in the same servers answers. Gateways
that share a Redis have one count (`shared_trials`); each knows the newest answers that clients may score.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import TracebackType
from typing import Final, Self

import anyio
import msgspec
import redis.asyncio
from prometheus_client import CollectorRegistry

from causeway_server.router.errors import CausewayError, ConfigError
from causeway_server.router.serving.metrics import Counter, Sample, SampleCollector
from causeway_server.router.trackers import Ewma
from causeway_server.router.types import Request
from causeway_server.router.variants.feedback import GOOD_SCORE, Feedback, ScoredAnswers
from causeway_server.router.variants.settings import TrialConfig
from causeway_server.router.variants.trials import Trial, TrialPlace, Trials

from .config import TierConfig
from .shared_feedback import SharedFeedback
from .shared_trials import SharedTrials
from .tier import Tier

log = logging.getLogger(__name__)

_SCORE_HALF_LIFE_S: Final = 3600.0
MAX_ANSWERS: Final = 20_000  # the newest, which may be scored


class ScorableAnswer(msgspec.Struct, frozen=True):
    """An answer that its client may score. `group`: of its unit; None if the tier has no variants."""

    client: tuple[str, str]  # tenant, and client within it
    tier: str
    variant: str
    group: int | None


class TierVariants:
    """The variants of one gateway's tiers.

    Args:
        client: Redis, through which gateways and workers share their counts; None: this process counts alone.

    Attributes:
        copies: Whether a tier has shadow variants.
        active: Whether a tier has variants; read before each call, so that requests without variants pass no file more.
        answers: The newest answers, which may be scored, by their ids.
        trials: The trials of the variants, as this process knows them.
    """

    def __init__(
        self,
        tiers: Iterable[TierConfig] = (),
        registry: CollectorRegistry | None = None,
        client: redis.asyncio.Redis | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.trials = Trials(decided=_log)
        self.shared = None if client is None else SharedTrials(self.trials, client)
        self._elsewhere = None if client is None else SharedFeedback(client, self.count_score)
        self._clock = clock
        self._scores: dict[tuple[str, str], Ewma] = {}  # recent means of clients' scores, by tier and variant
        self._varied: dict[tuple[str, str], Tier] = {}
        self.answers: OrderedDict[str, ScorableAnswer] = OrderedDict()
        self._scored = ScoredAnswers()
        registry = CollectorRegistry() if registry is None else registry
        counter = partial(Counter, registry)
        self._counted = counter("causeway_gateway_variant_answers", ("tier", "variant", "result"))
        self._feedback = counter("causeway_gateway_feedback", ("tier", "variant", "result"))
        registry.register(SampleCollector(self._samples))
        self.use(tiers)

    def use(self, tiers: Iterable[TierConfig]) -> None:
        """Follow another configuration. Trials with the same models and share go on."""
        places = {}
        for tier in tiers:
            shadows = frozenset(one.model for one in tier.variants if one.shadow)
            places[tier.name] = TrialPlace(tier.model or tier.name, tier.variants, tier.trial, shadows)
        self.trials.use(places)
        self.active = bool(self.trials)
        self._shadows = {(name, model) for name, place in places.items() for model in place.shadows}
        self.copies = bool(self._shadows)

    def of(self, tier: Tier, request: Request) -> Tier:
        """Return the tier with the model of the variant that answers a request; vectors are of the tier's own model."""
        if not self.active or request.kind == "embedding" or tier.adapted:
            return tier
        return self._varied_by(tier, self.trials.assigned(request).get(tier.name, ""))

    def shadow_of(self, tier: Tier, request: Request) -> Tier | None:
        """Return the tier with the model of the variant that gets a copy of a request; None if none does."""
        model = "" if tier.adapted else self.trials.assigned(request, shadow=True).get(tier.name, "")
        return self._varied_by(tier, model) if model else None

    def named(self, tier: Tier, variant: str) -> tuple[Tier, ...]:
        """Return the tier with a variant's model, "" for its own; () if it has no such variant any more."""
        key = (tier.name, variant)
        known = key not in self._shadows and any((one.place, one.variant.model) == key for one in self.trials)
        return (self._varied_by(tier, variant),) if known or not variant else ()

    def _varied_by(self, tier: Tier, variant: str) -> Tier:
        if not variant:
            return tier
        key = (tier.name, variant)
        if key not in self._varied:
            config = msgspec.structs.replace(tier.config, model=variant)
            self._varied[key] = msgspec.structs.replace(tier, config=config, variant=variant)
        return self._varied[key]

    def tried(self, tier: Tier, request: Request) -> tuple[Tier, ...]:
        """Return the tier's models in the order in which they are tried: the variant, then the tier's own model."""
        varied = self.of(tier, request)
        return (tier,) if varied is tier else (varied, tier)

    def arm(self, tier: Tier, request: Request, clock: Callable[[], float]) -> TrialArm:
        """Return what counts an answer of a tier, begun now."""
        return TrialArm(self, tier, None if tier.adapted else self.group(tier.name, request), clock)

    def group(self, tier: str, request: Request) -> int | None:
        """Return the group of a request in the counts of a tier; None if the tier has no variants."""
        return self.trials.group(tier, request)

    def count(self, tier: Tier, group: int, result: str, *, duration_s: float) -> None:
        """Count an answer of a tier with variants: `ok`, `failed`, or of a shadow variant `same` or `differs`."""
        self._counted.add((tier.name, tier.variant, result))
        self.trials.answered(tier.name, tier.variant, group, failed=result == "failed", duration_s=duration_s)

    async def score(self, tenant: str, client: str, feedback: Feedback) -> bool | None:
        """Count a client's score here, or at the gateway of this Redis that made the answer; see `count_score`."""
        counted = self.count_score(tenant, client, feedback)
        if counted is None and self._elsewhere is not None:
            return await self._elsewhere.offer(tenant, client, feedback)
        return counted

    def count_score(self, tenant: str, client: str, feedback: Feedback) -> bool | None:
        """Count a client's score; False if the answer had one under this label, None if it is unknown or another's."""
        answer = self.answers.get(feedback.id)
        if answer is None or answer.client != (tenant, client):
            return None
        if not self._scored.add(feedback):
            return False
        result = "good" if feedback.score >= GOOD_SCORE else "bad"
        self._feedback.add((answer.tier, answer.variant, result))
        if not feedback.label:
            mean = self._scores.setdefault((answer.tier, answer.variant), Ewma(_SCORE_HALF_LIFE_S))
            mean.add(feedback.score, self._clock())
        if answer.group is not None:
            self.trials.scored(answer.tier, answer.variant, answer.group, feedback.score, feedback.label)
        return True

    @property
    def problems(self) -> tuple[str, ...]:
        """A sentence for each returned variant, and one if counts cannot be shared."""
        returned = [trial.sentence for trial in self.trials if trial.state == "returned"]
        fault = "" if self.shared is None or not self.active else self.shared.fault
        return (*returned, fault) if fault else tuple(returned)

    async def watch(self) -> None:
        """Share counts and scores with other processes until cancelled, if there is a Redis."""
        if self.shared is not None and self._elsewhere is not None:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.shared.watch)
                tasks.start_soon(self._elsewhere.watch)

    def _samples(self) -> Iterator[Sample]:
        now = self._clock()
        for (tier, variant), mean in self._scores.items():
            if (score := mean.value(now)) is not None:
                yield Sample("causeway_gateway_feedback_score", score, (("tier", tier), ("variant", variant)))
        for trial in self.trials:
            yield Sample(
                "causeway_gateway_variant_share",
                trial.share / 100.0,
                (("tier", trial.place), ("variant", trial.variant.model), ("state", trial.state)),
            )


class TrialArm:
    """Counts a tier's answer: `ended`, `failed`, or an error in its block, but not a client that leaves."""

    def __init__(self, variants: TierVariants, tier: Tier, group: int | None, clock: Callable[[], float]) -> None:
        self._variants, self._tier, self._group, self._clock = variants, tier, group, clock
        self._began = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if isinstance(error, CausewayError):
            self.failed()

    def failed(self) -> None:
        """Count a failure."""
        self._count("failed")

    def ended(self) -> None:
        """Count a complete answer."""
        self._count("ok")

    def _count(self, result: str) -> None:
        if self._group is not None:
            self._variants.count(self._tier, self._group, result, duration_s=self._clock() - self._began)


def check_variants(tiers: Iterable[TierConfig]) -> None:
    """Raise ConfigError for variants that cannot be."""
    for index, tier in enumerate(tiers):
        seen = {tier.model or tier.name}
        if tier.variants and not {"chat", "completion"} & set(tier.can):
            message = "Only tiers that generate text have variants: vectors of two models cannot be compared."
            raise ConfigError(message, where=f"tiers[{index}].variants")
        for at, variant in enumerate(tier.variants):
            if variant.model in seen:
                message = f"`{variant.model}` is already the tier's own model or another variant. Name it once."
                raise ConfigError(message, where=f"tiers[{index}].variants[{at}].model")
            seen.add(variant.model)
            if variant.shadow and tier.trial.promote:
                message = "Clients never get the answers of a shadow variant. Remove it, or `trial.promote`."
                raise ConfigError(message, where=f"tiers[{index}].variants[{at}].shadow")
        if tier.trial != TrialConfig() and not tier.variants:
            raise ConfigError("`trial` has no effect without `variants`.", where=f"tiers[{index}].trial")


def _log(trial: Trial) -> None:
    log.warning("%s", trial.sentence)
