"""Estimates of the targets that a policy's `best_of` compares: calibrated quality, learned length, measured time."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from causeway_server.models.catalog.artifact import ArtifactError, ArtifactUnreadable
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.trackers import Ewma
from causeway_server.router.types import AttemptRecord, Candidate, Request, Target

from .estimators import prompt_text
from .lengths import AnswerLengths, length_inputs

if TYPE_CHECKING:
    from causeway_server.models.signals.candidates import CandidateEstimator

log = logging.getLogger(__name__)

_HALF_LIFE_S = 300.0


class CandidateEstimates:
    """The estimates of the active policy's targets.

    Args:
        extra_dirs: Folders searched for the calibration before those that ship.
    """

    def __init__(self, extra_dirs: Sequence[Path] = ()) -> None:
        self._dirs = extra_dirs
        self._estimator: CandidateEstimator | None = None
        self._times: dict[str, Ewma] = {}  # by target
        self._lengths: dict[str, AnswerLengths] = {}  # by the served model

    def activate(self, policy: Policy) -> None:
        """Load the calibration of the targets that `best_of` compares. Never raises.

        A file that cannot be read is logged, and the calibration in use stays if it covers the same weights.
        """
        self._times = {target.name: self._times.get(target.name, Ewma(_HALF_LIFE_S)) for target in policy.compared}
        self._lengths = {one.served: self._lengths.get(one.served) or AnswerLengths() for one in policy.compared}
        names = sorted({target.model for target in policy.compared if not target.adapter})
        previous, self._estimator = self._estimator, None
        if not names:
            return
        try:
            # Imported on demand: ONNX Runtime takes memory and is optional.
            from causeway_server.models.signals.candidates import find_candidates

            self._estimator = find_candidates(names, self._dirs)
        except (ArtifactError, ImportError) as error:
            if isinstance(error, ArtifactUnreadable) and previous is not None and self._fits(previous, names):
                self._estimator = previous
                log.warning("A calibration of `best_of` cannot be read, so the previous one stays in use: %s", error)
            else:
                log.warning("`best_of` cannot compare its targets and tries them in the order of its list: %s", error)

    def _fits(self, estimator: CandidateEstimator, models: Sequence[str]) -> bool:
        """Return whether estimates are still those of the models here."""
        from causeway_server.models.signals.candidates import check_weights

        try:
            check_weights(estimator.parameters, models, self._dirs)
        except ArtifactError:
            return False
        return True

    def observe(self, attempts: Iterable[AttemptRecord], now: float) -> None:
        """Take the times of complete answers into account. `now`: monotonic seconds."""
        for attempt in attempts:
            if (time := self._times.get(attempt.target)) is not None and attempt.state == "done":
                time.add((attempt.duration_ms or 0.0) / 1000.0, now)

    def learn(self, request: Request, target: Target, tokens: int) -> None:
        """Take the length of a complete answer into account. `tokens`: of all its choices."""
        text, lengths = prompt_text(request), self._lengths.get(target.served)
        if text is not None and lengths is not None and tokens:
            lengths.learn(length_inputs(text, request.max_tokens), tokens / request.sequences)

    def estimate(self, policy: Policy, request: Request, now: float) -> tuple[Candidate, ...]:
        """Return the estimates for a request. A model with an adapter, and a request without text, has no quality."""
        estimator, text = self._estimator, prompt_text(request)
        qualities = {} if estimator is None or text is None else estimator.qualities(text)
        inputs = () if text is None else length_inputs(text, request.max_tokens)
        found = []
        for target in policy.compared:
            known = None if estimator is None or target.adapter else estimator.models.get(target.model)
            time, lengths = self._times.get(target.name), self._lengths.get(target.served)
            length = lengths.expected(inputs) if lengths is not None and inputs else None
            found.append(
                Candidate(
                    target.at,
                    target.served,
                    quality=None if known is None else qualities.get(target.model),
                    answer_tokens=length or (None if known is None else known.answer_tokens),
                    latency_s=None if time is None else time.value(now),
                )
            )
        return tuple(found)
