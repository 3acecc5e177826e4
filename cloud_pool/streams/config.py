"""The configuration of pipelines. Retries, time limits and draining are those of jobs (`jobs.*`)."""

from __future__ import annotations

import msgspec

from causeway_server.router.config import Pause, Positive, Seconds
from causeway_server.router.serving.issuers.config import ClaimName

from ..admission import Priority
from ..brokers.port import BrokerLogin, TopicAddress

_DAY_S = 86_400.0


class StreamsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `streams`."""

    tenant: ClaimName | None = None
    priority: Priority = "bulk"
    region: str = ""
    in_flight: Positive = 32
    batch: Positive = 16
    batch_wait_s: Pause = 0.005
    max_age_s: Pause = 0.0
    max_attempts: Positive = 5
    effect_ttl_s: Seconds = _DAY_S
    lease_s: Seconds = 10.0
    login: BrokerLogin = BrokerLogin()

    def check(self) -> None:
        """Check the section. Raises ConfigError."""
        self.login.check()


class StreamTopics(msgspec.Struct, frozen=True, kw_only=True):
    """The topics that a pipeline reads and writes."""

    name: str  # name of the pipeline
    source: TopicAddress
    sink: TopicAddress
    dead: TopicAddress
