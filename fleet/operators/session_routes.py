"""Routes to sign in and out."""

from __future__ import annotations

import base64
import binascii

import msgspec
from aiohttp import web

from router.errors import AuthenticationFailed, NotFound, PermissionDenied
from router.serving.responses import json_response

from ..server.routes import ApiRoute, decode_body, read_body
from .answers import SessionAnswer, SignInRequest
from .oidc import OidcClient, PendingSignIn, SignInFailed
from .operators_file import Operator
from .sign_in import ALWAYS, SignIn, check_console_header, set_session_cookie

_PENDING, _PENDING_S = "causeway_sign_in", 600


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
        response.set_cookie(
            _PENDING, value, max_age=_PENDING_S, path="/v1/oidc", httponly=True, samesite="Lax",
            secure=http.secure or http.headers.get("x-forwarded-proto", "") == "https",
        )  # fmt: skip
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
