"""Collections of garbage around the start of a process."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from causeway_server.router.serving.process import postpone_garbage_collection, tune_garbage_collector


@pytest.fixture(autouse=True)
def collector_as_before() -> Iterator[None]:
    threshold = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*threshold)
    gc.enable()


def test_collections_begin_again_once_the_process_is_ready() -> None:
    postpone_garbage_collection()
    assert not gc.isenabled()
    tune_garbage_collector()
    assert gc.isenabled()
    assert gc.get_freeze_count() > 0
