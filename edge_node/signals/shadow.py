"""Evaluation of shadow requests: agreement of both sides, and drift of the calibrated signals.

A calibrated pair estimates the probability that the device's answer is good enough. These estimates are compared with
the agreement of the newest answers: once the calibration error exceeds what chance explains by more than the policy's
`max_drift`, the signals are set aside until it is below half of that again, or until others are fitted
(`causeway-models calibrate --from-shadow`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from causeway_server.models.catalog.artifact import find_signal
from causeway_server.models.signals.agreement import answers_agree
from causeway_server.models.signals.calibration import log_odds
from causeway_server.models.signals.drift import MIN_ANSWERS, CalibrationDrift, measure_drift
from causeway_server.models.signals.encoder import SentenceEncoder
from causeway_server.models.signals.pair import ModelIdentity, prompt_features
from causeway_server.models.signals.shadow import ShadowAnswer
from causeway_server.router.policy.compiled import Policy
from causeway_server.router.serving.metrics import Sample
from causeway_server.router.types import Chunk, Confidence

from ..backends.backend import BackendRequest
from .corrections import WINDOW as REFIT_WINDOW
from .corrections import RefitLabel
from .estimators import LearnedEstimators
from .promises import Promises
from .refits import Refits

log = logging.getLogger(__name__)

WINDOW = 500  # number of the newest answers of one pair's signals


class ShadowObserver:
    """Compares answers, and sets drifted signals aside.

    Args:
        model_dirs: Folders that are searched for the encoder before the models that ship.
        weights: Returns the hash of an edge model's weights.
        directory: The state folder, for the file of refits.
        unix: Returns Unix seconds.

    Raises:
        ArtifactError: There is no sentence encoder.
        ImportError: ONNX Runtime is not installed.
    """

    def __init__(
        self,
        learned: LearnedEstimators,
        model_dirs: Sequence[Path],
        weights: Callable[[str], str],
        directory: Path | None,
        unix: Callable[[], float],
    ) -> None:
        encoder = find_signal("embedding", None, model_dirs)
        self._learned = learned
        self._weights = weights
        self._encoder_sha256 = encoder.manifest.sha256
        self._encode = SentenceEncoder(encoder.path)
        self._recent: dict[str, deque[ShadowAnswer]] = {}  # by digest of the signals
        self.refits = Refits(learned, directory, unix)

    @property
    def window(self) -> int:
        """Number of the newest answers that are taken into account."""
        return max(WINDOW, REFIT_WINDOW)

    @property
    def set_aside(self) -> dict[str, str]:
        """Reason by edge model, for models whose calibrated signals are set aside."""
        return self._learned.set_aside_pairs

    @property
    def promises(self) -> Promises:
        """The promises of the active policy's routes."""
        return self._learned.promises

    def use(self, policy: Policy) -> None:
        """Follow the promises of another policy, once its signals are loaded."""
        self.promises.use(policy, self._weights, self._learned.pairs)
        self.refits.use(refit=policy.shadow is not None and policy.shadow.refit)

    def score(self, call: BackendRequest, chunk: Chunk, quality: float | None) -> Confidence | None:
        """Return the confidence of a chunk as the handoff compares it; None without one."""
        return self._learned.calibrate(call, chunk, quality).confidence

    def compare(
        self,
        prompt: str,
        small: tuple[str, str],
        large: tuple[str, str],
        confidence: Confidence | None,
        *,
        ended: bool,
        route: str,
        after: int,
        client: str,
    ) -> ShadowAnswer:
        """Compare both answers to one prompt, and return the record to keep.

        Args:
            small, large: The model and the compared part of its answer.
            ended: Whether `confidence` covers all tokens of the answer.
            after: The number of tokens after which the handoff decides.
        """
        inputs = np.array(prompt_features(prompt, self._encode), np.float32).tobytes()
        estimates = self._learned.estimate(small[0], prompt, confidence, after, ended=ended)
        return ShadowAnswer(
            small=ModelIdentity(small[0], self._weights(small[0])),
            large=large[0],
            route=route,
            encoder_sha256=self._encoder_sha256,
            inputs=inputs,
            agreed=answers_agree(prompt, small[1], large[1], self._encode),
            confidence=confidence,
            after=after,
            ended=ended,
            signals_sha256="" if estimates is None else estimates.sha256,
            quality=None if estimates is None else estimates.quality,
            score=None if estimates is None else estimates.score,
            kind=0 if estimates is None else estimates.kind,
            source=hash(client) % 64,  # Python salts the hash in each process, so that the file tells nobody's name
        )

    def add(self, answers: Iterable[ShadowAnswer], max_drift: float, *, restored: bool = False) -> None:
        """Take answers into account, oldest first, and set drifted signals aside. `restored`: of an earlier run."""
        take = self.refits.restore if restored else self.refits.add
        for answer in answers:
            if answer.signals_sha256:
                self._recent.setdefault(answer.signals_sha256, deque(maxlen=WINDOW)).append(answer)
            if (label := _refit_label(answer)) is not None:
                take(answer.signals_sha256, label)
        self.look(max_drift)

    def look(self, max_drift: float) -> None:
        """Set aside the active policy's signals that have drifted; use those again that have recovered."""
        aside = self._learned.set_aside_pairs
        for model, sha256 in self._learned.pairs.items():
            worst = max(self._drifts(sha256), key=lambda found: found[1].drift, default=None)
            if worst is None:
                continue
            signal, drift = worst
            if drift.drift > max_drift and model not in aside:
                reason = (
                    f"The calibrated signals of {model} are set aside: over {drift.answers} shadow answers the error "
                    f"of {signal} is {drift.error:.2f}, {drift.drift:.2f} more than chance explains (shadow.max_drift "
                    f"is {max_drift:g}). Fit others: causeway-models calibrate --from-shadow"
                )
                log.warning(reason)
                self._learned.set_aside(sha256, reason)
            elif drift.drift < max_drift / 2 and model in aside:
                log.info(
                    "The calibrated signals of %s are used again, because their drift is now %.2f.", model, drift.drift
                )
                self._learned.use_again(sha256)

    @property
    def drift(self) -> float | None:
        """The largest drift of the active policy's signals; None without enough answers."""
        found = [drift.drift for sha256 in self._learned.pairs.values() for _, drift in self._drifts(sha256)]
        return max(found, default=None)

    def samples(self) -> Iterator[Sample]:
        """Yield the metrics of the active policy's signals and promises."""
        yield from self.promises.samples()
        yield from self.refits.samples()
        for model, sha256 in self._learned.pairs.items():
            for signal, drift in self._drifts(sha256, least=1):
                labels = (("model", model), ("signal", signal))
                yield Sample("causeway_edge_calibration_error", drift.error, labels)
                yield Sample("causeway_edge_calibration_drift", drift.drift, labels)
            yield Sample(
                "causeway_edge_calibration_set_aside",
                float(model in self._learned.set_aside_pairs),
                (("model", model),),
            )

    def _drifts(self, sha256: str, least: int = MIN_ANSWERS) -> Iterator[tuple[str, CalibrationDrift]]:
        """Yield each signal with at least `least` answers."""
        recent, refit = self._recent.get(sha256, ()), self.refits.in_use.get(sha256)
        for signal, correction, stated in (
            ("edge.quality", refit and refit.quality, [(one.quality, one) for one in recent]),
            ("confidence", refit and refit.confidence, [(one.score, one) for one in recent]),
        ):
            known = [
                (correction(probability, one.kind) if correction else probability, one.agreed)
                for probability, one in stated
                if probability is not None
            ]
            if len(known) >= least:
                yield signal, measure_drift(*zip(*known, strict=True))


def _refit_label(answer: ShadowAnswer) -> RefitLabel | None:
    """Return the label of an answer for a refit; None if no calibrated signals estimated it."""
    if answer.quality is None or not answer.signals_sha256:
        return None
    confidence = None if answer.score is None else log_odds(answer.score)
    return RefitLabel(answer.kind, log_odds(answer.quality), confidence, answer.agreed, answer.source)
