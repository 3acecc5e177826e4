"""Identity, tenants, ledger and audit log of one process."""

from __future__ import annotations

from contextlib import suppress

import anyio
import msgspec
import redis.asyncio
from anyio import to_thread
from anyio.abc import TaskGroup
from redis.exceptions import RedisError

from causeway_server.router.serving.issuers.tokens import IssuerTokens
from causeway_server.router.serving.metrics import Sample

from ..core.principal import Principal
from ..redis.connect import EvictionCheck
from ..redis.keys import ensure_accounts_layout
from .audit import AuditLog
from .identity.api_keys import ApiKeys
from .identity.authenticator import Authenticator
from .identity.fleet import FleetTrust
from .identity.revocation import RevocationList
from .identity.token_verifier import KeySet
from .ledger import Ledger
from .tenants.rate_limiter import TenantRateLimiter

_PREPARE_S = 3.0
_FLUSH_S = 3.0


class Accounts(msgspec.Struct, frozen=True):
    """Accounts of a process: call `prepare`, `start` and `close` in this order."""

    authenticator: Authenticator
    operators: Authenticator  # of the operators' address
    ledger: Ledger
    limiter: TenantRateLimiter
    audit: AuditLog
    revocations: RevocationList
    redis: redis.asyncio.Redis | None
    eviction: EvictionCheck
    keys: KeySet | None = None  # None: no signed tokens are accepted
    fleet: FleetTrust | None = None
    issuers: IssuerTokens[Principal] | None = None
    api_keys: ApiKeys | None = None

    @property
    def not_ready(self) -> str:
        """Reason why callers cannot be authenticated and this process is not ready; "" if they can."""
        signed = self.keys is not None or self.issuers is not None or self.api_keys is not None
        if signed and not self.revocations.has_copy:
            return "This gateway has not read the list of revoked tokens yet, so signed tokens are refused."
        return ""

    @property
    def problems(self) -> tuple[str, ...]:
        """Problems that an operator has to fix."""
        return tuple(problem for problem in (self.not_ready, self.eviction.fault) if problem)

    def samples(self) -> tuple[Sample, ...]:
        """Return the samples of accounts: requests decided without Redis, lost records, stale copies."""
        counters = (
            ("causeway_gateway_local_rate_checks", self.limiter.local_checks),
            ("causeway_gateway_stale_revocation_accepts", self.revocations.stale_accepts),
            ("causeway_gateway_revocations_restored", self.revocations.restored),
            ("causeway_gateway_usage_records_lost", self.ledger.usage.lost),
            ("causeway_gateway_audit_records_lost", self.audit.lost),
        )
        states = (
            ("causeway_gateway_redis_evicts", self.eviction.fault),
            ("causeway_gateway_key_file_stale", self.keys is not None and self.keys.last_error),
            ("causeway_gateway_fleet_unreachable", self.fleet is not None and self.fleet.last_error),
        )
        return (
            *(Sample(name, value, kind="counter") for name, value in counters),
            *(Sample(name, float(bool(fault))) for name, fault in states),
            *(
                Sample("causeway_gateway_issuer_unreachable", float(bool(fault)), (("issuer", name),))
                for name, fault in (() if self.issuers is None else self.issuers.faults.items())
            ),
        )

    async def prepare(self) -> None:
        """Read keys and revocations before the first request, in 3 s. Raises ConfigError for another layout."""
        if self.fleet is not None:
            with anyio.move_on_after(_PREPARE_S):
                await self.fleet.refresh()
        with anyio.move_on_after(_PREPARE_S):
            if self.redis is not None:
                with suppress(RedisError, OSError):
                    await ensure_accounts_layout(self.redis)
            await self.revocations.refresh()
            if self.api_keys is not None:
                await self.api_keys.refresh()
            await self.eviction.check()

    def start(self, tasks: TaskGroup) -> None:
        """Start the audit thread, and the background tasks in `tasks`."""
        self.audit.start()
        tasks.start_soon(self.revocations.watch)
        tasks.start_soon(self.ledger.watch)
        tasks.start_soon(self.eviction.watch)
        if self.fleet is not None:
            tasks.start_soon(self.fleet.watch)
        if self.issuers is not None:
            self.issuers.start(tasks)
        if self.api_keys is not None:
            tasks.start_soon(self.api_keys.watch)

    async def close(self) -> None:
        """Write pending usage and audit records, each for at most a few seconds, and close the Redis connections."""
        with anyio.move_on_after(_FLUSH_S):
            await self.ledger.flush()
        await to_thread.run_sync(self.audit.close)
        if self.fleet is not None:
            await self.fleet.close()
        if self.issuers is not None:
            await self.issuers.close()
        if self.redis is not None:
            await self.redis.aclose()
