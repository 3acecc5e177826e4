"""The gateway's configuration as frozen structs. `meanings` explains each key, `loader` reads and checks the file."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..accounts.identity.config import IdentityConfig
from ..accounts.tenants.config import TenantsConfig
from ..admission.config import AdmissionConfig, AdmissionSettings
from ..balancing.config import LoadBalancing, LoadBalancingConfig
from ..balancing.discovery import EndpointAddress, parse_endpoint_address
from ..cache.config import CacheConfig
from ..degradation.config import DegradationConfig
from ..dispatch.config import HedgeConfig, RetryBudgetConfig
from ..jobs.config import JobsConfig
from ..upstreams.triton.sampling_parameters import GuidedKey

Port = Annotated[int, Meta(ge=0, le=65535)]
Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Pause = Annotated[float, Meta(ge=0)]
DEFAULT_TIER = "assistant-large"
DEFAULT_TRITON = "127.0.0.1:8001"


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: Port = 8090
    token_file: str = ""
    max_body_bytes: Positive = 8 * 1024 * 1024
    read_timeout_s: Seconds = 20.0
    drain_s: Pause = 20.0
    default_deadline_s: Seconds = 120.0
    readiness_cache_s: Pause = 5.0
    zone: str = ""


class TierConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model in Triton under the name that callers use."""

    name: Annotated[str, Meta(min_length=1)] = DEFAULT_TIER
    aliases: tuple[str, ...] = ()
    triton: str = DEFAULT_TRITON
    endpoints: tuple[str, ...] = ()
    load_balancing: LoadBalancing = "least_loaded"
    model: str = ""
    artifact: str = ""
    template_file: str = ""
    special_tokens: tuple[str, ...] = ()
    bos: str = ""
    eos: str = ""
    context_tokens: Count = 0
    max_tokens: Count = 0
    concurrency: Positive = 16
    min_concurrency: Count = 1
    ttft_objective_s: Seconds = 2.0
    max_queued: Count = 64
    admission: AdmissionConfig = AdmissionConfig()
    max_attempts: Positive = 3
    retry_budget: RetryBudgetConfig = RetryBudgetConfig()
    hedge: HedgeConfig = HedgeConfig()
    call_grammar: bool = True
    guided_key: GuidedKey = "guided_decoding"

    @property
    def admission_settings(self) -> AdmissionSettings:
        return AdmissionSettings(
            permits=self.concurrency,
            min_permits=self.min_concurrency,
            max_queued=self.max_queued,
            ttft_objective_s=self.ttft_objective_s,
            config=self.admission,
        )

    @property
    def endpoint_addresses(self) -> tuple[EndpointAddress, ...]:
        """Raises ConfigError."""
        return tuple(parse_endpoint_address(text) for text in self.endpoints or (self.triton,))


class TracingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    endpoint: str = ""
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    server: ServerConfig = ServerConfig()
    tiers: Annotated[tuple[TierConfig, ...], Meta(min_length=1)] = (TierConfig(),)
    load_balancing: LoadBalancingConfig = LoadBalancingConfig()
    degradation: DegradationConfig = DegradationConfig()
    model_dirs: tuple[str, ...] = ()
    redis: str = ""
    identity: IdentityConfig = IdentityConfig()
    tenants: TenantsConfig = TenantsConfig()
    jobs: JobsConfig = JobsConfig()
    cache: CacheConfig = CacheConfig()
    tracing: TracingConfig = TracingConfig()
    audit_file: str = ""
    log: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
