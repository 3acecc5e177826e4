"""The semantic cache's matching on this device: finds an earlier question with the same meaning.

Its code and model are loaded only if the active policy has a rule with `semantic`. Questions are kept in memory only,
so they are lost at a restart; the answers are stored in the exact cache.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from causeway_server.models.catalog.artifact import ArtifactError
from causeway_server.router.decision.features import question_of
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.types import Request

if TYPE_CHECKING:
    from causeway_server.models.semantic.index import Match, SemanticIndex
    from causeway_server.models.semantic.judge import ComparedText, Findings, Judge

log = logging.getLogger(__name__)

LoadJudge = Callable[[Sequence[Path]], "Judge"]


class SemanticAnswers:
    """Finds the cache key of an earlier request of the same scope whose question has the same meaning.

    Args:
        extra_dirs: Folders searched for models before those that ship.
        load: Function that loads the judge, for the first policy that needs it.
    """

    def __init__(self, extra_dirs: Sequence[Path] = (), load: LoadJudge | None = None) -> None:
        self._dirs = extra_dirs
        self._load = load or load_judge
        self._judge: Judge | None = None
        self._index: SemanticIndex | None = None
        self._thresholds: dict[float, float] = {}  # log-odds that a hit must exceed, by max_error
        self._findings: Findings | None = None  # results of this judge
        self._earlier: Findings | None = None  # results of an earlier run

    def __len__(self) -> int:
        return 0 if self._index is None else len(self._index)

    def activate(self, policy: Policy) -> None:
        """Load the judge if the policy has a rule with `semantic`, else forget everything. Never raise."""
        promises = {rule.semantic.max_error for rule in policy.cache if rule.semantic is not None}
        self._judge = (self._judge or self._loaded()) if promises else None
        if self._judge is None:
            self._index, self._thresholds = None, {}
            return
        if self._index is None:
            from causeway_server.models.semantic.index import SemanticIndex
            from causeway_server.models.semantic.judge import Findings

            self._index = SemanticIndex(self._judge)
            if self._findings is None:
                self._findings = Findings(self._judge.sha256)
                self._merge_earlier()
        self._thresholds = {error: self._threshold(error) for error in promises}
        for error, threshold in self._thresholds.items():
            if threshold == math.inf:
                log.warning(
                    "Semantic cache: the model that compares questions cannot reach max_error %g, so there will be "
                    "no hits.",
                    error,
                )

    def _threshold(self, max_error: float) -> float:
        calibration = None if self._judge is None else self._judge.calibration
        if calibration is None or self._findings is None:
            return math.inf
        return max(calibration.threshold(max_error), self._findings.least_log_odds(max_error))

    def _merge_earlier(self) -> None:
        findings, earlier = self._findings, self._earlier
        if findings is not None and earlier is not None:
            self._earlier = None
            if earlier.judge_sha256 == findings.judge_sha256:
                findings.merge(earlier)

    def _loaded(self) -> Judge | None:
        try:
            return self._load(self._dirs)
        except (ArtifactError, ImportError) as error:
            log.warning(
                "The semantic cache stays off, because the model that compares questions cannot be used: %s", error
            )
            return None

    def question(self, request: Request) -> ComparedText | None:
        """Return the request's question for comparison; None if the cache is off, or it is not compared."""
        if self._judge is None:
            return None
        text = question_of(request)
        return None if text is None else self._judge.question(text)

    def find(self, scope: bytes, question: ComparedText, max_error: float) -> Match | None:
        """Return the best earlier question, if its probability satisfies `max_error`."""
        if self._index is None:
            return None
        match = self._index.find(scope, question)
        if match is None or match.log_odds <= self._thresholds.get(max_error, math.inf):
            return None
        self._index.touch(match.key)
        return match

    @property
    def findings(self) -> Findings | None:
        """Return the results of comparisons; None while the cache is off."""
        return None if self._index is None else self._findings

    def restore(self, findings: Findings) -> None:
        """Add the results of an earlier run with this judge."""
        self._earlier = findings
        self._merge_earlier()
        self._thresholds = {error: self._threshold(error) for error in self._thresholds}

    def look_up(self, share: float) -> None:
        """Count a lookup under a policy that compares `share` of the semantic answers."""
        if self._findings is not None and self._findings.look_up(share):
            self._thresholds = {error: self._threshold(error) for error in self._thresholds}

    def compare(self, log_odds: float, question: str, earlier: str, new: str) -> bool:
        """Compare the answer of a match with the new one; return whether they agree.

        The thresholds rise if more answers differ than the configured errors explain.
        """
        # Imported only if a policy has shadow requests.
        from causeway_server.models.signals.agreement import answers_agree

        if self._judge is None or self._findings is None:
            return True
        agreed = answers_agree(question, earlier, new, self._judge.vector)
        self._findings.compare(log_odds, agreed=agreed)
        for error, before in self._thresholds.items():
            self._thresholds[error] = self._threshold(error)
            if self._thresholds[error] > before:
                log.warning(
                    "Semantic cache: %d of %d compared answers differ, which is more than max_error %g allows. "
                    "Matching is stricter now.",
                    len(self._findings.wrong),
                    self._findings.compared,
                    error,
                )
        return agreed

    def add(self, scope: bytes, question: ComparedText, key: bytes) -> None:
        """Add the question whose answer was cached under `key`."""
        if self._index is not None:
            self._index.add(scope, question, key)

    def forget(self, key: bytes) -> None:
        """Remove a question whose answer was removed from the cache."""
        if self._index is not None:
            self._index.remove(key)

    def clear(self) -> None:
        """Forget all questions."""
        if self._index is not None and self._judge is not None:
            self._index = type(self._index)(self._judge)


def load_judge(extra_dirs: Sequence[Path]) -> Judge:
    """Load the judge and the encoder that it was trained on.

    Raises:
        ArtifactError: The judge is missing, or broken.
        ImportError: ONNX Runtime is not installed.
    """
    from causeway_server.models.catalog.artifact import find_judged_artifact, find_signal
    from causeway_server.models.semantic.judge import Judge

    judge = find_signal("same-answer", None, extra_dirs)
    return Judge.load(judge, find_judged_artifact(judge, extra_dirs))
