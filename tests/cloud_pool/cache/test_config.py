"""The `cache` section of the gateway's configuration."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from causeway_server.cloud_pool.app import build
from causeway_server.cloud_pool.cache.config import CacheConfig
from causeway_server.cloud_pool.config import Flags, load_config
from causeway_server.router.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("cache: {enabled: true}", "cache.enabled"),
        ("redis: redis://127.0.0.1:1/0\ncache: {enabled: true, lease_s: 0.1}", "cache.lease_s"),
        ("cache: {ttl_s: 0}", "cache.ttl_s"),
        ("cache: {lease_s: 60}", "cache.lease_s"),
        ("cache: {time_to_live: 5}", "cache.time_to_live"),
        ("cache: {key_prefix: 'a{b}'}", "cache.key_prefix"),
    ],
)
def test_error_names_key_and_line(tmp_path: Path, text: str, where: str) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(path, Flags())
    assert where in refused.value.where
    assert str(path) in refused.value.where


@pytest.mark.parametrize("secret", [None, b"short"])
async def test_missing_or_short_secret_is_an_error_at_start(tmp_path: Path, secret: bytes | None) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("redis: redis://127.0.0.1:1/0\ncache: {enabled: true, secret_file: secret}")
    if secret is not None:
        (tmp_path / "secret").write_bytes(secret)
    config = load_config(path, Flags())
    assert config.cache.secret_file == str(tmp_path / "secret")
    async with anyio.create_task_group() as tasks:
        with pytest.raises(ConfigError, match=r"cache\.secret_file"):
            build(config, tasks)


async def test_gateway_with_a_cache_starts_without_its_redis(tmp_path: Path) -> None:
    path = tmp_path / "gateway.yaml"
    path.write_text("server: {port: 0}\nredis: redis://127.0.0.1:1/0\ncache: {enabled: true, secret_file: secret}")
    (tmp_path / "secret").write_bytes(b"x" * 32)
    async with anyio.create_task_group() as tasks:
        app = build(load_config(path, Flags()), tasks)
        await app.start()
        await app.stop()
    await app.close()


@pytest.mark.parametrize(
    ("redis_timeout_s", "lease_s", "background_s"),
    [(0.05, 3.0, 0.5), (0.05, 1.0, 0.25), (0.7, 3.0, 0.7), (0.2, 0.8, 0.2)],
)
def test_background_work_gives_redis_more_time(redis_timeout_s: float, lease_s: float, background_s: float) -> None:
    """And never less than was configured."""
    background = CacheConfig(enabled=True, redis_timeout_s=redis_timeout_s, lease_s=lease_s).for_background()
    assert background.redis_timeout_s == background_s
    background.check("redis://x")
