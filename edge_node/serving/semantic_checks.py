"""Checks of semantic answers: under a policy with `shadow`, a share of them is made anew and compared.

1. The client gets the new answer, as if no question had meant the same: no request is sent for the check alone.
2. Never for requests that are bound to the device, sampled, or with tools or several choices; answers that were cut
   off, or that different models made, are not compared.
3. A check costs no client its answer: where the new one fails or would be degraded before its first byte, the client
   gets the cached one. A check does not queue, and leaves time before the request's deadline.
4. What new answers cost counts against the budget of shadow requests; without a rest of it nothing is checked.
5. Only counts and the judge's log-odds are kept. `models.semantic.findings` says what follows from them.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from router.decision.features import question_of
from router.openai import CachedAnswer
from router.policy.compiled import Policy
from router.policy.signals import wants_tools

from ..observability.metrics import Metrics
from ..signals.semantic import SemanticAnswers
from ..storage.cache import StoredAnswer
from .generation import Generation, SemanticCheck
from .shadow_question import MOST_CHARACTERS

if TYPE_CHECKING:
    from ..storage.shadow import ShadowStore


class SemanticChecks:
    """Chooses which semantic answers are checked, and compares them.

    Args:
        semantic: Gets what is found.
        metrics: Counts the results.
        chance: Draws the share.
    """

    def __init__(self, semantic: SemanticAnswers, metrics: Metrics, chance: random.Random) -> None:
        self._semantic = semantic
        self._metrics = metrics
        self._chance = chance
        self._policy: Policy | None = None
        self._store: ShadowStore | None = None

    def use(self, policy: Policy, store: ShadowStore | None) -> None:
        """Follow another policy. `store`: of its shadow requests; None: nothing is checked."""
        self._policy, self._store = policy, store

    def restore(self, store: ShadowStore) -> None:
        """Add what an earlier run has found, once `store` has read it."""
        if store.earlier_findings is not None:
            self._semantic.restore(store.earlier_findings)

    def share(self, generation: Generation) -> float:
        """Return the probability with which a semantic answer to this request is checked."""
        policy, request = generation.policy, generation.request
        shadow = policy.shadow
        if shadow is None or self._store is None or policy is not self._policy or generation.job is not None:
            return 0.0
        sampled = request.sampling.temperature not in (None, 0.0)
        if generation.on_device or sampled or request.sequences != 1 or wants_tools(request):
            return 0.0
        return shadow.share if self._store.usd_today < shadow.usd_per_day else 0.0

    def draw(self, share: float) -> bool:
        """Whether this semantic answer is checked."""
        return self._chance.random() < share

    def compare(self, generation: Generation, check: SemanticCheck, new: StoredAnswer) -> None:
        """Compare both answers, and keep what was found."""
        findings = self._semantic.findings
        if self._store is None or findings is None:
            return
        earlier = check.hit.answer
        texts = _text(earlier), _text(new)
        if texts[0] is None or texts[1] is None or earlier.model != new.model:
            return
        question = question_of(generation.request) or ""
        agreed = self._semantic.compare(check.log_odds, question, texts[0], texts[1])
        self._store.keep_findings(findings)
        self._metrics.semantic_checked("agreed" if agreed else "disagreed")

    def fail(self) -> None:
        """Count a check whose client got the cached answer, because no new one could be made."""
        self._metrics.semantic_checked("failed")

    def charge(self, usd: float) -> None:
        """Count the cost of a new answer, or of the attempt to make one."""
        if self._store is not None and usd > 0.0:
            self._store.charge(usd)


def _text(answer: StoredAnswer) -> str | None:
    """Return the text of an answer that its model ended and that is short enough to compare; None for any other."""
    if not isinstance(answer.body, CachedAnswer):
        return None
    (choice, *_) = answer.body.choices
    return choice.text if choice.finish_reason == "stop" and len(choice.text) <= MOST_CHARACTERS else None
