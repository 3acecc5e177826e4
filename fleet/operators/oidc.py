"""Sign-in with an OpenID Connect issuer: authorization code flow with PKCE (OpenID Connect Core 1.0, RFC 7636).

The state between redirect and callback is in the browser's cookie, so any process behind a load balancer can answer.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlencode

import httpx
import msgspec
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from causeway_server.router.bundle.protocol import base64url
from causeway_server.router.errors import AuthenticationFailed, PermissionDenied

from .operators_file import MAX_NAME, RESERVED_NAMES, OidcDoc, Operator, OperatorsDoc, role_of

Answer = TypeVar("Answer")
_ALGORITHMS = ["RS256", "PS256", "ES256", "ES384", "EdDSA", "Ed25519"]
_TIMEOUT_S = 10.0
_LEEWAY_S = 60


class SignInFailed(AuthenticationFailed, code="sign_in_failed"):
    """The issuer did not confirm the operator's identity, or does not answer."""


class PendingSignIn(msgspec.Struct, frozen=True):
    """The state that the browser's cookie holds until the issuer redirects back."""

    state: str
    nonce: str
    verifier: str


class _Discovery(msgspec.Struct, frozen=True):
    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str


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
        """Return the URL to redirect the browser to, and the state for its cookie.

        Raises:
            SignInFailed: The issuer does not answer.
        """
        pending = PendingSignIn(*(secrets.token_urlsafe(32) for _ in range(3)))
        challenge = base64url(hashlib.sha256(pending.verifier.encode()).digest())
        async with self._http() as http:
            discovery = await self._discover(http)
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

        Raises:
            SignInFailed: Another browser began this sign-in, or the issuer's answer is not valid.
            PermissionDenied: The issuer knows the person, but none of the groups has a role.
        """
        if not code or not secrets.compare_digest(state.encode(), pending.state.encode()):
            raise SignInFailed("The sign-in was not begun in this browser, or the issuer refused. Begin again.")
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
        async with self._http() as http:
            discovery = await self._discover(http)
            tokens = await self._ask(http, "POST", discovery.token_endpoint, _Tokens, form)
            keys = await self._ask(http, "GET", discovery.jwks_uri, dict[str, Any])
        return self._operator(self._claims(tokens.id_token, keys, pending))

    def _claims(self, id_token: str, keys: dict[str, Any], pending: PendingSignIn) -> dict[str, Any]:
        required = {
            "iss": {"essential": True, "value": self._oidc.issuer},
            "aud": {"essential": True, "value": self._oidc.client_id},
            "nonce": {"essential": True, "value": pending.nonce},
            "sub": {"essential": True},
            "exp": {"essential": True},
        }
        try:
            token = jwt.decode(id_token, KeySet.import_key_set(keys), algorithms=_ALGORITHMS)  # type: ignore[arg-type]
            jwt.JWTClaimsRegistry(now=int(self._clock()), leeway=_LEEWAY_S, **required).validate(token.claims)  # type: ignore[arg-type]
        except (JoseError, ValueError, KeyError) as error:
            raise SignInFailed(f"The issuer's id token is not valid: {error}.") from error
        return token.claims

    def _operator(self, claims: dict[str, Any]) -> Operator:
        found = claims.get(self._oidc.claim, ())
        values = frozenset([found] if isinstance(found, str) else map(str, found))
        name = self._name(claims)
        role = role_of(self._doc, values)
        if role is None:
            raise PermissionDenied(f"{name} is not in a group with a role here: see `roles` of operators.yaml.")
        return Operator(name, role)

    def _name(self, claims: dict[str, Any]) -> str:
        """Return the operator's unique name for the audit log.

        1. `email`, if the issuer has verified it, since an unverified address may belong to another person.
        2. Another claim named by `name_claim`, which the issuer must guarantee.
        3. `sub`, which is unique at the issuer, followed by the issuer's URL.

        Raises:
            PermissionDenied: The name is empty, malformed or reserved for a program.
        """
        claim = self._oidc.name_claim
        is_verified = claim != "email" or claims.get("email_verified") is True  # (1)
        name = str(claims.get(claim) or "") if is_verified else ""  # (2)
        name = name or f"{claims['sub']}@{self._oidc.issuer}"  # (3)
        if len(name) > MAX_NAME or not name.isprintable():
            raise PermissionDenied(f"Sign-in needs a name of at most {MAX_NAME} printable characters in {claim!r}.")
        if name.casefold() in (*RESERVED_NAMES, *map(str.casefold, self._doc.tokens)):
            raise PermissionDenied(f"{name!r} is the name of a program here, and no person can sign in with it.")
        return name

    async def _discover(self, http: httpx.AsyncClient) -> _Discovery:
        url = self._oidc.issuer.rstrip("/") + "/.well-known/openid-configuration"
        discovery = await self._ask(http, "GET", url, _Discovery)
        if discovery.issuer != self._oidc.issuer:
            raise SignInFailed(f"{url} is the document of {discovery.issuer}, not of {self._oidc.issuer}.")
        return discovery

    @staticmethod
    async def _ask(
        http: httpx.AsyncClient, method: str, url: str, kind: type[Answer], form: dict[str, str] | None = None
    ) -> Answer:
        try:
            response = await http.request(method, url, data=form)
            response.raise_for_status()
            return msgspec.json.decode(response.content, type=kind)
        except (httpx.HTTPError, httpx.InvalidURL, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise SignInFailed(f"The issuer's answer at {url} is invalid: {error}.") from error

    @staticmethod
    def _http() -> httpx.AsyncClient:
        return httpx.AsyncClient(timeout=_TIMEOUT_S, follow_redirects=False, trust_env=False)
