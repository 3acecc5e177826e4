"""Clients with valid tokens of their own that try to reach what belongs to another owner."""

from __future__ import annotations

import json

import aiohttp
import pytest

from tests.cloud_pool.accounts.identity.token_issuer import Issuer
from tests.redis_server import RedisServer

from .whole import CHAT, Gateway, TokenHolder, serving

LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT}


def thieves(gateway: Gateway) -> dict[str, TokenHolder]:
    """Each differs from acme/kiosk in one thing, some in how it is spelled only."""
    return {
        "another tenant's device of the same name": gateway.asker("mallory"),
        "another device of the same tenant": gateway.asker("acme", "kiosk2"),
        "an owner that reads alike": gateway.asker("ac", "me-kiosk"),
        "in capitals": gateway.asker("ACME", "KIOSK"),
    }


async def belongings(owner: TokenHolder) -> tuple[str, str, str]:
    """A job, a file and a batch of it."""
    status, job = await owner.ask("POST", "/v1/jobs", json=CHAT, headers={"idempotency-key": "k"})
    assert status == 202, job
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", json.dumps(LINE).encode(), filename="in.jsonl")
    status, file = await owner.ask("POST", "/v1/files", data=form)
    assert status == 200, file
    ask = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    status, batch = await owner.ask("POST", "/v1/batches", json=ask)
    assert status == 200, batch
    return job["id"], file["id"], batch["id"]


def paths(job: str, file: str, batch: str) -> list[tuple[str, str]]:
    return [
        ("GET", f"/v1/jobs/{job}"),
        ("GET", f"/v1/jobs/{job}/events"),
        ("DELETE", f"/v1/jobs/{job}"),
        ("GET", f"/v1/files/{file}"),
        ("GET", f"/v1/files/{file}/content"),
        ("DELETE", f"/v1/files/{file}"),
        ("GET", f"/v1/batches/{batch}"),
        ("POST", f"/v1/batches/{batch}/cancel"),
    ]


@pytest.mark.redis
async def test_another_owners_objects_look_nonexistent(issuer: Issuer, empty_redis: RedisServer) -> None:
    """404 with the same words as for an unknown id: 403 would reveal that it exists."""
    async with serving(issuer, empty_redis) as gateway:
        owner = gateway.asker("acme")
        job, file, batch = await belongings(owner)
        absent = [each[:-4] + "0000" for each in (job, file, batch)]
        for name, thief in thieves(gateway).items():
            for (method, path), (_, none) in zip(paths(job, file, batch), paths(*absent), strict=True):
                status, body = await thief.ask(method, path)
                assert status == 404, (name, method, path)
                other = json.dumps((await thief.ask(method, none))[1])
                for mine, never in zip((job, file, batch), absent, strict=True):
                    other = other.replace(never, mine)
                assert body == json.loads(other), (name, method, path)
            for path in ("/v1/jobs", "/v1/files", "/v1/batches"):
                assert (await thief.ask("GET", path))[1]["data"] == [], (name, path)
        assert (await owner.ask("GET", f"/v1/jobs/{job}"))[1]["status"] == "queued"
        assert (await owner.ask("GET", f"/v1/files/{file}"))[0] == 200


@pytest.mark.redis
async def test_idempotency_keys_and_secrets_belong_to_one_owner(issuer: Issuer, empty_redis: RedisServer) -> None:
    async with serving(issuer, empty_redis) as gateway:
        owner = gateway.asker("acme")
        job, file, _ = await belongings(owner)
        (_, mine) = await owner.ask("GET", "/v1/webhooks/secret")
        for name, thief in thieves(gateway).items():
            status, other = await thief.ask("POST", "/v1/jobs", json=CHAT, headers={"idempotency-key": "k"})
            assert (status, other["id"] == job) == (202, False), name
            assert (await thief.ask("GET", "/v1/webhooks/secret"))[1]["secret"] != mine["secret"], name
            ask = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            assert (await thief.ask("POST", "/v1/batches", json=ask))[0] == 404, name


@pytest.mark.redis
@pytest.mark.parametrize("job", ["..", "job_1%2f..", "*", "job_1{x}", "a" * 200, "job_1%00", "job_1%0d%0ax"])
async def test_malformed_id_is_404_and_no_failure(issuer: Issuer, empty_redis: RedisServer, job: str) -> None:
    async with serving(issuer, empty_redis) as gateway:
        asker = gateway.asker("acme")
        for method, path in (("GET", f"/v1/jobs/{job}"), ("DELETE", f"/v1/jobs/{job}"), ("GET", f"/v1/files/{job}")):
            assert (await asker.ask(method, path))[0] in (400, 404, 405), path
