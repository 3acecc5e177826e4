"""Configuration of tenants: caps, rates, budgets and prices."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated

import msgspec
from msgspec import Meta

from causeway_server.router.config import Positive, Seconds
from causeway_server.router.errors import ConfigError, InvalidRequest, PermissionDenied
from causeway_server.router.prices import FREE, Price
from causeway_server.router.residency import permits, region_tags, regions_of
from causeway_server.router.types import Request, folded_tags

from ...tiers.config import too_many_sequences

NonNegativeInt = Annotated[int, Meta(ge=0)]
NonNegativeFloat = Annotated[float, Meta(ge=0)]


class TenantLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of a tenant; 0 is unlimited."""

    requests_per_s: NonNegativeFloat = 0.0
    burst: NonNegativeInt = 0
    max_sequences: NonNegativeInt = 0
    submissions_per_s: NonNegativeFloat = 50.0
    reads_per_s: NonNegativeFloat = 500.0
    tokens_per_minute: NonNegativeInt = 0
    max_tokens: NonNegativeInt = 0
    max_body_bytes: NonNegativeInt = 0
    usd_per_day: NonNegativeFloat = 0.0
    max_jobs: NonNegativeInt = 0
    weight: Annotated[float, Meta(gt=0)] = 1.0
    models: tuple[str, ...] = ()

    regions: tuple[str, ...] = ()

    @property
    def request_capacity(self) -> float:
        return float(self.burst or max(1.0, 2 * self.requests_per_s))

    @property
    def of_submissions(self) -> TenantLimits:
        """Limits for submissions of jobs: the lower of two rates, independent of what the jobs use when they run."""
        if self.requests_per_s and (not self.submissions_per_s or self.requests_per_s <= self.submissions_per_s):
            return TenantLimits(requests_per_s=self.requests_per_s, burst=self.burst)
        return TenantLimits(requests_per_s=self.submissions_per_s)

    @property
    def of_reads(self) -> TenantLimits:
        """Limits for reads of a tenant's jobs, files and batches."""
        return TenantLimits(requests_per_s=self.reads_per_s)

    def body_bytes(self, gateway_max: int) -> int:
        """Return the largest body that tenant and gateway both accept."""
        return min(gateway_max, self.max_body_bytes or gateway_max)

    def check_request(self, request: Request) -> None:
        """Raise InvalidRequest for a long answer or many sequences, PermissionDenied if bound to its device."""
        if request.hints.prefer == "only_on_device":
            message = "The request, or a compaction item in it, is bound to its device. A gateway does not answer it."
            raise PermissionDenied(message, param="input")
        if self.max_tokens and (request.max_tokens or 0) > self.max_tokens:
            raise InvalidRequest(f"Your limit is {self.max_tokens} output tokens per answer.", param=request.limit_name)
        if self.max_sequences or self.requests_per_s:
            self._check_sequences(request)

    def check_regions(self, region: str, models: Mapping[str, str], where: str) -> None:
        """Raise ConfigError if a gateway in `region` could answer no request of the tenant. One in another region is
        meant to refuse them.
        """
        regions = regions_of(region_tags(self.regions))
        if not region:
            raise ConfigError("Set `identity.region`: a gateway without a region is outside every region.", where=where)
        usable = self.models or tuple(models)
        if permits(regions, region) and not any(permits(regions, models[name]) for name in usable if name in models):
            raise ConfigError(
                "No tier that the tenant may use is in the tenant's regions. Set `tiers.region`.", where=where
            )

    def _check_sequences(self, request: Request) -> None:
        if self.max_sequences and request.sequences > self.max_sequences:
            raise too_many_sequences(
                request, f"your limit is {self.max_sequences} sequences in one request (max_sequences)"
            )
        if self.requests_per_s and request.sequences > self.request_capacity:
            raise too_many_sequences(
                request, f"your limit is {self.request_capacity:g} sequences at the same time (burst)"
            )

    def bounded(self, request: Request) -> Request:
        """Return the request with its tenant's `max_tokens` if it sets none, bound to its tenant's regions."""
        if self.regions:
            hints = request.hints
            hints = msgspec.structs.replace(hints, tags=folded_tags((*hints.tags, *region_tags(self.regions))))
            request = msgspec.structs.replace(request, hints=hints)
        if self.max_tokens and request.max_tokens is None:
            return msgspec.structs.replace(request, max_tokens=self.max_tokens)
        return request


class TenantConfig(TenantLimits, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits of a named tenant."""

    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]


class TierPrice(Price, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Price of a tier, in USD."""

    tier: str


class TenantsConfig(msgspec.Struct, frozen=True, dict=True, forbid_unknown_fields=True):
    """Section `tenants`."""

    default: TenantLimits = TenantLimits()  # for tenants without an entry in `overrides`
    overrides: tuple[TenantConfig, ...] = ()
    prices: tuple[TierPrice, ...] = ()
    local_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    redis_timeout_s: Seconds = 0.1
    redis_retry_after_s: Seconds = 1.0
    usage_flush_s: Seconds = 1.0
    usage_retention_days: Positive = 40

    def limits(self, tenant: str) -> TenantLimits:
        return self._by_name.get(tenant, self.default)

    @cached_property
    def _by_name(self) -> Mapping[str, TenantLimits]:
        """Limits by tenant, looked up several times a request."""
        return {each.name: each for each in self.overrides}

    def price(self, tier: str) -> Price:
        """Return the price of a tier, 0 if none is configured."""
        return next((each for each in self.prices if each.tier == tier), FREE) if self.prices else FREE

    def check(self, models: Mapping[str, str], region: str) -> None:
        """Raise ConfigError for doubled or unknown names, prices without numbers, or regions never served here."""
        tenants, tiers = [each.name for each in self.overrides], [each.tier for each in self.prices]
        for key, names in (("overrides", tenants), ("prices", tiers)):
            for index, name in enumerate(names):
                if name in names[:index]:
                    raise ConfigError(f"{name!r} is listed twice.", where=f"tenants.{key}[{index}]")
        for index, price in enumerate(self.prices):
            if price.problem:
                raise ConfigError(f"The price {price.problem}.", where=f"tenants.prices[{index}]")
        limits = {"default": self.default, **{f"overrides[{at}]": each for at, each in enumerate(self.overrides)}}
        for key, each in limits.items():
            for index, name in enumerate(each.models):
                if name not in models:
                    raise ConfigError(f"There is no tier {name!r}.", where=f"tenants.{key}.models[{index}]")
            if each.regions:
                each.check_regions(region, models, f"tenants.{key}.regions")
