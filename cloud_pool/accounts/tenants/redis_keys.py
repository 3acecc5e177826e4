"""Redis keys of a tenant. They share a hash slot, so that one script can use several."""

from __future__ import annotations

SUBMISSIONS = "/submissions"
"""After a tenant's name, in the name of the bucket of its submissions of jobs, files and batches."""
READS = "/reads"
"""After a tenant's name, in the name of the bucket of its reads of these."""


def requests_key(tenant: str) -> str:
    """Token bucket of requests."""
    return f"causeway:tenant:{{{tenant}}}:requests"


def tokens_key(tenant: str) -> str:
    """Token bucket of tokens."""
    return f"causeway:tenant:{{{tenant}}}:tokens"


def usage_key(tenant: str, day: str) -> str:
    """Usage of a UTC day, as 2026-11-21."""
    return f"causeway:tenant:{{{tenant}}}:usage:{day}"


def reserved_key(tenant: str) -> str:
    """Reservations of the tenant's budget."""
    return f"causeway:tenant:{{{tenant}}}:reserved"


def reservation_ends_key(tenant: str) -> str:
    """When they end."""
    return f"causeway:tenant:{{{tenant}}}:reserved:ends"


def batch_key(tenant: str, batch: str) -> str:
    """Mark of a batch of usage that Redis has added."""
    return f"causeway:tenant:{{{tenant}}}:batch:{batch}"


def charge_key(tenant: str, charge: str) -> str:
    """Mark of a charge that Redis has made: it may be asked for again, because the reply was lost."""
    return f"causeway:tenant:{{{tenant}}}:charge:{charge}"


GATEWAYS_KEY = "causeway:tenants:gateways"
"""The gateways that share the tenants' limits."""
