"""One look at what the fleet publishes: verified plan and manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from router.bundle.rollout import assigned_bundle

from ..inspection import Looked, LookRequest
from ..verifier import Fetch, UpdateVerifier


def look(request: LookRequest, fetch: Fetch, monotonic: Callable[[], float]) -> Looked:
    """Raises UpdateRefused, OSError."""
    update = UpdateVerifier(Path(request.folder), request.root, fetch, monotonic, not_before=request.not_before)
    update.refresh()
    plan = update.plan(request.cohort)
    wanted = None if plan is None else assigned_bundle(plan, request.device, request.running)
    manifest = None
    if wanted is not None and wanted not in request.known:
        manifest = update.manifest(wanted, request.daemon_version)
    return Looked(plan, wanted, manifest)
