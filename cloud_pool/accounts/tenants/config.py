"""Caps, rates, budgets and prices, as the configuration says them."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from router.errors import ConfigError, InvalidRequest
from router.types import Request, Usage

NonNegativeInt = Annotated[int, Meta(ge=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]
MICRO_USD_PER_USD = 1_000_000


class TenantLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """0 is no limit."""

    requests_per_s: NonNegativeFloat = 0.0
    burst: NonNegativeInt = 0  # requests at once after a rest; 0: those of two seconds, one at least
    tokens_per_minute: NonNegativeInt = 0  # prompt and answer together; a minute's worth may be used at once
    max_tokens: NonNegativeInt = 0  # of one answer
    max_body_bytes: NonNegativeInt = 0
    usd_per_day: NonNegativeFloat = 0.0  # UTC days
    weight: Annotated[float, Meta(gt=0)] = 1.0  # its turns while tenants wait for the same tier, against theirs

    @property
    def capacity(self) -> float:
        """Of the bucket of requests."""
        return float(self.burst or max(1.0, 2 * self.requests_per_s))

    def body_bytes(self, most: int) -> int:
        """What a body may have where the gateway takes `most`."""
        return min(most, self.max_body_bytes or most)

    def check_request(self, request: Request) -> None:
        """Raises InvalidRequest."""
        if self.max_tokens and (request.max_tokens or 0) > self.max_tokens:
            raise InvalidRequest(f"your limit is {self.max_tokens} tokens an answer", param=request.limit_name)

    def bounded(self, request: Request) -> Request:
        """A request that names no length gets the longest that its tenant may have."""
        if self.max_tokens and request.max_tokens is None:
            return msgspec.structs.replace(request, max_tokens=self.max_tokens)
        return request


class TenantConfig(TenantLimits, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]


class Price(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Of a tier, in USD."""

    tier: str
    per_1k_prompt: NonNegativeFloat = 0.0
    per_1k_completion: NonNegativeFloat = 0.0

    def micro_usd(self, usage: Usage) -> int:
        usd = (usage.prompt_tokens * self.per_1k_prompt + usage.completion_tokens * self.per_1k_completion) / 1000.0
        return round(usd * MICRO_USD_PER_USD)


class TenantsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    default: TenantLimits = TenantLimits()  # of a tenant that is not named
    overrides: tuple[TenantConfig, ...] = ()
    prices: tuple[Price, ...] = ()
    local_share: Annotated[float, Meta(gt=0, le=1)] = 0.5  # of each rate, for this gateway alone, while Redis is away
    redis_timeout_s: Annotated[float, Meta(gt=0)] = 0.1  # then the share applies
    redis_retry_after_s: Annotated[float, Meta(gt=0)] = 1.0
    usage_flush_s: Annotated[float, Meta(gt=0)] = 1.0  # how often what was used is written to Redis
    usage_retention_days: Annotated[int, Meta(ge=1)] = 40

    def limits(self, tenant: str) -> TenantLimits:
        return next((each for each in self.overrides if each.name == tenant), self.default)

    def check(self) -> None:
        """Raises ConfigError."""
        for where, names in (
            ("overrides", [t.name for t in self.overrides]),
            ("prices", [p.tier for p in self.prices]),
        ):
            for at, name in enumerate(names):
                if name in names[:at]:
                    raise ConfigError(f"{name!r} is there twice", where=f"tenants.{where}[{at}]")
