"""Triton's port changes nothing that is served, except for a caller with the key. On a real Triton."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import grpc
import psutil
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from causeway_server.cloud_pool.triton_server.server_process import Ports, choose_ports, command, find_environment
from causeway_server.cloud_pool.upstreams.clients import UpstreamClients
from causeway_server.cloud_pool.upstreams.triton.client import TritonClient
from causeway_server.cloud_pool.upstreams.triton.model_control import (
    HEADER,
    default_key_file,
    ensure_key,
    read_key,
    restriction,
)
from causeway_server.edge_node.cli.doctor.network import check_triton
from causeway_server.router.errors import ConfigError
from tests.ports import free_port
from tests.waiting import until

from ..conftest import Pool

pytestmark = [pytest.mark.slow, pytest.mark.triton]
KEY = "a-key-of-this-test-alone"
CONTROL = (
    ("RepositoryIndex", service_pb2.RepositoryIndexRequest()),
    ("RepositoryModelUnload", service_pb2.RepositoryModelUnloadRequest(model_name="assistant-large")),
    ("RepositoryModelLoad", service_pb2.RepositoryModelLoadRequest(model_name="assistant-large")),
    ("SystemSharedMemoryRegister", service_pb2.SystemSharedMemoryRegisterRequest(name="a", key="/a", byte_size=1)),
    ("SystemSharedMemoryStatus", service_pb2.SystemSharedMemoryStatusRequest()),
    ("ModelConfig", service_pb2.ModelConfigRequest(name="assistant-large")),
    ("ModelStatistics", service_pb2.ModelStatisticsRequest()),
    ("TraceSetting", service_pb2.TraceSettingRequest()),
    ("LogSettings", service_pb2.LogSettingsRequest()),
)


@pytest.mark.parametrize(("call", "request_message"), CONTROL, ids=[name for name, _ in CONTROL])
@pytest.mark.parametrize("metadata", [(), ((HEADER, "another-key-than-its-own"),)], ids=["no-key", "wrong-key"])
async def test_calls_that_change_or_reveal_what_is_served_need_the_key(
    pool: Pool, call: str, request_message: object, metadata: tuple[tuple[str, str], ...]
) -> None:
    async with grpc.aio.insecure_channel(pool.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await getattr(stub, call)(request_message, metadata=metadata)
        assert "restricted" in str(refused.value.details())
        ready = service_pb2.ModelReadyRequest(name="assistant-large")
        assert (await stub.ModelReady(ready)).ready  # Health needs no key.


async def test_the_key_of_the_account_opens_its_model_control(pool: Pool) -> None:
    key = read_key(default_key_file())
    async with grpc.aio.insecure_channel(pool.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        index = await stub.RepositoryIndex(service_pb2.RepositoryIndexRequest(), metadata=((HEADER, key),))
    assert [one.name for one in index.models] == ["assistant-large"]


def test_triton_listens_on_loopback_alone_and_speaks_no_http_but_metrics(pool: Pool) -> None:
    listening = [one for one in pool.server.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    assert {f"127.0.0.1:{one.laddr.port}" for one in listening} == {pool.grpc, pool.metrics}
    assert {one.laddr.ip.removeprefix("::ffff:") for one in listening} == {"127.0.0.1"}


def test_no_other_account_can_read_the_key(pool: Pool) -> None:
    """Triton takes the key from its command line, which `ps` shows to every account."""
    path = default_key_file()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_key(path) not in " ".join(pool.server.cmdline())


def test_triton_and_its_models_get_no_variable_of_the_launchers(pool: Pool) -> None:
    """The environment of a launcher may hold passwords; that of these tests names Triton's folder."""
    assert "CAUSEWAY_TRITON_ENV" in psutil.Process(pool.command.process.pid).environ()
    for process in (pool.server, pool.stub):
        assert not [name for name in process.environ() if name.startswith("CAUSEWAY_")]


@asynccontextmanager
async def not_ours(environment: Path, folder: Path, options: tuple[str, ...]) -> AsyncIterator[str]:
    """A Triton without models, and its address."""
    ports = choose_ports(Ports(grpc=0, metrics=0))
    found = find_environment(environment)
    (folder / "models").mkdir()
    argv = command(found, folder / "models", (), ports, drain_s=1.0, prefix="causeway_not_ours", key=KEY)
    argv = [word for word in argv if word != restriction(KEY)] + list(options)
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(argv, env=found.environ(os.environ), stdout=log, stderr=log)  # noqa: ASYNC220
    try:
        yield f"127.0.0.1:{ports.grpc}"
    finally:
        server.terminate()
        await asyncio.to_thread(server.wait)


@asynccontextmanager
async def watching(
    environment: Path, folder: Path, key_file: Path, *, restricted: bool
) -> AsyncIterator[tuple[UpstreamClients, str]]:
    """A gateway's clients, and the address of a Triton that is not ours."""
    options = (restriction(KEY),) if restricted else ()
    async with not_ours(environment, folder, options) as address, anyio.create_task_group() as tasks:
        clients = UpstreamClients(tasks, lambda model: None, key_file=key_file)
        yield clients, address
        await clients.close()
        tasks.cancel_scope.cancel()


async def test_doctor_warns_of_a_triton_whose_http_is_open(triton_environment: Path, tmp_path: Path) -> None:
    port = free_port()
    as_shipped = ("--allow-http=true", "--http-address=127.0.0.1", f"--http-port={port}")
    async with not_ours(triton_environment, tmp_path, as_shipped) as address, grpc.aio.insecure_channel(address) as it:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(it)
        await stub.ServerReady(service_pb2.ServerReadyRequest(), wait_for_ready=True)
        (finding,) = await asyncio.to_thread(lambda: list(check_triton(f"http://127.0.0.1:{port}")))
        assert finding.level == "warn"
        assert "allows model control to any program" in finding.found
    assert list(check_triton(f"http://127.0.0.1:{port}")) == []  # It is gone.


def test_doctor_says_nothing_of_our_triton(pool: Pool) -> None:
    assert list(check_triton(f"http://{pool.metrics}")) == []


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, logger="causeway_server"):
        yield caplog


async def test_a_gateway_warns_of_a_triton_whose_model_control_is_open(
    triton_environment: Path, tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    """Also of one that starts after the gateway, as this one does."""
    async with watching(triton_environment, tmp_path, tmp_path / "none", restricted=False) as (clients, address):
        clients.get(address)
        await until(lambda: bool(warnings.messages))
    assert f"Triton at {address}: its model control is open" in warnings.messages[0]


async def test_a_gateway_warns_of_a_triton_that_refuses_its_key(
    triton_environment: Path, tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    ensure_key(tmp_path / "key")
    async with watching(triton_environment, tmp_path, tmp_path / "key", restricted=True) as (clients, address):
        clients.get(address)
        await until(lambda: bool(warnings.messages))
    assert "refuses the key of its model control" in warnings.messages[0]


async def test_a_gateway_says_nothing_of_a_triton_that_takes_its_key(
    triton_environment: Path, tmp_path: Path, warnings: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "key").write_text(KEY)
    (tmp_path / "key").chmod(0o600)
    async with watching(triton_environment, tmp_path, tmp_path / "key", restricted=True) as (clients, address):
        triton = clients.get(address)
        assert isinstance(triton, TritonClient)
        await triton.check_model_control()
    assert not warnings.messages


def test_a_key_is_random_and_kept(tmp_path: Path) -> None:
    made = ensure_key(tmp_path / "folder" / "key")
    assert ensure_key(tmp_path / "folder" / "key") == made
    assert ensure_key(tmp_path / "other") != made
    assert stat.S_IMODE((tmp_path / "folder").stat().st_mode) == 0o700


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [("short", 0o600, "at least 16"), (f"a:{KEY}", 0o600, "no space"), (KEY, 0o644, "Every account can read")],
)
def test_a_weak_key_is_refused(tmp_path: Path, content: str, mode: int, said: str) -> None:
    path = tmp_path / "key"
    path.write_text(content)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=said):
        ensure_key(path)


def test_a_key_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError):
        ensure_key(tmp_path / "key")
    assert not (tmp_path / "elsewhere").exists()
