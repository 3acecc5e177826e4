"""The parts that the gateway and the worker have in common, built from the configuration."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from pathlib import Path

import redis.asyncio
from anyio.abc import TaskGroup

from .accounts.accounts import Accounts
from .accounts.audit import AuditLog
from .accounts.identity.authenticator import OPERATOR_SCOPES, Authenticator
from .accounts.identity.fleet import FleetTrust
from .accounts.identity.key_set import KeySet
from .accounts.identity.operator_token import local_operator_token
from .accounts.identity.revocation import RevocationList
from .accounts.identity.static_tokens import StaticTokens, load_tokens
from .accounts.identity.token_verifier import TokenVerifier
from .accounts.ledger import Ledger
from .accounts.tenants.accounting import TenantAccounting
from .accounts.tenants.metrics import TenantMetrics
from .accounts.tenants.rate_limiter import TenantRateLimiter
from .accounts.tenants.usage import UsageRecorder
from .cache.shared_cache import SharedCache, read_secret
from .config.schema import Config
from .dispatch.balancing.metrics import EndpointMetrics
from .dispatch.balancing.pools import Pools, TritonClients
from .observability.metrics import Metrics
from .observability.tracing import Tracing
from .redis.config import RedisAddress
from .redis.connect import ConnectionOptions, open_redis
from .redis.eviction import EvictionCheck
from .tiers.tier import Tier
from .upstreams.triton.model_control import default_key_file

_GC_THRESHOLD = 10_000  # allocations between collections of the youngest generation


def build_tracing(config: Config, service: str) -> Tracing | None:
    """Return None without a collector. `service`: the `service.name` of the spans."""
    if not config.tracing.endpoint:
        return None
    # Imported on demand: OpenTelemetry costs a tenth of a second and some megabytes.
    from .observability.otel_tracing import OtelTracing

    return OtelTracing(config.tracing, service)


def build_pools(
    config: Config, tiers: tuple[Tier, ...], metrics: Metrics, tasks: TaskGroup, reloaded: Callable[[str], None]
) -> Pools:
    """Build each tier's endpoints. `reloaded` gets the name of each model that was loaded again."""
    endpoints = EndpointMetrics(metrics.registry)
    key_file = Path(config.triton_key_file) if config.triton_key_file else default_key_file()
    pools = Pools(
        [tier.endpoints for tier in tiers],
        TritonClients(tasks, reloaded, key_file=key_file),
        config.load_balancing,
        zone=config.server.zone,
        ejected=endpoints.ejected,
    )
    endpoints.watch(pools.by_tier)
    return pools


def build_cache(config: Config, tiers: Mapping[str, Tier], metrics: Metrics) -> SharedCache | None:
    """Return None if the cache is disabled. Raises ConfigError."""
    if not config.cache.enabled:
        return None
    secret = read_secret(config.cache)
    return SharedCache(config.cache, config.cache.redis or config.redis, tiers, metrics.registry, secret=secret)


def build_accounts(config: Config, metrics: Metrics, *, is_gateway: bool = True) -> Accounts:
    """Build identity, tenants and audit log. Raises ConfigError.

    Args:
        is_gateway: whether this process takes a share of the tenants' limits while their Redis is away
    """
    tokens = load_tokens(Path(config.server.token_file)) if config.server.token_file else StaticTokens()
    client = open_shared_redis(config.redis) if config.redis else None
    fleet = FleetTrust(config.identity.fleet) if config.identity.fleet.url else None
    key_file = Path(config.identity.key_file) if config.identity.key_file else None
    keys = KeySet(key_file, fleet) if config.identity.signed else None
    verifier = TokenVerifier(config.identity, keys) if keys is not None else None
    revocations = RevocationList(config.identity, client, fleet)
    limiter = TenantRateLimiter(config.tenants, client, is_gateway=is_gateway)
    usage = UsageRecorder(config.tenants, client, wall_clock=limiter.day.unix_time)
    accounting = TenantAccounting(config.tenants, limiter, usage)
    audit = AuditLog(config.audit_file)
    eviction = EvictionCheck(client)
    tenants = TenantMetrics(metrics.registry)
    tenants.watch(
        local_checks=lambda: limiter.local_checks,
        stale_accepts=lambda: revocations.stale_accepts,
        revocations_restored=lambda: revocations.restored,
        usage_lost=lambda: usage.lost,
        redis_evicts=lambda: float(bool(eviction.fault)),
        audit_lost=lambda: audit.lost,
        key_file_stale=lambda: float(keys is not None and bool(keys.last_error)),
        fleet_unreachable=lambda: float(fleet is not None and bool(fleet.last_error)),
    )
    region = config.identity.region
    authenticator = Authenticator(tokens, verifier, revocations, region=region)
    operators = Authenticator(
        _operator_tokens(config),
        verifier if key_file is not None else None,  # the fleet's keys make no operators
        revocations,
        static_scopes=OPERATOR_SCOPES,
        region=region,
    )
    ledger = Ledger(accounting, audit, tenants)
    return Accounts(
        authenticator,
        operators,
        ledger,
        accounting,
        audit,
        revocations,
        client,
        eviction,
        signed=config.identity.signed,
        fleet=fleet,
    )


def _operator_tokens(config: Config) -> StaticTokens:
    """Return the operators' static tokens; a configuration that has none gets one. Raises ConfigError."""
    if config.operator.token_file:
        return load_tokens(Path(config.operator.token_file))
    if config.has_operator_tokens:
        return StaticTokens()
    return local_operator_token(Path(config.state_dir) if config.state_dir else None)


def open_shared_redis(address: RedisAddress) -> redis.asyncio.Redis:
    """Create a client of the gateways' Redis that connects on first use. Raises ConfigError.

    It never retries, because each caller has a timeout of its own; beyond the pool's size, calls wait for a connection.
    """
    return open_redis(address, "redis", ConnectionOptions())


def tune_garbage_collector() -> None:
    """Exclude what exists after the start from collections, and collect young objects less often.

    A collection of all that a gateway imports and builds takes 70 ms, in which no stream goes on and calls with a
    short timeout, such as the shared cache's, fail.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD, 20, 20)
