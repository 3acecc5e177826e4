"""TLS with client certificates, and ACL users whose passwords are in files."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import msgspec
import pytest
from click.testing import CliRunner
from redis.exceptions import RedisError

from causeway_server.cloud_pool.cache.config import CacheConfig
from causeway_server.cloud_pool.cli.main import main
from causeway_server.cloud_pool.redis.config import RedisConfig
from causeway_server.cloud_pool.redis.connect import open_redis
from causeway_server.cloud_pool.storage.config import JobsConfig
from causeway_server.cloud_pool.storage.durability import DurabilityCheck
from causeway_server.cloud_pool.storage.stores import JobStores
from causeway_server.router.errors import JobStoreUnavailable
from causeway_server.router.serving.tls import contexts
from tests.cloud_pool.cache.gateways import Clock, ask, gateway
from tests.cloud_pool.jobs.scripted_worker import RunningWorker, ScriptedRunner
from tests.ports import free_port
from tests.redis_deployments import Certificates, SentinelDeployment, TlsServer, running
from tests.waiting import until

from .test_sentinel import config_of, job, until_ended

pytestmark = [pytest.mark.redis, pytest.mark.slow]
JOBS_USER = ("reset", "on", ">first", "~causeway:jobs*", "+@all", "-@dangerous", "+info", "+config|get")


@pytest.fixture
def address(tls_server: TlsServer, certificates: Certificates, tmp_path: Path) -> RedisConfig:
    """The server's address for the user `jobs`, who may use the keys of jobs only."""
    with tls_server.client() as admin:
        admin.execute_command("ACL", "SETUSER", "jobs", *JOBS_USER)
        admin.execute_command("ACL", "SETUSER", "default", "off")
    password = tmp_path / "password"
    password.write_text("first\n")
    return RedisConfig(
        url=tls_server.url,
        username="jobs",
        password_file=str(password),
        ca_file=str(certificates.ca),
        cert_file=str(certificates.client),
        key_file=str(certificates.client_key),
    )


@pytest.fixture
async def stores(address: RedisConfig) -> AsyncIterator[JobStores]:
    stores = JobStores.open(JobsConfig(redis=address, lease_check_s=0.02, reclaim_interval_s=0.02))
    yield stores
    await stores.close()


async def test_jobs_run_over_tls_as_a_user_with_few_rights(address: RedisConfig, stores: JobStores) -> None:
    await DurabilityCheck(stores.database, "require").wait()
    accepted = await stores.jobs.accept(job(1))
    async with RunningWorker(stores.jobs, ScriptedRunner(), JobsConfig(redis=address, reclaim_interval_s=0.02)):
        await until_ended(stores, accepted.id)


async def test_a_changed_password_needs_no_restart(
    tls_server: TlsServer, address: RedisConfig, stores: JobStores
) -> None:
    """New connections read the file again."""
    await stores.jobs.accept(job(1))
    with tls_server.client(username="jobs", password="first") as client:
        assert client.ping()
    await anyio.Path(address.password_file).write_text("second")
    with pytest.raises(RedisError):
        await _ping(address)  # the server still has the first
    tls_server.kill()
    tls_server.start("--user", "jobs", "on", ">second", "~causeway:jobs*", "+@all")
    accepted = await stores.jobs.accept(job(1, id="job_other"))
    assert accepted.known
    await _ping(address)


async def _ping(address: RedisConfig) -> None:
    async with open_redis(address) as client:
        await client.ping()


async def test_the_cache_uses_tls_too(address: RedisConfig) -> None:
    config = CacheConfig(enabled=True, key_prefix="causeway:jobs-cache", redis_timeout_s=5.0, lease_s=20.0)
    async with gateway(address, config, Clock()) as one, gateway(address, config, Clock()) as other:
        one.script.permit(9)
        await one.ask(ask()).end()
        await until(lambda: not one.caching_service.generations)
        assert (await other.ask(ask()).end()).reply.status == "hit"


@pytest.mark.parametrize("missing", ["ca_file", "cert_file"])
async def test_an_untrusted_server_or_client_is_refused(address: RedisConfig, missing: str) -> None:
    gone = {"ca_file": ""} if missing == "ca_file" else {"cert_file": "", "key_file": ""}
    stores = JobStores.open(JobsConfig(redis=msgspec.structs.replace(address, **gone)))
    with pytest.raises(JobStoreUnavailable):
        await stores.jobs.accept(job(1))
    await stores.close()


async def test_a_new_connection_uses_new_certificates(
    address: RedisConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one client, too: redis-py's own connections keep the certificates of their first attempt."""
    monkeypatch.setattr(contexts, "_CHECK_S", 0.0)
    cert, key = tmp_path / "live.pem", tmp_path / "live.key"
    (tmp_path / "stranger").mkdir()
    stranger = Certificates(tmp_path / "stranger")
    shutil.copy(stranger.client, cert)
    shutil.copy(stranger.client_key, key)
    client = open_redis(msgspec.structs.replace(address, cert_file=str(cert), key_file=str(key)))
    with pytest.raises(RedisError):
        await client.ping()
    shutil.copy(address.cert_file, cert)
    shutil.copy(address.key_file, key)
    assert await client.ping()
    await client.aclose()


async def test_a_cluster_speaks_tls(certificates: Certificates, tmp_path: Path) -> None:
    """The node that is configured, and those that it names."""
    # The port of the cluster bus, by default 10,000 above, may be taken.
    bus = ("--tls-cluster", "yes", "--cluster-announce-ip", "127.0.0.1", "--cluster-port", str(free_port()))
    flags = ("--cluster-enabled", "yes", *bus)
    with running(TlsServer(tmp_path, certificates, *flags)) as server, server.client() as admin:
        admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        await until(lambda: "cluster_state:ok" in str(admin.execute_command("CLUSTER", "INFO")))
        known = RedisConfig(
            url=f"rediss+cluster://127.0.0.1:{server.port}",
            ca_file=str(certificates.ca),
            cert_file=str(certificates.client),
            key_file=str(certificates.client_key),
        )
        client = open_redis(known)
        await client.set("name", "value")
        assert await client.get("name") == b"value"
        await client.aclose()


async def test_sentinels_and_servers_may_have_passwords(tmp_path: Path) -> None:
    (tmp_path / "servers").write_text("of servers")
    (tmp_path / "sentinels").write_text("of sentinels")
    with running(SentinelDeployment(tmp_path, password="of servers", sentinel_password="of sentinels")) as deployment:
        known = RedisConfig(
            url=deployment.url,
            password_file=str(tmp_path / "servers"),
            sentinel_password_file=str(tmp_path / "sentinels"),
        )
        stores = JobStores.open(config_of(deployment, redis=known))
        await stores.jobs.accept(job(1))
        await stores.close()
        for wrong in ({"password_file": ""}, {"sentinel_password_file": ""}):
            without = JobStores.open(config_of(deployment, redis=msgspec.structs.replace(known, **wrong)))
            with pytest.raises(JobStoreUnavailable):
                await without.jobs.accept(job(2))
            await without.close()


async def test_commands_reach_a_redis_of_the_configuration(
    tls_server: TlsServer, address: RedisConfig, tmp_path: Path
) -> None:
    """`keys revoke`, `keys show` and `usage` with the gateways' file, which names the user and the certificates."""
    with tls_server.client(username="jobs", password="first") as admin:
        assert admin.ping()
    (tmp_path / "gateway.yaml").write_text(json.dumps({"redis": msgspec.to_builtins(address)}))
    tls_server.kill()
    tls_server.start("--user", "jobs", "on", ">first", "~causeway:*", "+@all")
    options = ("--config", str(tmp_path / "gateway.yaml"))
    for arguments, printed in (
        (("keys", "revoke", *options, "--device", "acme/kiosk"), "Revoked all tokens of acme/kiosk"),
        (("keys", "show", *options), "acme/kiosk"),
        (("usage", *options, "acme"), "acme has no recorded usage"),
        (("usage", "acme"), "Give --redis"),
    ):
        found = await asyncio.to_thread(CliRunner().invoke, main, list(arguments))
        assert printed in found.output, arguments
