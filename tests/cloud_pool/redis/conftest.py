"""Deployments of Redis, each started once for a module."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.redis_deployments import Certificates, ClusterDeployment, SentinelDeployment, TlsServer, running


@pytest.fixture(scope="session", autouse=True)
def _needs_redis() -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server here")


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[SentinelDeployment]:
    """A master with one replica, for this test alone: tests kill servers."""
    with running(SentinelDeployment(tmp_path)) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterDeployment]:
    with running(ClusterDeployment(tmp_path_factory.mktemp("cluster"))) as deployment:
        yield deployment


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def tls_server(tmp_path: Path, certificates: Certificates) -> Iterator[TlsServer]:
    with running(TlsServer(tmp_path, certificates)) as server:
        yield server
