"""Authenticate the operator of a request, and check the role.

1. `Authorization: Bearer`: the bootstrap token, a token of `operators.yaml`, or a session.
2. The session's cookie, from a browser. Then a request that changes something needs the header
   `x-causeway-console: 1`, which no other site can make a browser send.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from aiohttp import web

from router.errors import AuthenticationFailed, CausewayError, ConfigError, PermissionDenied
from router.serving.request import one_value, read_authorization

from ..store.audit import append_audit
from ..store.database import Store, StoreUnavailable
from ..store.operators import PREFIX, end_session, find_session, new_session
from ..trust.files import write_new
from .oidc import OidcClient
from .operators_file import Operator, OperatorsDoc, Role

ALWAYS: tuple[type[CausewayError], ...] = (AuthenticationFailed, PermissionDenied, StoreUnavailable)
"""Errors that every route for operators may raise."""
COOKIE = "causeway_session"
CSRF_HEADER = "x-causeway-console"
SESSION_S = 12 * 3600.0
BOOTSTRAP = "bootstrap"
_SAFE = ("GET", "HEAD", "OPTIONS")
_LEAST_TOKEN = 16  # characters


class SignIn:
    """The operators of one control plane."""

    def __init__(
        self,
        store: Store,
        doc: OperatorsDoc,
        bootstrap: str,
        clock: Callable[[], float],
        issuer: OidcClient | None = None,
    ) -> None:
        """`bootstrap`: the token itself; `clock`: unix seconds; `issuer`: the one that `doc` names."""
        self.issuer = issuer
        self._store = store
        self._clock = clock
        tokens: Mapping[str, Operator] = {one.sha256: Operator(name, one.role) for name, one in doc.tokens.items()}
        self._tokens = {**tokens, _hash(bootstrap): Operator(BOOTSTRAP, "approver")}

    async def require(self, http: web.Request, role: Role) -> Operator:
        """Return the operator of a request.

        Raises:
            AuthenticationFailed: The request has no valid token or session.
            PermissionDenied: The role does not suffice, or another site's page made the request.
        """
        operator = await self.operator(http)
        if not operator.may(role):
            raise PermissionDenied(f"this needs the role {role}; {operator.name} is {operator.role}")
        return operator

    async def operator(self, http: web.Request) -> Operator:
        """Return the operator of a request. Raises as `require`."""
        kind, _, secret = read_authorization(http).partition(" ")
        if kind.lower() == "bearer" and secret:
            return self._tokens.get(_hash(secret.strip())) or await self._session(secret.strip())
        cookie = http.cookies.get(COOKIE, "")
        if not cookie:
            raise AuthenticationFailed("sign in, or send a token as `Authorization: Bearer TOKEN`")
        if http.method not in _SAFE:
            check_console_header(http)
        return await self._session(cookie)

    def by_token(self, token: str) -> Operator:
        """Return the operator of the bootstrap token or one of `operators.yaml`. Raises AuthenticationFailed."""
        found = self._tokens.get(_hash(token))
        if found is None:
            raise AuthenticationFailed("the token is not known here")
        return found

    async def begin(self, operator: Operator, by: str) -> str:
        """Begin a session and return its secret; `by`: how the operator signed in, for the audit log."""
        now = self._clock()
        async with self._store.write() as connection:
            what = {"role": operator.role, "by": by}
            await append_audit(connection, now, operator.name, "session.begin", what)
            return await new_session(connection, operator.name, operator.role, now, SESSION_S)

    async def end(self, http: web.Request) -> None:
        """End the session of a request, if it has one."""
        secret = http.cookies.get(COOKIE, "")
        if secret:
            check_console_header(http)
            async with self._store.write() as connection:
                await end_session(connection, secret)

    async def _session(self, secret: str) -> Operator:
        found = None
        if secret.startswith(PREFIX):
            async with self._store.read() as connection:
                found = await find_session(connection, secret, self._clock())
        if found is None:
            raise AuthenticationFailed("the token or session is not known here, or has ended: sign in again")
        return msgspec.convert(found, Operator)


def check_console_header(http: web.Request) -> None:
    """Refuse what another site's page could have sent. Raises PermissionDenied or InvalidRequest."""
    if one_value(CSRF_HEADER, http.headers.getall(CSRF_HEADER, ())) != "1":
        raise PermissionDenied(f"a request from a browser that changes something needs the header `{CSRF_HEADER}: 1`")


def set_session_cookie(response: web.StreamResponse, http: web.Request, secret: str) -> None:
    """Give the browser its session; `secret` "": take it away."""
    secure = http.secure or http.headers.get("x-forwarded-proto", "") == "https"
    response.set_cookie(
        COOKIE,
        secret,
        max_age=int(SESSION_S) if secret else 0,
        path="/",
        httponly=True,
        samesite="Lax",
        secure=secure,
    )


def load_bootstrap_token(path: Path) -> str:
    """Return the bootstrap token of a file; at the first start the file is made, with mode 0600.

    Raises:
        ConfigError: The file cannot be read or written, or holds no token: an empty one would let everybody in.
    """
    try:
        if not path.exists():
            with suppress(FileExistsError):  # another process was faster
                write_new(path, f"cwboot_{secrets.token_urlsafe(32)}\n".encode(), 0o600)
        token = path.read_bytes().decode("ascii", "replace").strip()
    except OSError as error:
        raise ConfigError(error.strerror or str(error), where=str(path)) from error
    if len(token) < _LEAST_TOKEN:
        raise ConfigError("holds no token: remove it, and the next start makes a new one", where=str(path))
    return token


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()
