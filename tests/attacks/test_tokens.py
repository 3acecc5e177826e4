"""Invalid and revoked tokens at every authenticated path."""

from __future__ import annotations

import asyncio
import time

import jwt
import pytest
import redis as plain_redis
import redis.asyncio

from causeway_server.cloud_pool.accounts.identity.issuing import remove_key
from causeway_server.cloud_pool.accounts.identity.revocation import revoke_token
from tests.cloud_pool.accounts.identity.token_issuer import Issuer
from tests.redis_server import RedisServer

from .whole import CHAT, TokenHolder, serving, token_of

PATHS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/large"),
    ("POST", "/v1/jobs"),
    ("GET", "/v1/jobs"),
    ("GET", "/v1/jobs/job_1"),
    ("GET", "/v1/jobs/job_1/events"),
    ("DELETE", "/v1/jobs/job_1"),
    ("GET", "/v1/webhooks/secret"),
    ("POST", "/v1/webhooks/secret"),
    ("POST", "/v1/files"),
    ("GET", "/v1/files"),
    ("GET", "/v1/files/file-1"),
    ("GET", "/v1/files/file-1/content"),
    ("DELETE", "/v1/files/file-1"),
    ("POST", "/v1/batches"),
    ("GET", "/v1/batches"),
    ("GET", "/v1/batches/batch_1"),
    ("POST", "/v1/batches/batch_1/cancel"),
]


def forgeries(issuer: Issuer) -> dict[str, str]:
    """Tokens that can be made without our private key, and tokens for other gateways."""
    now = time.time()
    good = token_of(issuer)
    head, claims, signature = good.split(".")
    fresh = {"iat": now, "nbf": now, "exp": now + 60}
    public = issuer.key.public_key().public_bytes_raw()
    return {
        "none at all": "",
        "a word": "secret",
        "cut": f"{head}.{claims}.{signature[:-4]}",
        "without signature": f"{head}.{claims}.",
        "another's claims": f"{head}.{token_of(issuer, tenant='other').split('.')[1]}.{signature}",
        "unsigned": issuer.sign(fresh, head={"alg": "none"}),
        "unsigned, in capitals": issuer.sign(fresh, head={"alg": "NONE"}),
        "our public key as a secret": jwt.encode(fresh | {"tenant": "acme"}, public, algorithm="HS256"),
        "a stranger's key": issuer.sign(fresh, key=Issuer.stranger()),
        "a stranger's key under our key's name": issuer.sign(
            fresh, key=Issuer.stranger(), head={"kid": jwt.get_unverified_header(good)["kid"]}
        ),
        "expired": token_of(issuer, now=now - 7200),
        "not yet valid": token_of(issuer, now=now + 600),
        "for another audience": token_of(issuer, audience="another"),
        "of another issuer": token_of(issuer, issuer="another"),
    }


async def refused_everywhere(asker: TokenHolder) -> None:
    for method, path in PATHS:
        more = {"json": CHAT} if method == "POST" else {}
        status, body = await asker.ask(method, path, **more)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key"), (method, path)


@pytest.mark.redis
async def test_forged_and_foreign_tokens_are_401_at_each_path(issuer: Issuer, empty_redis: RedisServer) -> None:
    """Before anything is read, looked up or stored."""
    async with serving(issuer, empty_redis) as gateway:
        with plain_redis.Redis.from_url(empty_redis.url) as client:
            for token in forgeries(issuer).values():
                await refused_everywhere(gateway.holder(token))
            own = (
                b"causeway:permits:",
                b"causeway:tenants:gateways",
                b"causeway:layout",
                b"causeway:jobs:layout",
                b"{causeway}:jobs:layout",
            )
            assert [key for key in client.scan_iter() if not key.startswith(own)] == []
        assert (await gateway.asker("acme").ask("GET", "/v1/models"))[0] == 200


@pytest.mark.redis
async def test_revoked_token_is_401_at_each_path(issuer: Issuer, empty_redis: RedisServer) -> None:
    """Another token of the same device still works."""
    token = token_of(issuer)
    claims = jwt.decode(token, options={"verify_signature": False})
    async with serving(issuer, empty_redis, revocations_refresh_s=0.05) as gateway:
        asker = gateway.holder(token)
        assert (await asker.ask("GET", "/v1/models"))[0] == 200
        async with redis.asyncio.Redis.from_url(empty_redis.url) as client:
            await revoke_token(client, claims["jti"], expiry=claims["exp"], now=time.time())
        while (await asker.ask("GET", "/v1/models"))[0] == 200:  # noqa: ASYNC110  (it takes the gateway a moment)
            await asyncio.sleep(0.01)
        await refused_everywhere(asker)
        assert (await gateway.asker("acme").ask("GET", "/v1/models"))[0] == 200


@pytest.mark.redis
async def test_tokens_of_a_removed_key_are_refused_at_each_path(issuer: Issuer, empty_redis: RedisServer) -> None:
    """Also if the gateway accepted one a moment before."""
    token = token_of(issuer)
    issuer.add("second")
    async with serving(issuer, empty_redis) as gateway:
        asker = gateway.holder(token)
        assert (await asker.ask("GET", "/v1/models"))[0] == 200
        remove_key(issuer.key_file, jwt.get_unverified_header(token)["kid"])
        while (await asker.ask("GET", "/v1/models"))[0] == 200:  # noqa: ASYNC110  (it takes the gateway a moment)
            await asyncio.sleep(0.01)
        await refused_everywhere(asker)
