"""Token of a configured issuer -> identity. A token is refused for, in this order:

1. more than `MAX_TOKEN_BYTES`
2. a header with an extension that must be understood (`crit`), or of another type (RFC 8725, 3.11)
3. no key of its issuer that has signed it, by an algorithm of the key's type; that is 503 while the keys cannot be read
4. its claims (claims.py)

The identity of a verified token is kept by the token's digest until it expires or the keys change.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from anyio.abc import TaskGroup

from ...errors import AuthenticationFailed, IdentityUnavailable
from .claims import TokenIdentity, check_claims, check_times, identity_of
from .config import IssuerConfig
from .issuer import Issuer
from .keys import read_header, read_issuer, verified_claims

MAX_TOKEN_BYTES: Final = 16 * 1024
_MAX_VERIFIED = 10_000
_MAX_REFUSED = 1000
Identity = TypeVar("Identity")


class IssuerTokens(Generic[Identity]):
    """Verifies tokens of the configured issuers. `identify` turns what a token says into the identity to keep, or
    raises CausewayError. `folder` keeps copies of the keys; None: no copies. `skew_s`: accepted clock difference;
    `max_lifetime_s`: a token's longest lifetime. Raises ConfigError if an issuer cannot be used.
    """

    def __init__(
        self,
        issuers: Sequence[IssuerConfig],
        identify: Callable[[TokenIdentity], Identity],
        folder: Path | None = None,
        *,
        skew_s: float = 30.0,
        max_lifetime_s: float = math.inf,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.issuers = {
            each.issuer: Issuer(each, f"identity.issuers[{index}]", folder) for index, each in enumerate(issuers)
        }
        self._identify = identify
        self._skew_s = skew_s
        self._max_lifetime_s = max_lifetime_s
        self._wall_clock = wall_clock
        self._revision = 0
        # by digest: begin and end (Unix s) with the identity; None: no key of the issuer has signed it
        self._verified: OrderedDict[bytes, tuple[float, float, Identity]] = OrderedDict()
        self._refused: OrderedDict[bytes, None] = OrderedDict()

    async def ready(self, authorization: str) -> None:
        """Wait for newer keys of the issuer, if none of its keys has signed the token of this header. Raises
        AuthenticationFailed if the header is invalid; IdentityUnavailable if too many tokens wait.
        """
        token = _bearer(authorization)
        digest = _digest(token)
        if not token or self._is_known(digest):
            return
        issuer = self.issuers.get(read_issuer(token))
        if issuer is not None:
            header = read_header(token)

            def is_signed() -> bool:
                return verified_claims(token, header, issuer.keys) is not None

            if not is_signed() and await issuer.newer(is_signed) and not (is_signed() or issuer.last_error):
                self._is_known(digest)  # forgets those of other keys first
                self._refused[digest] = None
                if len(self._refused) > _MAX_REFUSED:
                    self._refused.popitem(last=False)

    def verify(self, authorization: str) -> Identity | None:
        """Return the identity of a bearer token; None if it is none of the issuers'. Raises AuthenticationFailed;
        IdentityUnavailable if the issuer's keys cannot be read; PermissionDenied if its tenant is not configured for
        it.
        """
        token = _bearer(authorization)
        if not token:
            return None
        digest, now = _digest(token), self._wall_clock()
        if self._is_known(digest) and (verified := self._verified.get(digest)) is not None:
            check_times(*verified[:2], now, self._skew_s)
            return verified[2]
        issuer = self.issuers.get(read_issuer(token))
        if issuer is None:
            return None
        claims = self._claims(token, digest, issuer)
        begins, ends = check_claims(claims, issuer.config.issuer, issuer.config.audience, now, self._skew_s)  # (4)
        told = identity_of(claims, issuer.config, digest.hex())
        if ends - told.issued > self._max_lifetime_s:
            raise AuthenticationFailed("The token's lifetime exceeds the maximum of this server.")
        identity = self._identify(told)
        self._verified[digest] = begins, ends, identity
        if len(self._verified) > _MAX_VERIFIED:
            self._verified.popitem(last=False)
        return identity

    def _is_known(self, digest: bytes) -> bool:
        """Return whether the present keys have verified or refused a token."""
        revision = sum(issuer.revision for issuer in self.issuers.values())
        if revision != self._revision:
            self._revision = revision
            self._verified.clear()
            self._refused.clear()
        return digest in self._verified or digest in self._refused

    def _claims(self, token: str, digest: bytes, issuer: Issuer) -> dict[str, Any]:
        name, header = issuer.config.issuer, read_header(token)  # (2)
        if not issuer.keys:
            raise IdentityUnavailable(f"The keys of the issuer {name} have not been read yet.", retry_after_s=5.0)
        claims = None if digest in self._refused else verified_claims(token, header, issuer.keys)
        if claims is not None:
            return claims
        if issuer.last_error:  # (3)
            message = f"No known key of the issuer {name} has signed the token, and its keys cannot be read now."
            raise IdentityUnavailable(message, retry_after_s=5.0)
        raise AuthenticationFailed(f"No key of the issuer {name} has signed the token.")

    # --- the issuers -------------------------------------------------------------------------------------------------

    def start(self, tasks: TaskGroup) -> None:
        """Read the keys in `tasks`, now and whenever they are due."""
        for issuer in self.issuers.values():
            tasks.start_soon(issuer.watch)

    async def close(self) -> None:
        for issuer in self.issuers.values():
            await issuer.close()

    @property
    def faults(self) -> dict[str, str]:
        """Why the keys of each issuer could not be read the last time; "" if they could."""
        return {name: issuer.last_error for name, issuer in self.issuers.items()}

    @property
    def problems(self) -> list[str]:
        return [f"{name}: {fault}" for name, fault in self.faults.items() if fault]


def _bearer(authorization: str) -> str:
    """Return the bearer token of a header if it may be an issuer's; "" otherwise. Raises AuthenticationFailed (1)."""
    scheme, _, token = authorization.partition(" ")
    token = token.strip()
    is_jwt = token.startswith("eyJ") and scheme.lower() == "bearer"  # `{"` in base64
    if is_jwt and len(token) > MAX_TOKEN_BYTES:
        raise AuthenticationFailed(f"The token has {len(token)} bytes; at most {MAX_TOKEN_BYTES} are accepted.")
    return token if is_jwt else ""


def _digest(token: str) -> bytes:
    return hashlib.blake2b(token.encode(errors="replace"), digest_size=32).digest()
