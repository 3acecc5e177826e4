"""Configuration of pipelines. Retries, the time of an attempt and draining are those of jobs (`jobs.*`)."""

from __future__ import annotations

import msgspec

from causeway_server.router.config import Pause, Positive, Seconds

from ..admission import Priority
from ..brokers.port import BrokerLogin, TopicAddress
from ..core.principal import ClaimName

_DAY_S = 86_400.0


class StreamsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `streams`."""

    tenant: ClaimName | None = None  # of messages without a token; without it they need one, if the gateways need one
    priority: Priority = "bulk"  # the highest that a message without a token may ask for
    in_flight: Positive = 32  # messages that one process works on at once
    batch: Positive = 16  # messages that begin together, at most
    batch_wait_s: Pause = 0.005  # how long the first message of a batch waits for more
    max_age_s: Pause = 0.0  # a message that is older, by its `time`, has expired; 0: only `expirytime` counts
    max_attempts: Positive = 5  # deliveries and failed runs; then the message is a dead letter
    effect_ttl_s: Seconds = _DAY_S  # how long a message that comes again is known
    lease_s: Seconds = 10.0  # a process that does not renew its lease for so long is replaced by one that stands by
    login: BrokerLogin = BrokerLogin()

    def check(self) -> None:
        """Raises ConfigError."""
        self.login.check()


class StreamTopics(msgspec.Struct, frozen=True, kw_only=True):
    """What a pipeline reads and writes."""

    name: str  # of the pipeline
    source: TopicAddress
    sink: TopicAddress
    dead: TopicAddress
