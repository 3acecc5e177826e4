from __future__ import annotations

from pathlib import Path

import pytest

from .fleet import Publisher, TestBox


@pytest.fixture
def publisher(tmp_path: Path) -> Publisher:
    return Publisher(tmp_path / "fleet")


@pytest.fixture
def box(tmp_path: Path, publisher: Publisher) -> TestBox:
    return TestBox(tmp_path / "state", publisher)
