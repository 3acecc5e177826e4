"""Table of a batch's life, with OpenAI's names. A missing entry is an illegal transition."""

from __future__ import annotations

from typing import Final, Literal

BatchState = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]

BATCH_TRANSITIONS: Final[dict[BatchState, frozenset[BatchState]]] = {
    "validating": frozenset({"failed", "in_progress", "cancelling"}),
    # It fails when something other than Causeway has deleted its input file's content.
    "in_progress": frozenset({"finalizing", "cancelling", "failed"}),
    # All its jobs have ended: it is too late to cancel.
    "finalizing": frozenset({"completed", "expired"}),
    "cancelling": frozenset({"cancelled", "failed"}),
    "failed": frozenset(),
    "completed": frozenset(),
    "expired": frozenset(),
    "cancelled": frozenset(),
}


def source_states(state: BatchState) -> tuple[BatchState, ...]:
    """Return the states from which `state` can be entered."""
    return tuple(source for source, targets in BATCH_TRANSITIONS.items() if state in targets)


def is_final(state: BatchState) -> bool:
    """Whether no transition leaves `state`."""
    return not BATCH_TRANSITIONS[state]
