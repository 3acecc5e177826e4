"""Sign-in with an OpenID Connect issuer: authorization code flow with PKCE (OpenID Connect Core 1.0, RFC 7636).

The state between redirect and callback is in the browser's cookie, so any process behind a load balancer can answer.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import msgspec

from causeway_server.router.bundle.protocol import base64url
from causeway_server.router.errors import AuthenticationFailed, PermissionDenied
from causeway_server.router.serving.issuers.claims import check_claims
from causeway_server.router.serving.issuers.documents import UNREADABLE, DocumentsUnavailable, IssuerDocuments
from causeway_server.router.serving.issuers.keys import parse_jwks, read_header, verified_claims

from .operators_file import MAX_NAME, RESERVED_NAMES, OidcDoc, Operator, OperatorsDoc, role_of

_SKEW_S = 60.0


class SignInFailed(AuthenticationFailed, code="sign_in_failed"):
    """The issuer did not confirm the operator's identity, or does not answer."""


class PendingSignIn(msgspec.Struct, frozen=True):
    """The state that the browser's cookie holds until the issuer redirects back."""

    state: str
    nonce: str
    verifier: str


class _Tokens(msgspec.Struct, frozen=True):
    id_token: str


class OidcClient:
    """A client of an issuer. It reads the issuer's documents at each sign-in, because keys rotate."""

    def __init__(self, folder: Path, doc: OperatorsDoc, oidc: OidcDoc, clock: Callable[[], float]) -> None:
        """Create the client. `folder`: the folder of `operators.yaml`; `clock`: unix seconds."""
        self._folder = folder
        self._doc = doc
        self._oidc = oidc
        self._clock = clock

    async def start(self) -> tuple[str, PendingSignIn]:
        """Return the URL to redirect the browser to, and the state for its cookie. Raises SignInFailed."""
        pending = PendingSignIn(*(secrets.token_urlsafe(32) for _ in range(3)))
        challenge = base64url(hashlib.sha256(pending.verifier.encode()).digest())
        async with self._documents() as documents:
            discovery = await documents.discover()
        query = {
            "response_type": "code",
            "client_id": self._oidc.client_id,
            "redirect_uri": self._oidc.redirect,
            "scope": self._oidc.scope,
            "state": pending.state,
            "nonce": pending.nonce,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        mark = "&" if "?" in discovery.authorization_endpoint else "?"
        return f"{discovery.authorization_endpoint}{mark}{urlencode(query)}", pending

    async def finish(self, code: str, state: str, pending: PendingSignIn) -> Operator:
        """Return the operator whose identity the issuer confirms.

        Raises SignInFailed for another browser's sign-in or an invalid answer, PermissionDenied if no group has a role.
        """
        if not code or not secrets.compare_digest(state.encode(), pending.state.encode()):
            raise SignInFailed(
                "The sign-in was not begun in this browser, or the issuer refused. Begin the sign-in again."
            )
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._oidc.redirect,
            "client_id": self._oidc.client_id,
            "code_verifier": pending.verifier,
        }
        if self._oidc.client_secret_file:
            secret = (self._folder / self._oidc.client_secret_file).read_text(encoding="utf-8").strip()
            form["client_secret"] = secret
        async with self._documents() as documents:
            discovery = await documents.discover()
            tokens = await documents.read(discovery.token_endpoint, _Tokens, form)
            jwks = await documents.read(discovery.jwks_uri, msgspec.Raw)
        return self._operator(self._claims(tokens.id_token, bytes(jwks), pending))

    def _claims(self, id_token: str, jwks: bytes, pending: PendingSignIn) -> dict[str, Any]:
        """Return the claims of a verified id token. Raises SignInFailed."""
        oidc = self._oidc
        try:
            claims = verified_claims(id_token, read_header(id_token), parse_jwks(jwks))
            if claims is None:
                raise AuthenticationFailed("No key of the issuer has signed the id token.")
            check_claims(claims, oidc.issuer, oidc.client_id, self._clock(), _SKEW_S)
        except (AuthenticationFailed, *UNREADABLE) as error:
            raise SignInFailed(f"The issuer's id token is not valid: {error}") from error
        if claims.get("nonce") != pending.nonce:
            raise SignInFailed("The issuer's id token is not valid, because it belongs to another sign-in.")
        return claims

    def _operator(self, claims: dict[str, Any]) -> Operator:
        found = claims.get(self._oidc.claim, ())
        values = frozenset([found] if isinstance(found, str) else map(str, found))
        name = self._name(claims)
        role = role_of(self._doc, values)
        if role is None:
            raise PermissionDenied(
                f"{name} is not in a group that has a role on this control plane. See `roles` of operators.yaml."
            )
        return Operator(name, role)

    def _name(self, claims: dict[str, Any]) -> str:
        """Return the operator's unique name for the audit log.

        1. `email`, if the issuer has verified it, since an unverified address may belong to another person.
        2. Another claim named by `name_claim`, which the issuer must guarantee.
        3. `sub`, which is unique at the issuer, followed by the issuer's URL.

        Raises PermissionDenied if the name is empty, malformed or reserved for a program.
        """
        claim = self._oidc.name_claim
        is_verified = claim != "email" or claims.get("email_verified") is True  # (1)
        name = str(claims.get(claim) or "") if is_verified else ""  # (2)
        name = name or f"{claims['sub']}@{self._oidc.issuer}"  # (3)
        if len(name) > MAX_NAME or not name.isprintable():
            raise PermissionDenied(
                f"A sign-in needs a name in the claim {claim!r}: at most {MAX_NAME} printable characters."
            )
        if name.casefold() in (*RESERVED_NAMES, *map(str.casefold, self._doc.tokens)):
            raise PermissionDenied(
                f"{name!r} is the name of a program on this control plane, so no person can sign in with it."
            )
        return name

    @asynccontextmanager
    async def _documents(self) -> AsyncIterator[IssuerDocuments]:
        """Yield the reader of the issuer's documents. Raises SignInFailed for one that cannot be read."""
        try:
            async with IssuerDocuments(self._oidc.issuer) as documents:
                yield documents
        except DocumentsUnavailable as error:
            raise SignInFailed(str(error)) from error
