"""A control plane of the test's own, which checks what devices send as the protocol says."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import msgspec
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from causeway_server.router.bundle.protocol import (
    SIGNATURE_HEADER,
    Enrolment,
    EnrolmentRequest,
    IssuedToken,
    StatusReply,
    StatusReport,
    Telemetry,
    TokenRequest,
    enrolment_proof,
    signed_bytes,
)


def raw(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))


class Refusal(msgspec.Struct, frozen=True):
    status: int
    code: str


class ScriptedPlane:
    """`refusals` are by path, of every message; `lose` paths whose answer is lost after it was counted."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}
        self.cohort = "kiosk"
        self.life_s = 600.0
        self.unix: Callable[[], float] = time.time
        self.tokens: list[str] = []
        self.token_requests: list[TokenRequest] = []
        self.reports: list[StatusReport] = []
        self.telemetry: list[Telemetry] = []
        self.polls: list[tuple[str, float]] = []
        self.refusals: dict[str, Refusal] = {}
        self.lose: set[str] = set()
        self.check_time = False
        self.hang: anyio.Event | None = None  # token requests wait for it
        self.reply = StatusReply(may_change=True, now=time.time(), cohort="kiosk")
        self.files: dict[str, bytes] = {}
        self.ranges = True
        self.generation = 1
        self.woken = anyio.Event()
        self.arrived = anyio.Event()
        self.url = ""

    def news(self) -> None:
        """Something is new: every parked poll is answered."""
        self.generation += 1
        self.woken.set()
        self.woken = anyio.Event()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until the condition holds; it is looked at after each message."""
        with anyio.fail_after(60):
            while not condition():
                await self.arrived.wait()

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[ScriptedPlane]:
        app = web.Application(middlewares=[self._refuse])
        app.router.add_post("/v1/enroll", self._enroll)
        app.router.add_post("/v1/token", self._token)
        app.router.add_post("/v1/status", self._status)
        app.router.add_post("/v1/telemetry", self._telemetry)
        app.router.add_get("/v1/wake", self._wake)
        app.router.add_get("/{path:(tuf|blobs)/.*}", self._file)
        runner = web.AppRunner(app, shutdown_timeout=0.05, handler_cancellation=True)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    @web.middleware
    async def _refuse(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        refusal = self.refusals.get(request.path)
        if refusal is not None:
            self._note()
            body = {"error": {"code": refusal.code, "message": "no", "type": "x"}}
            return web.json_response(body, status=refusal.status)
        answer = await handler(request)
        self._note()
        if request.path in self.lose:
            assert request.transport is not None
            request.transport.abort()
        return answer

    def _note(self) -> None:
        self.arrived.set()
        self.arrived = anyio.Event()

    async def _enroll(self, http: web.Request) -> web.Response:
        request = msgspec.json.decode(await http.read(), type=EnrolmentRequest)
        public = Ed25519PublicKey.from_public_bytes(raw(request.public_key))
        public.verify(raw(request.proof), enrolment_proof(request.token, request.public_key))
        device = request.name or f"device-{len(self.keys) + 1}"
        self.keys[device] = request.public_key
        return _json(Enrolment(device=device, tenant="stores", cohort=self.cohort, fleet="stores", root="{}"))

    async def _token(self, http: web.Request) -> web.Response:
        request = msgspec.json.decode(await self._signed(http), type=TokenRequest)
        if self.hang is not None:
            await self.hang.wait()
        now = self.unix()
        if self.check_time and abs(request.sent - now) > 300:
            body = {"error": {"code": "request_stale", "message": "the time is off", "type": "x"}}
            date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(now))
            return web.json_response(body, status=401, headers={"Date": date})
        self.token_requests.append(request)
        self.tokens.append(f"token-{len(self.tokens) + 1}")
        return _json(IssuedToken(token=self.tokens[-1], expires_in_s=self.life_s, now=now, cohort=self.cohort))

    async def _status(self, http: web.Request) -> web.Response:
        self.reports.append(msgspec.json.decode(await self._signed(http), type=StatusReport))
        return _json(self.reply)

    async def _telemetry(self, http: web.Request) -> web.Response:
        self.telemetry.append(msgspec.json.decode(await self._signed(http), type=Telemetry))
        return web.Response(status=204)

    async def _signed(self, http: web.Request) -> bytes:
        body = await http.read()
        device = msgspec.json.decode(body, type=dict[str, object])["device"]
        public = Ed25519PublicKey.from_public_bytes(raw(self.keys[str(device)]))
        public.verify(raw(http.headers[SIGNATURE_HEADER]), signed_bytes(http.path, body))
        return body

    async def _wake(self, http: web.Request) -> web.Response:
        wait_s = float(http.query["wait"])
        self.polls.append((http.headers.get("If-None-Match", ""), wait_s))
        self._note()
        if not self.tokens or http.headers.get("Authorization") != f"Bearer {self.tokens[-1]}":
            expired = {"code": "token_expired", "message": "expired", "type": "x"}
            return web.json_response({"error": expired}, status=401)
        if wait_s and http.headers.get("If-None-Match") == f'"{self.generation}"':
            with anyio.move_on_after(wait_s):
                await self.woken.wait()
        etag = f'"{self.generation}"'
        return web.Response(status=304 if http.headers.get("If-None-Match") == etag else 200, headers={"ETag": etag})

    async def _file(self, http: web.Request) -> web.Response:
        content = self.files.get(http.path[1:])
        if content is None:
            return web.Response(status=404)
        start = int(http.headers["Range"].removeprefix("bytes=").removesuffix("-")) if "Range" in http.headers else 0
        if not start or not self.ranges:
            return web.Response(body=content)
        if start >= len(content):
            return web.Response(status=416)
        return web.Response(status=206, body=content[start:])


def _json(message: msgspec.Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(message), content_type="application/json")
