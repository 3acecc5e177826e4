"""Who asks, once it is known."""

from __future__ import annotations

from typing import Literal

import msgspec

from router.errors import PermissionDenied

Scope = Literal["chat", "jobs", "admin"]
SCOPES: tuple[Scope, ...] = ("chat", "jobs", "admin")
DEFAULT_TENANT = "default"
"""Of static tokens, and of everyone on a loopback gateway without tokens."""


class Principal(msgspec.Struct, frozen=True):
    """A device of a tenant. What it owns (a job, a result) is its tenant's and its own: compare `owner`."""

    tenant: str
    device: str
    scopes: frozenset[str]
    token_id: str = ""  # a signed token's `jti`; "" for a static one

    @property
    def owner(self) -> str:
        return f"{self.tenant}/{self.device}"

    def require(self, scope: Scope) -> None:
        """Raises PermissionDenied."""
        if scope not in self.scopes:
            raise PermissionDenied(f"This token may not do this: it lacks the scope `{scope}`.")


ANYONE = Principal(DEFAULT_TENANT, "", frozenset(SCOPES))
"""Where no token is asked for, which only a gateway on loopback may do."""
