"""Every .lua file of the package is loaded by some module and accepted by Redis."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
import redis

from causeway_server.cloud_pool.accounts.identity.api_keys import CHANGE_SCRIPT
from causeway_server.cloud_pool.accounts.identity.revocation import RESTORE_REVOCATIONS_SCRIPT, REVOKE_SCRIPT
from causeway_server.cloud_pool.accounts.tenants.rate_limiter import (
    GATEWAYS_SCRIPT,
    RESTORE_SCRIPT,
    SETTLE_SCRIPT,
    TAKE_SCRIPT,
)
from causeway_server.cloud_pool.accounts.tenants.usage import ADD_USAGE_SCRIPT
from causeway_server.cloud_pool.cache.store import SCRIPTS as CACHE_SCRIPTS
from causeway_server.cloud_pool.redis.keys import load_script
from causeway_server.cloud_pool.storage.stores import SCRIPTS as JOB_SCRIPTS
from causeway_server.cloud_pool.streams.effects import STREAM_SCRIPTS
from tests.cloud_pool.jobs.redis_server import RedisServer

ACCOUNT_SCRIPTS = {
    "take": TAKE_SCRIPT,
    "settle": SETTLE_SCRIPT,
    "restore": RESTORE_SCRIPT,
    "gateways": GATEWAYS_SCRIPT,
    "add": ADD_USAGE_SCRIPT,
    "change_api_key": CHANGE_SCRIPT,
}
HEARTBEAT = load_script("causeway_server.cloud_pool.admission", "heartbeat")
EXCHANGE = load_script("causeway_server.cloud_pool.tiers", "exchange")
KEEP = load_script("causeway_server.cloud_pool.degradation", "keep_session")
WITHOUT_SHEBANG = {
    **CACHE_SCRIPTS,
    **ACCOUNT_SCRIPTS,
    "heartbeat": HEARTBEAT,
    "exchange": EXCHANGE,
    "keep_session": KEEP,
}
REVOCATION_SCRIPTS = {"revoke": REVOKE_SCRIPT, "restore_revocations": RESTORE_REVOCATIONS_SCRIPT}
WITH_SHEBANG = {**JOB_SCRIPTS, **STREAM_SCRIPTS, **REVOCATION_SCRIPTS}
LUA_FILES = sorted(Path(str(files("causeway_server.cloud_pool"))).rglob("*.lua"))


def _body(file: Path) -> str:
    text = file.read_text("utf-8")
    return text.partition("\n")[2] if text.startswith("#!") else text


@pytest.mark.parametrize("file", LUA_FILES, ids=lambda file: file.stem)
def test_a_lua_file_is_part_of_a_script(file: Path) -> None:
    assert any(_body(file) in script for script in (*WITH_SHEBANG.values(), *WITHOUT_SHEBANG.values()))


def test_redis_compiles_every_script(redis_server: RedisServer) -> None:
    with redis.Redis.from_url(redis_server.url) as client:
        for script in (*WITH_SHEBANG.values(), *WITHOUT_SHEBANG.values()):
            client.script_load(script)


def test_only_scripts_that_add_work_are_refused_when_redis_is_full() -> None:
    refused = {name for name, script in WITH_SHEBANG.items() if script.startswith("#!lua\n")}
    jobs = {"accept", "file_reserve", "batch_create", "batch_refuse_line", "append_text", "response_put"}
    assert refused == jobs | {"stream_claim", "stream_record"}
    assert all(WITH_SHEBANG[name].startswith("#!lua flags=allow-oom\n") for name in WITH_SHEBANG.keys() - refused)


def test_scripts_of_cache_and_tenants_have_no_shebang() -> None:
    """With one, Redis checks its memory before the script instead of at each write."""
    assert not any(script.startswith("#!") for script in WITHOUT_SHEBANG.values())
