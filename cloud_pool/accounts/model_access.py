"""Which models a caller may use: those on its tenant's list and on its token's, where these exist. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from router.errors import ModelNotAllowed, ModelNotFound

from ..core.principal import Principal
from ..tiers.tier import Tier
from .tenants.config import TenantLimits

AllowedTiers = frozenset[str] | None
"""Names of tiers, without aliases; None: all."""


def allowed_tiers(tiers: Mapping[str, Tier], principal: Principal, limits: TenantLimits) -> AllowedTiers:
    """Return the tiers that a caller may use. `tiers` is by name and alias, and so are both lists."""
    tenants, tokens = limits.models, principal.grants.models
    if not tenants and tokens is None:
        return None
    lists = [{tiers[name].name for name in names if name in tiers} for names in (tenants, tokens) if names]
    return frozenset(set.intersection(*lists))


def usable(tiers: Mapping[str, Tier], allowed: AllowedTiers) -> Mapping[str, Tier]:
    """Return the allowed ones of `tiers`, by name and alias."""
    return tiers if allowed is None else {name: tier for name, tier in tiers.items() if tier.name in allowed}


def find_tier(tiers: Mapping[str, Tier], name: str, allowed: AllowedTiers = None) -> Tier:
    """Return the tier of a model's name or alias.

    Raises:
        ModelNotFound: there is no such model (404)
        ModelNotAllowed: the caller may not use it (403)
    """
    tier = tiers.get(name)
    if tier is not None and (allowed is None or tier.name in allowed):
        return tier
    known = ", ".join(name for name, one in usable(tiers, allowed).items() if one.paths) or "none"
    if tier is None:
        raise ModelNotFound(f"The model {name[:64]!r} is not a tier of this gateway. Known: {known}.", param="model")
    raise ModelNotAllowed(
        f"You may not use the model {name[:64]!r}: your tenant or your token allows only {known}.", param="model"
    )
