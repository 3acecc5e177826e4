"""Facts about a request's texts: the signals `pii.classes`, `pii.count` and `secrets.count`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

from ..types import Request
from .classes import PII_CLASSES, Found, GuardClass
from .texts import with_texts


class TextModel(Protocol):
    """A model that finds names and addresses. Both methods may be called in a thread."""

    def find(self, text: str) -> Sequence[Found]: ...


class GuardFacts(msgspec.Struct, frozen=True):
    """The classes of personal data in a request, sorted, and the numbers of different values."""

    classes: tuple[str, ...] = ()
    pii: int = 0
    secrets: int = 0

    def joined(self, other: GuardFacts) -> GuardFacts:
        """Return the facts of a request in two forms: the classes of both, and the larger numbers."""
        classes = tuple(sorted({*self.classes, *other.classes}))
        return GuardFacts(classes, max(self.pii, other.pii), max(self.secrets, other.secrets))


class GuardSettings(msgspec.Struct, frozen=True):
    """Settings of the detectors. `on_failure`: the count of a request that they cannot read; `timeout_s`: their time
    for a request; `phone_regions`: regions whose national telephone numbers are found anywhere.
    """

    on_failure: Literal["hit", "clean"] = "hit"
    timeout_s: float = 1.0
    phone_regions: tuple[str, ...] = ()


DEFAULT_SETTINGS = GuardSettings()
NOTHING = GuardFacts()
UNKNOWN = GuardFacts(tuple(sorted(PII_CLASSES)), 1, 1)
"""The facts of a request that could not be examined, where that counts as a hit."""


class Detector:
    """Finds values in texts, each text once. `regions`, `expired`: see `detectors.find`; `model` finds names and
    addresses; None: they are not found.
    """

    def __init__(
        self, regions: Sequence[str] = (), model: TextModel | None = None, expired: Callable[[], bool] = lambda: False
    ) -> None:
        self._regions = regions
        self._model = model
        self._expired = expired
        self._known: dict[str, list[Found]] = {}

    def find(self, text: str) -> list[Found]:
        """Return the values in a text. Raises TimeoutError, or any error of the model."""
        found = self._known.get(text)
        if found is None:
            from .detectors import find, without_overlaps  # on demand: most devices have no guard

            if self._expired():
                raise TimeoutError("The guard's detectors took too long.")
            found = find(text, self._regions, self._expired)
            if self._model is not None:
                found = without_overlaps([*found, *self._model.find(text)])
            self._known[text] = found
        return found


def facts_of(request: Request, detector: Detector) -> GuardFacts:
    """Return what the texts of a request contain. Raises like `Detector.find`."""
    values: set[tuple[GuardClass, str]] = set()

    def see(text: str) -> str:
        if text:
            for start, end, kind in detector.find(text):
                values.add((kind, text[start:end]))
        return text

    with_texts(request, see)
    if not values:
        return NOTHING
    classes = tuple(sorted({kind for kind, _ in values if kind != "secret"}))
    secrets = sum(kind == "secret" for kind, _ in values)
    return GuardFacts(classes, len(values) - secrets, secrets)
