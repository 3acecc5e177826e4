"""Whose data is erased, and the receipt of it, signed with an Ed25519 key of `causeway-cloud keys new`."""

from __future__ import annotations

import hashlib

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from router.errors import ConfigError

from ..accounts.identity.key_set import Jwks, parse_keys, public_jwk
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


_ALGORITHM = "EdDSA"
_TYPE = "causeway-erasure"  # no token has it


class Remainder(msgspec.Struct, frozen=True):
    """What is not erased."""

    what: str
    why: str


class Receipt(msgspec.Struct, frozen=True):
    """What was erased. Times are UTC."""

    subject: ErasureSubject
    started: str
    finished: str
    resumed: bool  # an earlier run was interrupted; the counts are of all
    erased: dict[str, int]  # by kind
    left: list[Remainder]


class _SignedReceipt(msgspec.Struct, frozen=True):
    receipt: Receipt
    jws: str  # the same receipt, signed: RFC 7515, compact


def sign(receipt: Receipt, key: Ed25519PrivateKey) -> bytes:
    """Return the signed receipt as JSON."""
    headers = {"kid": public_jwk(key.public_key()).kid, "typ": _TYPE}
    jws = jwt.PyJWS().encode(msgspec.json.encode(receipt), key, _ALGORITHM, headers)
    return msgspec.json.format(msgspec.json.encode(_SignedReceipt(receipt, jws))) + b"\n"


def verify(data: bytes, keys: Jwks) -> Receipt:
    """Return the receipt if one of `keys` has signed it and it was not changed. Raises ConfigError."""
    try:
        signed = msgspec.json.decode(data, type=_SignedReceipt)
        header = jwt.get_unverified_header(signed.jws)
        key = parse_keys(keys, "the key set").get(str(header.get("kid")))
        if key is None or header.get("typ") != _TYPE:
            raise ConfigError(f"no key of the set has signed this receipt (key {header.get('kid')})")
        payload = jwt.PyJWS().decode(signed.jws, key, [_ALGORITHM])
        receipt = msgspec.json.decode(payload, type=Receipt)
    except (jwt.InvalidTokenError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"not a receipt, or a changed one: {error}") from error
    if receipt != signed.receipt:
        raise ConfigError("the receipt was changed: its signature is of another one")
    return receipt
