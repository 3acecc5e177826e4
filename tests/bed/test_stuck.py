"""A model process (stub) that dies at the worst moment: while Triton loads the model."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from causeway_server.cloud_pool.cli.triton import ENVIRONMENT

from .bed import SPEED, Replica


def is_ready(replica: Replica) -> bool:
    with grpc.insecure_channel(replica.address) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        try:
            return bool(stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=2.0).ready)
        except grpc.RpcError:
            return False


@pytest.mark.triton
@pytest.mark.slow
async def test_a_stub_that_dies_during_load_does_not_block_triton() -> None:
    """Triton would wait for the stub for ever with its ports closed: the launcher ends and restarts Triton."""
    if not (Path(os.environ.get("CAUSEWAY_TRITON_ENV", ENVIRONMENT)) / "triton.json").is_file():
        pytest.skip("no Triton environment: `make setup` makes it")
    with tempfile.TemporaryDirectory(prefix="bed-") as folder:
        replica = Replica(Path(folder), 1, "assistant-large", "paced", SPEED)
        try:
            replica.process.ready()
            server = replica.server
            assert server is not None
            server.kill()
            server.wait()
            while (stub := replica.stub) is None:
                await asyncio.sleep(0)
            stub.kill()
            async with asyncio.timeout(60.0):
                while not is_ready(replica):
                    await asyncio.sleep(0.1)
            assert replica.stub is not None
        finally:
            replica.process.kill()
