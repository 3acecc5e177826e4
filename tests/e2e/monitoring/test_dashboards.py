"""Each panel has data on a bed of real programs, and each rule is evaluated there."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.redis_server import RedisServer, redis_server

from .bed import Bed, running
from .files import DASHBOARDS, PAGE, SERIES, Query, alerts, queries
from .test_alerts import exported

__all__ = ["redis_server"]

QUERIES = [query for path in DASHBOARDS for query in queries(path)]
PATIENCE_S = 60.0


def test_each_panel_asks_for_series_that_exist_and_is_on_the_page() -> None:
    page, names = PAGE.read_text(), exported()
    assert len(DASHBOARDS) == 4
    for query in QUERIES:
        assert set(SERIES.findall(query.expression)) <= names, query
        assert f"| {query.panel} |" in page
        assert "$" not in query.expression


async def without_data(bed: Bed, asked: Sequence[Query]) -> list[Query]:
    """Return the queries that have no series, or only NaN."""
    missing = []
    for query in asked:
        result: list[dict[str, Any]] = (await bed.answers("query", query=query.expression))["result"]
        if not any(math.isfinite(float(series["value"][1])) for series in result):
            missing.append(query)
    return missing


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.redis
async def test_each_panel_has_data_and_each_rule_is_evaluated(tmp_path: Path, redis_server: RedisServer) -> None:
    async with running(tmp_path, redis_server) as bed:
        missing, ends = QUERIES, time.monotonic() + PATIENCE_S
        while missing and time.monotonic() < ends:
            await bed.round()
            await asyncio.sleep(0.5)  # a scrape
            missing = await without_data(bed, missing)
        assert missing == []
        groups = (await bed.answers("rules"))["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        assert {rule["name"] for rule in rules} == {alert.name for alert in alerts()}
        assert {rule["name"]: rule["lastError"] for rule in rules if rule["health"] != "ok"} == {}
