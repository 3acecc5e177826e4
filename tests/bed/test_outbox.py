"""The bed of a device's jobs in small: a real daemon, killed while it is offline and while it catches up."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import pytest

from .outbox import add_options, highest_rate, overtaken, run

pytestmark = pytest.mark.slow


async def test_jobs_of_a_killed_daemon_are_done_once(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    async with asyncio.timeout(300.0):
        figures = await run(parser.parse_args(["--jobs", "40", "--kills", "2", "--clients", "4"]), tmp_path)
    assert (figures["kills"], figures["lost"], figures["doubled"]) == (2, 0, 0)


def test_figures_see_a_storm_and_a_wrong_order() -> None:
    assert highest_rate([0.0, 1.0, 1.1, 1.2, 9.0]) == 4 / 5
    assert overtaken(["interactive-1", "bulk-1", "standard-1", "interactive-2", "bulk-2"]) == 2
