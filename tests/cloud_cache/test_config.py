"""The cache's part of the gateway's configuration, checked at the start."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from cloud_pool.app import build
from cloud_pool.cache.config import CacheConfig
from cloud_pool.config.loader import Flags, load_config
from router.errors import ConfigError


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
def test_faulty_settings_are_refused(tmp_path: Path, text: str, where: str) -> None:
    """With the key's path, and the file's line."""
    path = tmp_path / "gateway.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(path, Flags())
    assert where in refused.value.where
    assert str(path) in refused.value.where


@pytest.mark.parametrize("secret", [None, b"short"])
async def test_a_secret_that_is_none_is_refused(tmp_path: Path, secret: bytes | None) -> None:
    """A secret file that is missing, or holds next to nothing, stops the gateway before it listens."""
    path = tmp_path / "gateway.yaml"
    path.write_text("redis: redis://127.0.0.1:1/0\ncache: {enabled: true, secret_file: secret}")
    if secret is not None:
        (tmp_path / "secret").write_bytes(secret)
    config = load_config(path, Flags())
    assert config.cache.secret_file == str(tmp_path / "secret")
    async with anyio.create_task_group() as tasks:
        with pytest.raises(ConfigError, match=r"cache\.secret_file"):
            build(config, tasks)


async def test_a_whole_gateway_starts_with_a_cache(tmp_path: Path) -> None:
    """With a secret, and with a Redis that is away."""
    path = tmp_path / "gateway.yaml"
    path.write_text("server: {port: 0}\nredis: redis://127.0.0.1:1/0\ncache: {enabled: true, secret_file: secret}")
    (tmp_path / "secret").write_bytes(b"x" * 32)
    async with anyio.create_task_group() as tasks:
        app = build(load_config(path, Flags()), tasks)
        await app.start()
        await app.stop()
    await app.close()


@pytest.mark.parametrize(
    ("redis_timeout_s", "lease_s", "patient_s"), [(0.05, 3.0, 0.5), (0.05, 1.0, 0.25), (0.7, 3.0, 0.7), (0.2, 0.8, 0.2)]
)
def test_what_can_wait_gives_redis_more_time(redis_timeout_s: float, lease_s: float, patient_s: float) -> None:
    """Jobs do not miss a kept answer over milliseconds; and never less time than was configured."""
    patient = CacheConfig(enabled=True, redis_timeout_s=redis_timeout_s, lease_s=lease_s).for_background()
    assert patient.redis_timeout_s == patient_s
    patient.check("redis://x")
