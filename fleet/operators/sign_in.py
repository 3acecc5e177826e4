"""Authentication of the operator of a request, and the check of the operator's role.

1. `Authorization: Bearer`: the bootstrap token, a token of `operators.yaml`, or a session.
2. The session's cookie, from a browser. Then a request that changes something needs the header
   `x-causeway-console: 1`, which no other site can make a browser send.
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from aiohttp import web

from causeway_server.router.errors import AuthenticationFailed, ConfigError, NotFound, PermissionDenied
from causeway_server.router.serving.aiohttp_connection import json_response
from causeway_server.router.serving.folders import write_new
from causeway_server.router.serving.request import one_value, read_authorization

from ..server.routes import ApiRoute, decode_body, read_body
from ..store.audit import append_audit
from ..store.database import Store
from ..store.enrolment import SESSION_PREFIX, end_session, find_session, new_session, token_hash
from .answers import SignInRequest
from .oidc import OidcClient, PendingSignIn, SignInFailed
from .operators_file import Operator, OperatorsDoc, Role

"""The errors that every route for operators may raise."""
COOKIE = "causeway_session"
CSRF_HEADER = "x-causeway-console"
SESSION_S = 12 * 3600.0
BOOTSTRAP = "bootstrap"
_SAFE = ("GET", "HEAD", "OPTIONS")
_MIN_TOKEN = 16  # characters
_PENDING, _PENDING_S = "causeway_sign_in", 600


class SignIn:
    """The sign-in of a control plane: authenticates operators, and handles the requests of sign-in."""

    def __init__(
        self,
        store: Store,
        doc: OperatorsDoc,
        bootstrap: str,
        clock: Callable[[], float],
        issuer: OidcClient | None = None,
    ) -> None:
        """Create the handlers. `bootstrap`: the bootstrap token; `clock`: unix seconds; `issuer`: that of `doc`."""
        self._issuer = issuer
        self._store = store
        self._clock = clock
        tokens: Mapping[str, Operator] = {one.sha256: Operator(name, one.role) for name, one in doc.tokens.items()}
        self._tokens = {**tokens, token_hash(bootstrap): Operator(BOOTSTRAP, "approver")}

    async def require(self, http: web.Request, role: Role) -> Operator:
        """Return the operator of a request.

        Raises AuthenticationFailed without a valid token or session, PermissionDenied for the role or another site's
        page.
        """
        operator = await self.operator(http)
        if not operator.may(role):
            raise PermissionDenied(
                f"The action needs the role {role}, but {operator.name} has the role {operator.role}."
            )
        return operator

    async def operator(self, http: web.Request) -> Operator:
        """Return the operator of a request. Raises the errors of `require`."""
        kind, _, secret = read_authorization(http).partition(" ")
        if kind.lower() == "bearer" and secret:
            return self._tokens.get(token_hash(secret.strip())) or await self._session(secret.strip())
        cookie = http.cookies.get(COOKIE, "")
        if not cookie:
            raise AuthenticationFailed("Sign in, or send a token as `Authorization: Bearer TOKEN`.")
        if http.method not in _SAFE:
            check_console_header(http)
        return await self._session(cookie)

    async def _session(self, secret: str) -> Operator:
        found = None
        if secret.startswith(SESSION_PREFIX):
            async with self._store.read() as connection:
                found = await find_session(connection, secret, self._clock())
        if found is None:
            raise AuthenticationFailed("The token or session is unknown, or has ended. Sign in again.")
        return msgspec.convert(found, Operator)

    async def _begin(self, response: web.Response, http: web.Request, operator: Operator, by: str) -> web.Response:
        """Begin a session and return the response with its cookie. `by`: the method of sign-in, for the audit log."""
        now = self._clock()
        async with self._store.write() as connection:
            await append_audit(connection, now, operator.name, "session.begin", {"role": operator.role, "by": by})
            secret = await new_session(connection, operator.name, operator.role, now, SESSION_S)
        _set_cookie(response, http, COOKIE, secret, SESSION_S)
        return response

    # --- handlers ----------------------------------------------------------------------------------------------------

    async def session(self, http: web.Request) -> web.StreamResponse:
        return json_response(await self.operator(http))

    async def begin(self, http: web.Request) -> web.StreamResponse:
        check_console_header(http)
        request = decode_body(await read_body(http), SignInRequest)
        operator = self._tokens.get(token_hash(request.token))
        if operator is None:
            raise AuthenticationFailed("The token is unknown.")
        return await self._begin(json_response(operator), http, operator, "token")

    async def end(self, http: web.Request) -> web.StreamResponse:
        secret = http.cookies.get(COOKIE, "")
        if secret:
            check_console_header(http)
            async with self._store.write() as connection:
                await end_session(connection, secret)
        response = web.Response(status=204)
        _set_cookie(response, http, COOKIE, "", 0)
        return response

    async def start_oidc(self, http: web.Request) -> web.StreamResponse:
        url, pending = await self._oidc().start()
        response = web.Response(status=302, headers={"Location": url, "Cache-Control": "no-store"})
        value = base64.urlsafe_b64encode(msgspec.json.encode(pending)).decode()
        _set_cookie(response, http, _PENDING, value, _PENDING_S, "/v1/oidc")
        return response

    async def finish_oidc(self, http: web.Request) -> web.StreamResponse:
        oidc, query = self._oidc(), http.query
        if "error" in query:
            raise SignInFailed(f"The issuer refused: {query['error'][:100]} {query.get('error_description', '')[:300]}")
        pending = _pending(http.cookies.get(_PENDING, ""))
        operator = await oidc.finish(query.get("code", ""), query.get("state", ""), pending)
        response = web.Response(status=302, headers={"Location": "/console", "Cache-Control": "no-store"})
        response.del_cookie(_PENDING, path="/v1/oidc")
        return await self._begin(response, http, operator, "oidc")

    def _oidc(self) -> OidcClient:
        if self._issuer is None:
            raise NotFound("Single sign-on is not configured: see `oidc` of operators.yaml.")
        return self._issuer


def check_console_header(http: web.Request) -> None:
    """Refuse requests that another site's page could have sent. Raises PermissionDenied or InvalidRequest."""
    if one_value(CSRF_HEADER, http.headers.getall(CSRF_HEADER, ())) != "1":
        raise PermissionDenied(f"A request from a browser that changes something needs the header `{CSRF_HEADER}: 1`.")


def _set_cookie(
    response: web.StreamResponse, http: web.Request, name: str, value: str, max_age_s: float, path: str = "/"
) -> None:
    """Set a cookie in the browser. An empty `value` without `max_age_s` deletes it."""
    secure = http.secure or http.headers.get("x-forwarded-proto", "") == "https"
    response.set_cookie(name, value, max_age=int(max_age_s), path=path, httponly=True, samesite="Lax", secure=secure)


def load_bootstrap_token(path: Path) -> str:
    """Return a file's bootstrap token, made at the first start (mode 0600). Raises ConfigError."""
    try:
        if not path.exists():
            with suppress(FileExistsError):  # another process created the file first
                write_new(path, f"cwboot_{secrets.token_urlsafe(32)}\n".encode(), 0o600)
        token = path.read_bytes().decode("ascii", "replace").strip()
    except OSError as error:
        raise ConfigError(error.strerror or str(error), where=str(path)) from error
    if len(token) < _MIN_TOKEN:
        raise ConfigError(
            "The token file is empty. Remove the file; the next start makes a new token.", where=str(path)
        )
    return token


def session_routes(sign_in: SignIn) -> list[ApiRoute]:
    """Return the routes of sign-in and of sessions."""
    return [
        ApiRoute("GET", "/v1/session", sign_in.session),
        ApiRoute("POST", "/v1/session", sign_in.begin),
        ApiRoute("DELETE", "/v1/session", sign_in.end),
        ApiRoute("GET", "/v1/oidc/start", sign_in.start_oidc),
        ApiRoute("GET", "/v1/oidc/callback", sign_in.finish_oidc),
    ]


def _pending(cookie: str) -> PendingSignIn:
    try:
        return msgspec.json.decode(base64.b64decode(cookie, altchars=b"-_", validate=True), type=PendingSignIn)
    except (binascii.Error, ValueError, msgspec.DecodeError, RecursionError) as error:
        raise SignInFailed(
            "The sign-in was not begun in this browser, or it took too long. Begin the sign-in again."
        ) from error
