"""The daemon on each bad day of its cloud, on real sockets."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bad_days import RETRY_AFTER_S, bad_days
from tests.waiting import until

from ..device import hasty, running
from ..raw_upstream import RawUpstream
from ..scripted import EDGE_WORDS

DAYS = bad_days()
EARLY = [name for name, day in DAYS.items() if day.code]
CODES = {"a stall before tokens": "cloud_timeout", "a stall between tokens": "cloud_timeout"}
"""Codes of the attempt's error where they are not the day's."""


@pytest.mark.parametrize("name", DAYS)
async def test_a_client_gets_what_there_is_and_one_end(tmp_path: Path, name: str) -> None:
    """There is one outcome, and nothing runs on."""
    day, upstream = bad_days()[name], RawUpstream()
    async with running(tmp_path, cloud=upstream, policy=hasty("large")) as device:
        upstream.replies, upstream.stalls = [day.sent], day.stalls
        answer = await device.ask(tags="cloud", stream=True, headers={"x-causeway-prefer": "only_cloud"})
        code = CODES.get(name, day.code or day.late)
        record = await device.record(answer)
        assert [attempt.error for attempt in record.outcome.attempts] == [code]
        if day.code:
            assert answer.status in (day.status, 503), answer.body
        else:
            assert answer.status == 200, answer.body
            assert answer.text == day.text
            error = answer.events[-1].get("error", {})
            assert error.get("code", "") == code
            assert answer.finish_reasons == ([] if day.late else ["stop"])
        if day.status == 429:
            assert RETRY_AFTER_S - 2 <= int(answer.headers["Retry-After"]) <= RETRY_AFTER_S
        assert len(upstream.bodies) == 1
        await until(lambda: upstream.running == 0)


@pytest.mark.parametrize("name", EARLY)
async def test_the_device_takes_over_before_the_first_token(tmp_path: Path, name: str) -> None:
    day, upstream = bad_days()[name], RawUpstream()
    async with running(tmp_path, cloud=upstream, policy=hasty("large")) as device:
        upstream.replies, upstream.stalls = [day.sent], day.stalls
        answer = await device.ask(tags="cloud", stream=True)
        assert (answer.status, answer.text) == (200, "".join(EDGE_WORDS)), answer.body
        assert answer.headers["x-causeway-target"] == "small"
        assert len(device.engine.calls) == 1
        await until(lambda: upstream.running == 0)
