"""Critical requests: by a header over HTTP, and always for jobs."""

from __future__ import annotations

import time
from contextlib import aclosing

import pytest

from causeway_server.cloud_pool.cache.caching_service import CachingService
from causeway_server.cloud_pool.http.request_admission import read_headers
from causeway_server.cloud_pool.jobs.worker.runner import JobRun, ServiceBackend
from causeway_server.router.errors import EngineUnavailable, InvalidRequest
from causeway_server.router.types import Chunk
from tests.cloud_pool.jobs.scripted_worker import running_record

from .scripted import CHAT, WORDS, Bed, ScriptedTriton, text_of


def test_the_critical_header_is_true_or_false_only() -> None:
    assert not read_headers({}.items()).critical
    assert read_headers({"x-causeway-critical": "true"}.items()).critical
    assert not read_headers({"x-causeway-critical": "false"}.items()).critical
    for value in ("", "yes", "True", "1"):
        with pytest.raises(InvalidRequest):
            read_headers({"x-causeway-critical": value}.items())


def job_run() -> JobRun:
    return JobRun(
        record=running_record("j", "acme/device"), request=CHAT, body_bytes=40, deadline=time.monotonic() + 60
    )


async def test_a_job_never_leaves_its_tier() -> None:
    bed = Bed({"large": ScriptedTriton(EngineUnavailable("gone")), "medium": ScriptedTriton()})
    runner = ServiceBackend(CachingService(None, bed.service.answer), bed.service.embed, bed.tiers, {})
    with pytest.raises(EngineUnavailable):
        async with aclosing(runner.reply(job_run())[1]) as chunks:
            [_ async for _ in chunks]
    assert not bed.tritons["medium"].requests
    bed.tritons["large"].script = WORDS
    for pressure in bed.pressure.values():
        pressure.is_saturated = True
    async with aclosing(runner.reply(job_run())[1]) as chunks:
        found = [chunk async for chunk in chunks if isinstance(chunk, Chunk)]
    assert text_of(found) == "".join(WORDS)
    assert bed.is_free
