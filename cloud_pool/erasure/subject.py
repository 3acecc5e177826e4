"""Whose data is erased."""

from __future__ import annotations

import hashlib

import msgspec

from router.errors import ConfigError

from ..storage.record import user_digest


class ErasureSubject(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tenant, or one device or one user of it. A user is what requests name in OpenAI's `user`."""

    tenant: str
    device: str = ""
    user: str = ""

    @classmethod
    def parse(cls, tenant: str | None, device: str | None, user: str | None) -> ErasureSubject:
        """Return the only one that is given: `T`, `T/DEVICE` or `T/USER`. Raises ConfigError."""
        if sum(each is not None for each in (tenant, device, user)) != 1:
            raise ConfigError("give exactly one of --tenant, --device and --user")
        if tenant is not None:
            if not tenant or "/" in tenant:
                raise ConfigError(f"{tenant!r} is not the name of a tenant", where="--tenant")
            return cls(tenant)
        option, text = ("--device", device) if device is not None else ("--user", user)
        of, _, name = str(text).partition("/")
        if not of or not name:
            raise ConfigError(f"write the tenant before it, as acme/{name or of or 'kiosk-17'}", where=option)
        return cls(of, device=name) if device is not None else cls(of, user=name)

    @property
    def name(self) -> str:
        """As people read it."""
        kind = "device " if self.device else "user " if self.user else "tenant "
        return kind + "/".join(filter(None, (self.tenant, self.device, self.user)))

    @property
    def digest(self) -> str:
        """Identifies it in Redis without naming it."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:24]

    @property
    def user_digest(self) -> str:
        """As in the records of jobs; "" unless it is a user."""
        return user_digest(self.tenant, self.user)

    def owns(self, owner: str) -> bool:
        """Whether what belongs to `owner` (tenant/device) is its own as a whole; of a user nothing is."""
        tenant, _, device = owner.partition("/")
        return tenant == self.tenant and not self.user and self.device in ("", device)
