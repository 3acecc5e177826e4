"""The refits of the active policy's calibrated signals on this device (`shadow.refit`): labels in, corrections out.

After every hundredth label, while the device is idle, a correction of each signal is fitted (`signals.corrections`).
It is used once it is on the disk: whenever the daemon dies, there is the earlier refit or the new one. It is given up,
and the calibration that ships is used again, if later labels speak against it, if a promise raises an alarm, or if its
file here is unreadable, fails the golden answers, or is deleted. Refits of signals that the policy does not use are
kept, so that a policy that is taken back finds them again.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import msgspec

from causeway_server.models.signals.calibration import REFITS_FILE, Refit, read_refits
from causeway_server.router.serving.folders import write_atomically
from causeway_server.router.serving.metrics import Sample

from .corrections import EVERY, LEAST, REFUTED, RESTORED, WINDOW, RefitLabel, Refusal, fails_golden, propose, watched

if TYPE_CHECKING:
    from .estimators import LearnedEstimators

log = logging.getLogger(__name__)
_KEPT = 8  # refits and labels of other signals, the newest


@dataclass
class _Labels:
    """The newest labels about one pair's signals; `wanted`: how many until the next fit; `against`: the e-value against
    the refit in use.
    """

    labels: deque[RefitLabel] = field(default_factory=lambda: deque(maxlen=WINDOW))
    wanted: int = LEAST
    against: float = 1.0


class Refits:
    """The refits of the signals that `learned` has loaded.

    Args:
        directory: The state folder; None: a restart loses them.
        unix: Returns Unix seconds.
        propose: Fits, as `signals.corrections.propose`.
    """

    def __init__(
        self,
        learned: LearnedEstimators,
        directory: Path | None,
        unix: Callable[[], float],
        propose: Callable[..., Refit | Refusal] = propose,
    ) -> None:
        self._learned, self._directory, self._unix, self._propose = learned, directory, unix, propose
        self._known: dict[str, _Labels] = {}  # by digest of the signals
        self.results: Counter[tuple[str, str]] = Counter()  # by model and result
        self.in_use: dict[str, Refit] = {}
        self._kept: list[Refit] = []  # of signals that the policy does not use

    def use(self, *, refit: bool) -> None:
        """Follow another policy, and read the file again. `refit`: whether the policy asks for refits."""
        models = {sha256: model for model, sha256 in self._learned.pairs.items()}
        others = [sha256 for sha256 in self._known if sha256 not in models]
        for sha256 in others[:-_KEPT]:
            del self._known[sha256]
        found = {one.signals_sha256: one for one in (self._read() if refit else [])}
        kept = sorted((one for sha256, one in found.items() if sha256 not in models), key=lambda one: one.at)
        self._kept = kept[-_KEPT:]
        for sha256, one in [item for item in found.items() if item[0] in models]:
            if fails_golden(one, self._learned.golden(models[sha256])):
                log.warning(
                    "The %s for the model %s is dropped, because it makes the golden answers less likely.",
                    one.name,
                    models[sha256],
                )
                del found[sha256]
        self._apply({sha256: one for sha256, one in found.items() if sha256 in models})
        self._write(self.in_use)
        if not refit:
            self._learned.refits = None

    def add(self, sha256: str, label: RefitLabel) -> None:
        """Take a new label into account. It may give the refit in use up."""
        known = self._known.setdefault(sha256, _Labels())
        known.labels.append(label)
        known.wanted -= 1
        if (used := self.in_use.get(sha256)) is not None:
            known.against = watched(known.against, used, label)
            if known.against > REFUTED:
                self.give_up(f"an e-value of {known.against:.0f} says that it is worse", [sha256])

    def restore(self, sha256: str, label: RefitLabel) -> None:
        """Take a label of an earlier run into account. The refit in use was fitted on it, so it is not evidence."""
        known = self._known.setdefault(sha256, _Labels())
        known.labels.append(msgspec.structs.replace(label, source=RESTORED if label.source else 0))
        known.wanted = EVERY if sha256 in self.in_use else known.wanted - 1

    @property
    def due(self) -> tuple[str, str] | None:
        """A model whose signals have enough new labels, and their digest."""
        for model, sha256 in () if self._learned.refits is None else self._learned.pairs.items():
            if (known := self._known.get(sha256)) is not None and known.wanted <= 0:
                return model, sha256
        return None

    async def run(self) -> None:
        """Fit the next correction that is due. If it is cancelled, nothing has changed."""
        if (due := self.due) is None:
            return
        model, sha256 = due
        known, used = self._known[sha256], self.in_use.get(sha256)
        fit = partial(self._propose, list(known.labels), self._learned.golden(model), used, sha256, self._unix())
        found = await anyio.to_thread.run_sync(fit, abandon_on_cancel=True)
        known.wanted = EVERY
        if not isinstance(found, Refit):
            self.results[model, found] += 1
            level = logging.INFO if found == "not_better" else logging.WARNING
            log.log(level, "A refit of the calibration of %s is refused: %s.", model, found)
            return
        with anyio.CancelScope(shield=True):  # what is on the disk is in use
            stored = await anyio.to_thread.run_sync(self._write, self.in_use | {sha256: found})
        if self._known.get(sha256) is not known or self.in_use.get(sha256) is not used or self._learned.refits is None:
            self._write(self.in_use)  # another policy, or it was given up, meanwhile
            return
        self.results[model, "adopted" if stored else "not_stored"] += 1
        if stored:
            known.against = 1.0
            self._apply(self.in_use | {sha256: found})
            log.info("The calibration of %s is corrected: %s.", model, found.sentence)

    def give_up(self, why: str, digests: Iterable[str] | None = None) -> None:
        """Use the calibration that ships again. `digests`: of the signals; None: of all."""
        gone = set(self.in_use).intersection(self.in_use if digests is None else digests)
        for model, sha256 in self._learned.pairs.items():
            if sha256 in gone:
                log.warning("The calibration of %s is again the one that was shipped: %s.", model, why)
                self.results[model, "given_up"] += 1
        if gone:
            self._apply({sha256: one for sha256, one in self.in_use.items() if sha256 not in gone})
            self._write(self.in_use)

    def samples(self) -> Iterator[Sample]:
        """Yield what became of refits, and those in use."""
        for (model, result), count in self.results.items():
            yield Sample("causeway_edge_refits", count, (("model", model), ("result", result)), "counter")
        for model, sha256 in self._learned.pairs.items():
            if (refit := self.in_use.get(sha256)) is not None:
                yield Sample("causeway_edge_refit_labels", refit.labels, (("model", model),))
                yield Sample("causeway_edge_refit_gain", refit.gain, (("model", model),))
                yield Sample("causeway_edge_refit_time_seconds", refit.at, (("model", model),))

    def _apply(self, refits: dict[str, Refit]) -> None:
        self.in_use = self._learned.refits = refits
        pairs = self._learned.pairs.items()
        self._learned.promises.read_with({model: refits[key].confidence for model, key in pairs if key in refits})

    def _read(self) -> list[Refit]:
        if self._directory is None:
            return [*self.in_use.values(), *self._kept]
        try:
            return read_refits(self._directory)
        except (OSError, ValueError) as error:
            log.warning("%s cannot be read and is removed: %s", self._directory / REFITS_FILE, type(error).__name__)
            return []

    def _write(self, refits: dict[str, Refit]) -> bool:
        """Write the file; return whether that succeeded."""
        try:
            if self._directory is not None and (refits or self._kept):
                content = msgspec.json.encode([*refits.values(), *self._kept])
                write_atomically(self._directory / REFITS_FILE, content, 0o600)
            elif self._directory is not None:
                (self._directory / REFITS_FILE).unlink(missing_ok=True)
        except OSError as error:
            log.error("%s cannot be written: %s", error.filename, error.strerror)
            return False
        return True
