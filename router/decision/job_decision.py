"""Decisions for jobs, which have time: a job waits for the target that the policy puts first.

A target that is down keeps its place, and nothing follows the first target of the cloud: no lesser target answers in
its place, and the request is sent to one target of the cloud alone, so that it has one effect there.
"""

from __future__ import annotations

import msgspec

from ..types import Decision, Snapshot


def without_down(snapshot: Snapshot) -> Snapshot:
    """Return the snapshot in which no target is down."""
    return msgspec.structs.replace(snapshot, down=frozenset()) if snapshot.down else snapshot


def until_first_cloud(decision: Decision) -> Decision:
    """Return the decision with its attempts up to the first one in the cloud."""
    for number, plan in enumerate(decision.attempts, start=1):
        if plan.target.at == "cloud":
            return msgspec.structs.replace(decision, attempts=decision.attempts[:number])
    return decision
