"""The semantic cache's matching on this box: which earlier question means the same as this one.

Nothing of it is imported, loaded or computed unless the active policy has a rule with `semantic`. Questions are kept in
memory only, so they are gone after a restart; the answers are the exact cache's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from models.catalog.artifact import ArtifactError
from router.decision.decide import question_of
from router.policy.compiled import Policy
from router.types import Request

if TYPE_CHECKING:
    from models.semantic.index import Match, SemanticIndex
    from models.semantic.judge import ComparedText, Judge

log = logging.getLogger(__name__)

LoadJudge = Callable[[Sequence[Path]], "Judge"]


class SemanticAnswers:
    """Finds the cache key of an earlier request of the same scope whose question means the same.

    Args:
        extra_dirs: folders searched for models before those that ship.
        load: loads the judge, at the first policy that needs it.
    """

    def __init__(self, extra_dirs: Sequence[Path] = (), load: LoadJudge | None = None) -> None:
        self._dirs = extra_dirs
        self._load = load or load_judge
        self._judge: Judge | None = None
        self._index: SemanticIndex | None = None
        self._thresholds: dict[float, float] = {}  # log-odds that a hit must exceed, by max_error

    def __len__(self) -> int:
        return 0 if self._index is None else len(self._index)

    def activate(self, policy: Policy) -> None:
        """Load the judge if the policy has a rule with `semantic`, else forget everything. Never raises."""
        promises = {rule.semantic.max_error for rule in policy.cache if rule.semantic is not None}
        self._judge = (self._judge or self._loaded()) if promises else None
        if self._judge is None:
            self._index, self._thresholds = None, {}
            return
        if self._index is None:
            from models.semantic.index import SemanticIndex

            self._index = SemanticIndex(self._judge)
        calibration = self._judge.calibration
        self._thresholds = {
            error: math.inf if calibration is None else calibration.threshold(error) for error in promises
        }
        for error, threshold in self._thresholds.items():
            if threshold == math.inf:
                log.warning("semantic: the judge cannot promise max_error %g: it will find nothing", error)

    def _loaded(self) -> Judge | None:
        try:
            return self._load(self._dirs)
        except (ArtifactError, ImportError) as error:
            log.warning("the semantic cache stays off, its judge cannot be used: %s", error)
            return None

    def question(self, request: Request) -> ComparedText | None:
        """Return a request as it is compared; None if the cache is off, or nothing of the request is compared."""
        if self._index is None:
            return None
        text = question_of(request)
        return None if text is None else self._index.question(text)

    def find(self, scope: bytes, question: ComparedText, max_error: float) -> Match | None:
        """Return the best earlier question, if it is likely enough for `max_error`."""
        if self._index is None:
            return None
        match = self._index.find(scope, question)
        if match is None or match.log_odds <= self._thresholds.get(max_error, math.inf):
            return None
        self._index.touch(match.key)
        return match

    def add(self, scope: bytes, question: ComparedText, key: bytes) -> None:
        """Add the question whose answer was cached under `key`."""
        if self._index is not None:
            self._index.add(scope, question, key)

    def forget(self, key: bytes) -> None:
        """Remove a question whose answer is gone."""
        if self._index is not None:
            self._index.remove(key)


def load_judge(extra_dirs: Sequence[Path]) -> Judge:
    """Load the judge and the encoder that it was trained on.

    Raises:
        ArtifactError: there is none, or it is broken.
        ImportError: ONNX Runtime is not installed.
    """
    from models.semantic.judge import Judge
    from models.signals.lookup import find_judged_artifact, find_signal

    judge = find_signal("same-answer", None, extra_dirs)
    return Judge.load(judge, find_judged_artifact(judge, extra_dirs))
