"""A small OpenID Connect issuer on a real socket, with real keys of every kind, and its faults."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

import jwt
import msgspec
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import AllowedPrivateKeys, ECAlgorithm, OKPAlgorithm, RSAAlgorithm

AUDIENCE = "causeway"


class SigningKey(msgspec.Struct, frozen=True):
    """A private key, the algorithm of its signatures, and its name."""

    kid: str | None
    algorithm: str
    private: AllowedPrivateKeys

    @classmethod
    def make(cls, kid: str | None, algorithm: str = "ES256", bits: int = 2048) -> Self:
        curves: dict[str, Callable[[], ec.EllipticCurve]] = {
            "ES256": ec.SECP256R1,
            "ES384": ec.SECP384R1,
            "ES512": ec.SECP521R1,
        }
        if algorithm in curves:
            return cls(kid, algorithm, ec.generate_private_key(curves[algorithm]()))
        if algorithm == "EdDSA":
            return cls(kid, algorithm, ed25519.Ed25519PrivateKey.generate())
        return cls(kid, algorithm, rsa.generate_private_key(65537, bits))

    @property
    def jwk(self) -> dict[str, Any]:
        public: Any = self.private.public_key()
        readers = {"E": ECAlgorithm, "R": RSAAlgorithm, "P": RSAAlgorithm}
        reader: Any = OKPAlgorithm if self.algorithm == "EdDSA" else readers[self.algorithm[0]]
        named = {} if self.kid is None else {"kid": self.kid}
        return {**json.loads(reader.to_jwk(public)), **named}

    def sign(self, claims: Mapping[str, Any], **header: object) -> str:
        more = {**({} if self.kid is None else {"kid": self.kid}), **header}
        return jwt.encode(dict(claims), self.private, algorithm=self.algorithm, headers=more)


class OidcIssuer:
    """An issuer. `key` signs; `published` are the keys of its JWKS; `reads` counts how often they were read."""

    def __init__(self) -> None:
        self.key = SigningKey.make("one")
        self.published = [self.key.jwk]
        self.url = ""
        self.reads = 0
        self.hangs: asyncio.Event | None = None
        self.answer: web.StreamResponse | None = None  # instead of the keys
        self.raw: bytes | None = None  # sent instead of an HTTP answer
        self.discovery: dict[str, Any] = {}  # differs from the usual one by this

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/.well-known/openid-configuration", self._discovery)
        app.router.add_get("/keys", self._keys)
        return app

    def rotate(self, kid: str, algorithm: str = "ES256", *, keep: bool = True) -> None:
        """Sign with a new key from now on."""
        self.key = SigningKey.make(kid, algorithm)
        self.published = [*(self.published if keep else []), self.key.jwk]

    def token(self, **claims: object) -> str:
        """Return a token. A claim of `...` is left out."""
        return self.key.sign(self.claims(**claims))

    def claims(self, **claims: object) -> dict[str, Any]:
        now = time.time()
        usual = {"iss": self.url, "aud": AUDIENCE, "sub": "olga", "iat": now - 1, "exp": now + 600}
        merged = {**usual, "tenant": "acme", "scope": "openid chat jobs", **claims}
        return {name: value for name, value in merged.items() if value is not ...}

    async def _discovery(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"issuer": self.url, "jwks_uri": f"{self.url}/keys", **self.discovery})

    async def _keys(self, http: web.Request) -> web.StreamResponse:
        self.reads += 1
        if self.hangs is not None:
            await self.hangs.wait()
        if self.raw is not None and http.transport is not None:
            http.transport.write(self.raw)
            http.transport.close()
        return self.answer or web.json_response({"keys": self.published})


@asynccontextmanager
async def serving_issuer(issuer: OidcIssuer, tls: ssl.SSLContext | None = None) -> AsyncIterator[OidcIssuer]:
    """Serve an issuer on a free port of loopback."""
    runner = web.AppRunner(issuer.app())
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
    issuer.url = f"http{'s' * (tls is not None)}://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield issuer
    finally:
        if issuer.hangs is not None:
            issuer.hangs.set()
        await runner.cleanup()
