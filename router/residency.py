"""Residency: the regions in which the content of a request may be. Pure.

A tag `in-region:NAME`, or `in-region:NAME+NAME` for any of several regions, binds a request. Several such tags narrow
each other. Jobs, batches, files and the items of live sessions keep the tags of their request, and so their regions.
A place without a region is outside every region: what cannot be known to be inside is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final
from urllib.parse import urlsplit

from .errors import OutsideRegion

PREFIX: Final = "in-region:"
MAX_TAG: Final = 64
Regions = frozenset[str] | None
"""The regions that are allowed, in lower case; None: the request is not bound."""


def narrowed(*bindings: Regions) -> Regions:
    """Return the regions that all bindings allow; None if none of them binds."""
    binding = [one for one in bindings if one is not None]
    return frozenset.intersection(*binding) if binding else None


def regions_of(tags: Iterable[str]) -> Regions:
    """Return the regions to which tags bind a request. `tags`: in lower case, as `folded_tags`."""
    bindings = [frozenset(tag[len(PREFIX) :].split("+")) for tag in tags if tag.startswith(PREFIX)]
    return narrowed(*bindings) if bindings else None


def region_tags(regions: Iterable[str] | None) -> tuple[str, ...]:
    """Return the tags that bind a request to regions: one, or none if `regions` is None."""
    return () if regions is None else (PREFIX + "+".join(sorted(region.casefold() for region in regions)),)


def permits(regions: Regions, region: str) -> bool:
    """Return whether content may be in a region. `region`: "" if the place has none."""
    return regions is None or (bool(region) and region.casefold() in regions)


def check_region(regions: Regions, region: str, place: str) -> None:
    """Raise OutsideRegion if content may not be in a place. `place`: its name in the message, such as its key."""
    if regions is not None and not permits(regions, region):
        allowed = ", ".join(sorted(filter(None, regions))) or "no region, as its bindings exclude each other"
        where = f"in {region}" if region else "in no configured region"
        raise OutsideRegion(f"This request is bound to {allowed}, but {place} is {where}.")


def check_webhook_region(regions: Regions, url: str, hosts: Mapping[str, str]) -> None:
    """Raise OutsideRegion if the receiver of a webhook may not know of the job. `hosts`: the regions of receivers."""
    host = (urlsplit(url).hostname or "") if url else ""
    if host:
        check_region(regions, hosts.get(host, ""), f"the receiver {host} of the webhook (jobs.webhooks.regions)")
