"""Authenticate the operator of a request, and check the role.

1. `Authorization: Bearer`: the bootstrap token, a token of `operators.yaml`, or a session.
2. The session's cookie, from a browser. Then a request that changes something needs the header
   `x-causeway-console: 1`, which no other site can make a browser send.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec
from aiohttp import web

from router.errors import AuthenticationFailed, CausewayError, ConfigError, NotFound, PermissionDenied
from router.serving.folders import write_new
from router.serving.request import one_value, read_authorization
from router.serving.responses import json_response

from ..server.routes import ApiRoute, decode_body, read_body
from ..store.audit import append_audit
from ..store.database import Store, StoreUnavailable
from ..store.enrolment import SESSION_PREFIX, end_session, find_session, new_session
from .answers import SessionAnswer, SignInRequest
from .oidc import OidcClient, PendingSignIn, SignInFailed
from .operators_file import Operator, OperatorsDoc, Role

ALWAYS: tuple[type[CausewayError], ...] = (AuthenticationFailed, PermissionDenied, StoreUnavailable)
"""Errors that every route for operators may raise."""
COOKIE = "causeway_session"
CSRF_HEADER = "x-causeway-console"
SESSION_S = 12 * 3600.0
BOOTSTRAP = "bootstrap"
_SAFE = ("GET", "HEAD", "OPTIONS")
_LEAST_TOKEN = 16  # characters
_PENDING, _PENDING_S = "causeway_sign_in", 600


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
        if secret.startswith(SESSION_PREFIX):
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
    _set_cookie(response, http, COOKIE, secret, int(SESSION_S) if secret else 0, "/")


def _set_cookie(
    response: web.StreamResponse, http: web.Request, name: str, value: str, max_age: int, path: str
) -> None:
    secure = http.secure or http.headers.get("x-forwarded-proto", "") == "https"
    response.set_cookie(name, value, max_age=max_age, path=path, httponly=True, samesite="Lax", secure=secure)


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


class SessionRoutes:
    """The handlers."""

    def __init__(self, sign_in: SignIn) -> None:
        self._sign_in = sign_in

    async def session(self, http: web.Request) -> web.StreamResponse:
        return json_response(_answer(await self._sign_in.operator(http)))

    async def begin(self, http: web.Request) -> web.StreamResponse:
        check_console_header(http)
        request = decode_body(await read_body(http), SignInRequest)
        operator = self._sign_in.by_token(request.token)
        response = json_response(_answer(operator))
        set_session_cookie(response, http, await self._sign_in.begin(operator, "token"))
        return response

    async def end(self, http: web.Request) -> web.StreamResponse:
        await self._sign_in.end(http)
        response = web.Response(status=204)
        set_session_cookie(response, http, "")
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
            raise SignInFailed(f"the issuer refused: {query['error'][:100]} {query.get('error_description', '')[:300]}")
        pending = _pending(http.cookies.get(_PENDING, ""))
        operator = await oidc.finish(query.get("code", ""), query.get("state", ""), pending)
        response = web.Response(status=302, headers={"Location": "/console", "Cache-Control": "no-store"})
        response.del_cookie(_PENDING, path="/v1/oidc")
        set_session_cookie(response, http, await self._sign_in.begin(operator, "oidc"))
        return response

    def _oidc(self) -> OidcClient:
        if self._sign_in.issuer is None:
            raise NotFound("no single sign-on is configured: see `oidc` of operators.yaml")
        return self._sign_in.issuer


def session_routes(sign_in: SignIn) -> list[ApiRoute]:
    """Return the routes."""
    routes = SessionRoutes(sign_in)
    oidc = (NotFound, SignInFailed, PermissionDenied)
    return [
        ApiRoute("GET", "/v1/session", routes.session, "The signed-in operator.", "viewer", response=SessionAnswer,
                 errors=ALWAYS),
        ApiRoute("POST", "/v1/session", routes.begin, "Sign in with a token; the answer sets a cookie.",
                 request=SignInRequest, response=SessionAnswer, errors=(AuthenticationFailed, PermissionDenied)),
        ApiRoute("DELETE", "/v1/session", routes.end, "Sign out.", status=204, errors=(PermissionDenied,)),
        ApiRoute("GET", "/v1/oidc/start", routes.start_oidc, "Sign in with the issuer.", status=302, errors=oidc),
        ApiRoute("GET", "/v1/oidc/callback", routes.finish_oidc, "Where the issuer sends the browser back.", status=302,
                 errors=oidc, query={"code": "Of the issuer.", "state": "As it was sent."}),
    ]  # fmt: skip


def _answer(operator: Operator) -> SessionAnswer:
    return SessionAnswer(operator.name, operator.role)


def _pending(cookie: str) -> PendingSignIn:
    try:
        return msgspec.json.decode(base64.b64decode(cookie, altchars=b"-_", validate=True), type=PendingSignIn)
    except (binascii.Error, ValueError, msgspec.DecodeError, RecursionError) as error:
        raise SignInFailed("this sign-in was not begun in this browser, or took too long: begin again") from error
