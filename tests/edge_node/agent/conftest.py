from __future__ import annotations

from pathlib import Path

import pytest

from .fleet import Publisher, TestDevice


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(tmp_path / "fleet")


@pytest.fixture
def device(tmp_path: Path, publisher: Publisher) -> TestDevice:
    return TestDevice(tmp_path / "state", publisher)
