"""The reasons for which a box refuses an update. Each has a code of its own, which the box reports."""

from __future__ import annotations

from ..errors import CausewayError


class UpdateRefused(CausewayError):
    """An update from the fleet is refused; the box keeps what it runs."""

    code = "update_refused"


# --- one bundle ------------------------------------------------------------------------------------------------------


class BundleInvalid(UpdateRefused):
    """The manifest or the rollout plan is malformed, or sets a key that a fleet may not set."""

    code = "bundle_invalid"


class BundleAltered(UpdateRefused):
    """The content differs from the hash or the length that was signed."""

    code = "bundle_altered"


class DaemonTooOld(UpdateRefused):
    """The bundle needs a newer daemon."""

    code = "daemon_too_old"
