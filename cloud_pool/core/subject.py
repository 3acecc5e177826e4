"""The subject of an erasure, and the marks by which data without a name is found."""

from __future__ import annotations

import hashlib

import msgspec

from causeway_server.router.errors import ConfigError


class ErasureSubject(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tenant, or one of its devices or users. A user is the value of OpenAI's `user` field in requests."""

    tenant: str
    device: str = ""
    user: str = ""

    @classmethod
    def parse(cls, tenant: str | None, device: str | None, user: str | None) -> ErasureSubject:
        """Return the subject of the only option that is set: `T`, `T/DEVICE` or `T/USER`. Raises ConfigError."""
        if sum(each is not None for each in (tenant, device, user)) != 1:
            raise ConfigError("Give exactly one of --tenant, --device and --user.")
        if tenant is not None:
            if not tenant or "/" in tenant:
                raise ConfigError(
                    f"{tenant!r} is not a valid tenant name: a name is not empty and has no `/`.", where="--tenant"
                )
            return cls(tenant)
        option, text = ("--device", device) if device is not None else ("--user", user)
        of, _, name = str(text).partition("/")
        if not of or not name:
            raise ConfigError(f"Write the tenant before the name, as acme/{name or of or 'kiosk-17'}.", where=option)
        return cls(of, device=name) if device is not None else cls(of, user=name)

    @property
    def name(self) -> str:
        """Human-readable name, such as `device acme/kiosk-17`."""
        kind = "device " if self.device else "user " if self.user else "tenant "
        return kind + "/".join(filter(None, (self.tenant, self.device, self.user)))

    @property
    def digest(self) -> str:
        """Digest that identifies the subject in Redis without naming it."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:24]

    def owns(self, owner: str) -> bool:
        """Return whether everything of `owner` (tenant/device) belongs to the subject; always False for a user."""
        tenant, _, device = owner.partition("/")
        return tenant == self.tenant and not self.user and self.device in ("", device)


def marks_of(tenant: str, client: str, user: str | None) -> str:
    """Return the digests of a request's subjects, separated by spaces. `client`: device, or owner (tenant/device)."""
    device = client.removeprefix(f"{tenant}/")
    subjects = [ErasureSubject(tenant), ErasureSubject(tenant, device=device), ErasureSubject(tenant, user=user or "")]
    return " ".join(dict.fromkeys(subject.digest for subject in subjects))
