"""Which models a caller may use: those on its tenant's list and on its token's, where these exist. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from router.errors import ModelNotAllowed, ModelNotFound

from ..tiers.tier import Tier

AllowedTiers = frozenset[str] | None
"""Names of tiers, without aliases; None: all."""


def allowed_tiers(tiers: Mapping[str, Tier], tenants: Collection[str], tokens: Collection[str] | None) -> AllowedTiers:
    """Return the tiers that a caller may use: those on its tenant's list and on its token's, where these exist.

    Args:
        tiers: by name and alias.
        tenants: names or aliases; none: all.
        tokens: names or aliases; None: all.
    """
    lists = [names for names in (tenants or None, tokens) if names is not None]
    named = [{tiers[name].name for name in names if name in tiers} for names in lists]
    return frozenset(set.intersection(*named)) if named else None


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
