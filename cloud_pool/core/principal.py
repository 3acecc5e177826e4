"""The authenticated caller and the grants of its token."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from causeway_server.router.errors import PermissionDenied
from causeway_server.router.policy.signals import modalities
from causeway_server.router.serving.issuers.config import ClaimName
from causeway_server.router.types import Request

from ..admission import RANK, Priority

Scope = Literal["chat", "jobs", "keys", "admin"]
SCOPES: tuple[Scope, ...] = ("chat", "jobs", "keys", "admin")
Modality = Literal["text", "image", "audio", "file"]
MODALITIES: tuple[Modality, ...] = ("text", "image", "audio", "file")
ModelName = Annotated[str, Meta(min_length=1, max_length=128)]
DEFAULT_TENANT = "default"
"""The tenant of static tokens, and of all callers of a loopback gateway without tokens."""


class Grants(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The grants of a token, besides its scopes. Headers can ask for less than these, never for more."""

    priority: Priority = "standard"  # highest priority that a request may have
    critical: bool = False  # whether a request may be critical
    models: Annotated[tuple[ModelName, ...], Meta(min_length=1)] | None = None  # models by name or alias; None for all
    # kinds of content in messages; None for all
    modalities: Annotated[tuple[Modality, ...], Meta(min_length=1)] | None = None
    regions: Annotated[tuple[ClaimName, ...], Meta(min_length=1)] | None = None  # regions of gateways; None for all

    def bounded_priority(self, wanted: Priority) -> Priority:
        """Return `wanted`, or the highest granted priority if that is lower."""
        return wanted if RANK[wanted] >= RANK[self.priority] else self.priority

    def require_modalities(self, request: Request) -> None:
        """Raise PermissionDenied if the request has content of a kind that is not granted."""
        if self.modalities is None:
            return
        for modality in modalities(request):
            if modality not in self.modalities:
                allowed = ", ".join(self.modalities)
                raise PermissionDenied(
                    f"This token may not send {modality}. It allows only {allowed}.", param="messages"
                )

    def require_region(self, region: str) -> None:
        """Raise PermissionDenied if the token is for other regions than `region` ("" if there is none)."""
        if self.regions is not None and region not in self.regions:
            here = f"this gateway is in {region}" if region else "this gateway has no `identity.region`"
            raise PermissionDenied(f"This token is valid only in the regions {', '.join(self.regions)}, but {here}.")


NO_GRANTS = Grants()


class Principal(msgspec.Struct, frozen=True):
    """A device of a tenant. Jobs and results belong to a device, which `owner` names."""

    tenant: str
    device: str
    scopes: frozenset[str]
    grants: Grants = NO_GRANTS
    token_id: str = ""  # `jti` of a signed token, or id of an API key; "" for a static token
    issued: float = 0.0  # `iat` of a signed token, Unix seconds
    usd_per_day: float = 0.0  # budget of an API key; 0: its tenant's

    @property
    def owner(self) -> str:
        """Owner of jobs and results, as `tenant/device`."""
        return f"{self.tenant}/{self.device}"

    @property
    def caller(self) -> str:
        """The holder of a share in this gateway's bounded pools: the tenant, or for a static token the device."""
        return f"{self.tenant}/{self.device}" if self.tenant == DEFAULT_TENANT else self.tenant

    def require(self, scope: Scope) -> None:
        """Raise PermissionDenied if the token lacks `scope`."""
        if scope not in self.scopes and scope == "jobs" and self.usd_per_day:
            raise PermissionDenied(
                "An API key with a budget (`usd_per_day`) cannot submit jobs, because a job runs later than the "
                "request that submits it."
            )
        if scope not in self.scopes:
            raise PermissionDenied(f"This token lacks the scope `{scope}`, which the request needs.")


ANYONE = Principal(DEFAULT_TENANT, "", frozenset(SCOPES), Grants(priority="interactive", critical=True))
"""The caller of a gateway without tokens, which listens only on loopback: its headers are granted."""
