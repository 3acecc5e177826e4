"""The configuration of pipelines. Retries, time limits and draining are those of jobs (`jobs.*`)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from causeway_server.router.config import Pause, Positive, Seconds, doc
from causeway_server.router.serving.issuers.config import ClaimName

from ..admission import Priority
from ..brokers.port import BrokerLogin, TopicAddress

_DAY_S = 86_400.0


class StreamsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `streams`."""

    tenant: Annotated[
        ClaimName | None,
        doc("Tenant of messages without a token. Default: if the gateways require tokens, such messages are refused."),
    ] = None
    priority: Annotated[
        Priority, doc("Highest priority of a message without a token: `interactive`, `standard` or `bulk`.")
    ] = "bulk"
    region: Annotated[
        str, doc("Region of the broker. Messages that are bound to other regions are answered with an error.")
    ] = ""
    in_flight: Annotated[Positive, doc("Maximum messages that one process handles at once.")] = 32
    batch: Annotated[Positive, doc("Maximum messages that start together.")] = 16
    batch_wait_s: Annotated[Pause, doc("Maximum time that the first message of a batch waits for more.")] = 0.005
    max_age_s: Annotated[Pause, doc("Age at which a message expires, by its `time`. 0: only `expirytime` counts.")] = (
        0.0
    )
    max_attempts: Annotated[
        Positive, doc("Number of deliveries and failed runs after which a message becomes a dead letter.")
    ] = 5
    effect_ttl_s: Annotated[
        Seconds, doc("Time for which handled messages are remembered, so that duplicates are skipped.")
    ] = _DAY_S
    lease_s: Annotated[Seconds, doc("Lease of a process. When it expires, a standby takes over.")] = 10.0
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
