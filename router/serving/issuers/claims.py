"""The claims of a token whose signature was verified. Pure. It is refused for, in this order:

1. another issuer or audience
2. times that do not hold; `iat` must be there, so that a clock in the past refuses every token
3. proof of possession (`cnf`), which a bearer token does not have
4. a tenant that is not configured for its issuer: that is 403
5. claims that are malformed
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from ...errors import AuthenticationFailed, PermissionDenied
from ...jobs.submission import RANK
from ...types import Priority
from .config import CLAIM_NAME, IssuerConfig

_NAME: Final = re.compile(CLAIM_NAME)
_UNNAMED: Final = re.compile(r"[^A-Za-z0-9._-]+")
_SCOPES: Final = ("chat", "jobs")  # of a token whose issuer tells none


class TokenIdentity(msgspec.Struct, frozen=True):
    """Identity of a verified token. `device`: name of the subject, with a digest of subject and issuer, so that no
    device and no other issuer's subject has it.
    """

    tenant: str
    device: str
    scopes: frozenset[str]  # all its scopes, known or not
    regions: tuple[str, ...] | None  # regions to which its requests are bound; None: it is not bound
    priority: Priority
    token_id: str  # its `jti`, or a digest of the token
    issued: float  # Unix seconds


def check_claims(
    claims: Mapping[str, Any], issuer: str, audience: str, now: float, skew_s: float
) -> tuple[float, float]:
    """Check the registered claims, and return when the token begins and ends (Unix s). Raises AuthenticationFailed."""
    if claims.get("iss") != issuer:  # (1)
        raise AuthenticationFailed("The token is from an issuer that this server does not accept.")
    if audience not in _texts(claims.get("aud")):
        raise AuthenticationFailed(f"The token is for another service than {audience!r}.")
    issued, ends = _number(claims, "iat"), _number(claims, "exp")
    begins = max(issued, _number(claims, "nbf")) if "nbf" in claims else issued
    check_times(begins, ends, now, skew_s)  # (2)
    if "cnf" in claims:  # (3)
        raise AuthenticationFailed("The token is bound to a key of its client. Ask the issuer for a bearer token.")
    if not isinstance(claims.get("sub"), str) or not claims["sub"]:  # (5)
        raise _malformed("sub")
    return begins, ends


def check_times(begins: float, ends: float, now: float, skew_s: float) -> None:
    """Check the times of a token (2), all in Unix seconds. Raises AuthenticationFailed."""
    if not now < ends + skew_s:
        raise AuthenticationFailed("The token has expired.")
    if not begins <= now + skew_s:
        clock = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")
        raise AuthenticationFailed(f"The token is not valid yet: the clock of this server is at {clock}.")


def identity_of(claims: Mapping[str, Any], config: IssuerConfig, digest: str) -> TokenIdentity:
    """Return what checked claims say. `digest`: that of the token. Raises AuthenticationFailed or PermissionDenied."""
    names, token_id = config.claims, claims.get("jti")
    tenant = _claim(claims, names.tenant) if names.tenant else config.tenants[0]
    if tenant not in config.tenants:  # (4)
        told = f"the tenant {tenant[:64]!r}" if isinstance(tenant, str) else f"no tenant in `{names.tenant}`"
        raise PermissionDenied(
            f"The token names {told}, but this issuer's tokens are accepted for {', '.join(config.tenants)} only "
            "(`identity.issuers[].tenants`)."
        )
    regions = _claim(claims, names.regions)
    found = None if regions is None else _texts(regions)
    if found is not None and not (found and all(map(_NAME.fullmatch, found))):  # (5)
        raise _malformed(names.regions)
    priority: Any = _claim(claims, names.priority) or "standard"
    if not isinstance(priority, str) or priority not in RANK:
        raise _malformed(names.priority)
    return TokenIdentity(
        tenant=tenant,
        device=_subject_name(claims["sub"], config.issuer),
        scopes=frozenset(_texts(_claim(claims, names.scopes)) if names.scopes else _SCOPES),
        regions=found,
        priority=priority,
        token_id=token_id if isinstance(token_id, str) and _NAME.fullmatch(token_id) else digest,
        issued=_number(claims, "iat"),
    )


def _subject_name(subject: str, issuer: str) -> str:
    digest = hashlib.sha256(f"{issuer}\n{subject}".encode(errors="replace")).hexdigest()
    text = _UNNAMED.sub("-", subject).strip("._-")[:40] or "subject"
    return f"{text}.{digest[:20]}"


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """Return a claim by name or JSON Pointer (RFC 6901); None if there is none."""
    if not name.startswith("/"):
        return claims.get(name)
    value: Any = claims
    for step in name[1:].split("/"):
        key = step.replace("~1", "/").replace("~0", "~")
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _texts(value: Any) -> tuple[str, ...]:
    """Return the texts of a claim: a list, or separated by spaces."""
    if isinstance(value, str):
        return tuple(value.split())
    return tuple(each for each in value if isinstance(each, str)) if isinstance(value, list) else ()


def _number(claims: Mapping[str, Any], name: str) -> float:
    value = claims.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _malformed(name)
    return float(value)


def _malformed(name: str) -> AuthenticationFailed:
    return AuthenticationFailed(f"The token's claim `{name}` is missing or malformed.")
