"""The control plane's answers to gateways, from a server of the test's own."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from causeway_server.cloud_pool.accounts.identity.issuing import issue
from causeway_server.cloud_pool.accounts.identity.key_set import public_jwk
from causeway_server.router.bundle.protocol import Revocations


class ScriptedFleet:
    """Serves its key set and its revocations. `failing` is the status of every answer; 0: none fails. `nested`: the
    answers are JSON that is nested too deeply."""

    def __init__(self) -> None:
        self.key = Ed25519PrivateKey.generate()
        self.keys: list[dict[str, str]] = [self.jwk()]
        self.revocations = Revocations()
        self.failing = 0
        self.nested = False
        self.asked: list[tuple[str, int]] = []
        self.url = ""

    def jwk(self) -> dict[str, str]:
        jwk = public_jwk(self.key.public_key())
        return {"kid": jwk.kid, "x": jwk.x, "kty": jwk.kty, "crv": jwk.crv, "alg": jwk.alg, "use": jwk.use}

    def change_key(self) -> None:
        self.key = Ed25519PrivateKey.generate()
        self.keys = [self.jwk()]

    def token(self, device: str = "kiosk-1", **changes: Any) -> str:
        claims: dict[str, Any] = {
            "tenant": "stores",
            "device": device,
            "scopes": ("chat", "jobs"),
            "issuer": "causeway",
            "audience": "causeway-cloud",
            "now": time.time(),
            "lifetime_s": 600.0,
        }
        return issue(self.key, **{**claims, **changes})[0]

    def revoke(self, device: str, at: float | None = None) -> None:
        at = time.time() if at is None else at
        old = self.revocations
        devices = {**old.devices, f"stores/{device}": at}
        self.revocations = Revocations(epoch=old.epoch, version=old.version + 1, tokens=old.tokens, devices=devices)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/.well-known/jwks.json", self._keys)
        app.router.add_get("/v1/revocations", self._revocations)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self.url
        finally:
            await runner.cleanup()

    async def _keys(self, http: web.Request) -> web.Response:
        return self._answer(http, msgspec.json.encode({"keys": self.keys}))

    async def _revocations(self, http: web.Request) -> web.Response:
        return self._answer(http, msgspec.json.encode(self.revocations))

    def _answer(self, http: web.Request, body: bytes) -> web.Response:
        body = b'{"more":' + b"[" * 5000 if self.nested else body
        etag = f'"{hash(body):x}"'
        status = self.failing or (304 if http.headers.get("If-None-Match") == etag else 200)
        self.asked.append((http.path, status))
        return web.Response(status=status, body=body if status == 200 else b"", headers={"ETag": etag})
