"""The child process that verifies a fleet's files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from causeway_server.edge_node.agent.inspection import ChildInspector, UpdateCheckRequest
from causeway_server.edge_node.agent.source import FolderSource

from .fleet import COHORT, Publisher

pytestmark = pytest.mark.slow


class WatchingSource:
    """A folder; notes the environment of the child that asks for its files."""

    def __init__(self, folder: Path) -> None:
        self._source = FolderSource(folder)
        self.environments: list[dict[str, str]] = []

    async def fetch(self, path: str, offset: int = 0) -> AsyncIterator[bytes]:
        children = [
            one for one in psutil.Process().children() if "causeway_server.edge_node.agent.child" in one.cmdline()
        ]
        self.environments += [child.environ() for child in children]
        async for chunk in self._source.fetch(path, offset):
            yield chunk


async def test_the_child_has_no_secret_of_the_daemons(
    tmp_path: Path, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAUSEWAY_CLOUDS__MAIN__KEY", "secret")  # the environment is what is under test
    bundle = publisher.release()
    source = WatchingSource(publisher.folder)
    looked = await ChildInspector().check_updates(
        UpdateCheckRequest(
            folder=str(tmp_path / "tuf"),
            root=publisher.root.encode(),
            device="device-1",
            cohort=COHORT,
            running=None,
            known=(),
            daemon_version="0.1.0",
            not_before=0.0,
        ),
        source,
    )
    assert looked.wanted == bundle
    assert source.environments
    assert all("PATH" in environ and "secret" not in environ.values() for environ in source.environments)
