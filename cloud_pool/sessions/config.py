"""The section `realtime` of the gateway's configuration."""

from __future__ import annotations

from router.serving.config import Positive, SessionConfig


class GatewaySessionConfig(SessionConfig, frozen=True, forbid_unknown_fields=True):
    """Live sessions over WebSocket."""

    # live sessions of this gateway, of one tenant at most half; beyond: 429, unless one that was cut gives way
    max_sessions: Positive = 1024
