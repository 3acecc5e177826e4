"""The receipt of an erasure, signed with an Ed25519 key as those of tokens (`causeway-cloud keys new`)."""

from __future__ import annotations

import jwt
import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from router.errors import ConfigError

from ..accounts.identity.key_set import Jwks, parse_keys, public_jwk
from .subject import ErasureSubject

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
