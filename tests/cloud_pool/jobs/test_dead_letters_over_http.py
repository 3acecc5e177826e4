"""Dead letters at the operators' address of a whole gateway."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.job_store import JobStore
from causeway_server.cloud_pool.storage.record import NewJob
from causeway_server.router.errors import CloudFailed
from causeway_server.router.jobs.job import JobState
from tests.cloud_pool.accounts.identity.token_issuer import Issuer
from tests.cloud_pool.http.test_operator import serving, token


async def test_operators_list_retry_and_purge_dead_letters(
    config: JobsConfig, store: JobStore, new_job: Callable[..., NewJob], tmp_path: Path
) -> None:
    """With the scope admin only, and without content."""
    jobs = []
    for _ in range(2):
        jobs.append((await store.accept(new_job())).id)
        for _ in range(config.max_attempts):
            (record,) = (await store.claim("w", "large", ["standard"])).records
            await store.postpone(record.id, record.fence, CloudFailed("broken"), 0.0, counts=True)
            await store.promote_and_expire()
    issuer = Issuer(tmp_path)
    async with serving(identity=issuer.config, redis=config.redis, jobs=config) as (app, http):
        url, first, second = f"{app.operator_url}/dlq", *jobs
        admin = {"authorization": f"Bearer {token(issuer, 'admin')}"}
        for shown, status in (({}, 401), ({"authorization": f"Bearer {token(issuer, 'jobs')}"}, 403), (admin, 200)):
            async with http.get(url, headers=shown) as answer:
                assert answer.status == status
                text = await answer.text()
        assert "secret" not in text
        async with http.get(url, params={"limit": "1"}, headers=admin) as answer:
            (letter,) = (await answer.json())["data"]
        assert (letter["id"], letter["owner"], letter["code"]) == (second, "kiosk", "cloud_failed")
        for method, path, status in (
            ("GET", "?limit=0", 400),
            ("GET", "?limit=x", 400),
            ("POST", "", 405),
            ("GET", f"/{first}", 405),
            ("DELETE", f"/{first}/retry", 405),
            ("GET", f"/{first}/retry/again", 404),
            ("POST", "/job_nowhere/retry", 404),
            ("DELETE", "/job_nowhere", 404),
            ("POST", f"/{first}/retry", 200),
            ("POST", f"/{first}/retry", 404),
            ("DELETE", f"/{second}", 200),
        ):
            async with http.request(method, url + path, headers=admin) as answer:
                assert answer.status == status, (method, path)
        async with http.get(f"{app.url}/dlq", headers=admin) as answer:
            assert answer.status == 404, "not at the public address"
    assert (await store.get(first, "kiosk")).state is JobState.QUEUED
    assert await store.lookup(second) is None
