"""Variants of a policy's targets on this device: the policy of each request, its counts, and the verdicts.

A request that a variant answers runs under the policy with the variant's model in its target's place. Cache keys cover
the models of a policy, so variants share no answers.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterator
from pathlib import Path

from causeway_server.router.policy.compiled import Policy, with_variants
from causeway_server.router.serving.folders import write_atomically
from causeway_server.router.serving.metrics import Sample
from causeway_server.router.types import AUTO, DecisionRecord, Request
from causeway_server.router.variants.feedback import GOOD_SCORE, Feedback, ScoredAnswers
from causeway_server.router.variants.trials import Trial, Trials

from ..observability.metrics import Metrics
from .generation import Generation

log = logging.getLogger(__name__)

FILE = "variants-1.json"


class DeviceVariants:
    """The variants of the active policy. `directory`: the state folder, for the trials; None: they begin again with the
    daemon; `device`: this device's name, for variants that are sticky by device.
    """

    def __init__(self, metrics: Metrics, directory: Path | None, device: str = "") -> None:
        self._metrics = metrics
        self._file = None if directory is None else directory / FILE
        self._trials = Trials(device or platform.node(), self._decided)
        self._policy: Policy | None = None
        self._varied: dict[tuple[tuple[str, str], ...], Policy] = {}
        self._scored = ScoredAnswers()
        self._restored = False

    def use(self, policy: Policy) -> None:
        """Follow another policy. Trials with the same models and share go on."""
        self._trials.use(policy.places)
        self._policy = policy
        self._varied.clear()
        if policy.places and not self._restored and self._file is not None and self._file.is_file():
            self._trials.restore(self._file.read_bytes())
        self._restored = True

    def policy_of(self, policy: Policy, request: Request) -> Policy:
        """Return the policy under which a request runs: with the models of the variants that answer it. A request that
        names a model, not a target, gets that model.
        """
        if policy is not self._policy or (request.model != AUTO and request.model not in policy.target_names):
            return policy
        chosen = tuple(self._trials.assigned(request).items())
        if not chosen:
            return policy
        if chosen not in self._varied:
            self._varied[chosen] = with_variants(policy, dict(chosen))
        return self._varied[chosen]

    def count(self, generation: Generation) -> None:
        """Count the attempts of a finished generation: those that were answered, and those that failed."""
        for attempt in () if generation.sequence is None else generation.sequence.attempts:
            target, failed = attempt.plan.target, attempt.failed
            group = self._trials.group(target.name, generation.request)
            if group is None or not (failed or attempt.state.value == "done"):
                continue
            self._metrics.variant_answers.add((target.name, target.variant, "failed" if failed else "ok"))
            duration_s = (attempt.record(0.0).duration_ms or 0.0) / 1000.0
            self._trials.answered(target.name, target.variant, group, failed=failed, duration_s=duration_s)

    def group(self, place: str, request: Request) -> int | None:
        """Return the group of a request in the counts of a target; None if the target has no variants."""
        return self._trials.group(place, request)

    def score(self, record: DecisionRecord, feedback: Feedback) -> bool:
        """Count a client's score of an answer; return False if it was scored before under this label."""
        if not self._scored.add(feedback):
            return False
        outcome = record.outcome
        result = "good" if feedback.score >= GOOD_SCORE else "bad"
        self._metrics.feedback.add((outcome.target, outcome.variant, result))
        if record.trial_group is not None:
            self._trials.scored(outcome.target, outcome.variant, record.trial_group, feedback.score, feedback.label)
        return True

    @property
    def problems(self) -> Iterator[str]:
        """Yield a sentence for each returned variant."""
        for trial in self._trials:
            if trial.state == "returned":
                yield trial.sentence

    def samples(self) -> Iterator[Sample]:
        """Yield the share in force of each variant."""
        for trial in self._trials:
            labels = (("target", trial.place), ("variant", trial.variant.model), ("state", trial.state))
            yield Sample("causeway_edge_variant_share", trial.share / 100.0, labels)

    def save(self) -> None:
        """Write the trials to the state folder, if there are any. A failure is logged."""
        if self._file is None or not self._trials:
            return
        try:
            write_atomically(self._file, self._trials.dump(), 0o600)
        except OSError as error:
            log.error("The counts of the trials of variants could not be written to %s: %s", self._file, error.strerror)

    def _decided(self, trial: Trial) -> None:
        log.warning("%s", trial.sentence)
        self.save()
