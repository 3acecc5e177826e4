"""The body of `POST /v1/feedback`, of edge and gateway: a client scores one of its own answers."""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ..openai.request_body import load, validate

GOOD_SCORE: Final = 0.5
"""A score from which metrics call an answer good."""
_MAX_SCORED: Final = 10_000
_ADVICE: Final = {
    "id": "Send the value of the response header that names the answer.",
    "score": "Send a number from 0 (bad) to 1 (good).",
    "label": "Send up to 64 letters, digits, dots, dashes or underscores.",
}


class Feedback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A score of an answer.

    Attributes:
        id: The id of the answer, as its response headers name it.
        score: A number from 0 (bad) to 1 (good).
        label: The subject of the score; "" for the answer as a whole.
    """

    id: Annotated[str, Meta(min_length=1, max_length=100)]
    score: Annotated[float, Meta(ge=0, le=1)]
    label: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{0,64}$")] = ""


class FeedbackReceipt(msgspec.Struct, frozen=True):
    """The answer to feedback. `counted` False: this answer was scored before under the same label."""

    id: str
    counted: bool


def parse_feedback(body: bytes) -> Feedback:
    """Parse a body. Raises InvalidRequest."""
    return validate(load(body), Feedback, _ADVICE)


class ScoredAnswers:
    """The newest answers that were scored, so that each counts once under each label."""

    def __init__(self) -> None:
        self._scored: OrderedDict[tuple[str, str], None] = OrderedDict()

    def add(self, feedback: Feedback) -> bool:
        """Note a score; return False if the answer was scored before under this label."""
        key = (feedback.id, feedback.label)
        if key in self._scored:
            return False
        self._scored[key] = None
        if len(self._scored) > _MAX_SCORED:
            self._scored.popitem(last=False)
        return True
