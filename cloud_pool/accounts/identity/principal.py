"""The authenticated caller."""

from __future__ import annotations

from typing import Literal

import msgspec

from router.errors import PermissionDenied

Scope = Literal["chat", "jobs", "admin"]
SCOPES: tuple[Scope, ...] = ("chat", "jobs", "admin")
DEFAULT_TENANT = "default"
"""Tenant of static tokens, and of every caller of a loopback gateway without tokens."""


class Principal(msgspec.Struct, frozen=True):
    """A device of a tenant. Jobs and results belong to a device: compare `owner`."""

    tenant: str
    device: str
    scopes: frozenset[str]
    token_id: str = ""  # a signed token's `jti`; "" for a static one

    @property
    def owner(self) -> str:
        """`tenant/device`"""
        return f"{self.tenant}/{self.device}"

    def require(self, scope: Scope) -> None:
        """Raises PermissionDenied if the token lacks `scope`."""
        if scope not in self.scopes:
            raise PermissionDenied(f"This token may not do this: it lacks the scope `{scope}`.")


ANYONE = Principal(DEFAULT_TENANT, "", frozenset(SCOPES))
"""Every caller of a gateway without tokens, which may listen on loopback only."""
