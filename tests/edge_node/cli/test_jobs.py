"""`causeway-edge jobs`."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from causeway_server.edge_node.cli.main import main
from causeway_server.edge_node.config.schema import OutboxConfig, OutboxWebhookConfig
from tests.cloud_pool.jobs.webhook_receiver import receiving
from tests.edge_node.device import Device, running
from tests.edge_node.jobs.cloud import JobCloud
from tests.edge_node.jobs.support import accepted, ended, view


async def call(device: Device, *arguments: str) -> Result:
    url = f"http://127.0.0.1:{device.app.port}"
    return await asyncio.to_thread(CliRunner().invoke, main, ["jobs", *arguments, "--url", url])


@pytest.mark.slow
async def test_dead_letters_are_listed_with_their_reason_retried_and_purged(tmp_path: Path) -> None:
    async with running(tmp_path, cloud=JobCloud(), jobs=OutboxConfig(max_attempts=1)) as device:
        device.engine.fault = "corrupt"
        job = await accepted(device, "a secret", tags="edge")
        await ended(device, job)
        device.engine.fault = "none"
        listed = await call(device, "list", "--status", "dead")
        assert (listed.exit_code, listed.stdout.split()) == (0, [job, "dead", "attempts", "1", "backend_error"])
        assert (await call(device, "list", "--status", "queued")).stdout == ""
        assert (await call(device, "retry", job)).exit_code == 0
        await ended(device, job)
        shown = await call(device, "show", job, "--format", "json")
        assert json.loads(shown.stdout)["answer"]["choices"][0]["text"] == "edge says so"
        assert (await call(device, "show", job)).stdout.endswith("edge says so\n")
        refused = await call(device, "retry", job)
        assert (refused.exit_code, "Only a dead letter can be retried" in refused.stderr) == (1, True)
        assert (await call(device, "purge", job)).exit_code == 0
        assert (await call(device, "show", job)).exit_code == 1


def test_an_unknown_status_is_a_usage_error() -> None:
    result = CliRunner().invoke(main, ["jobs", "list", "--status", "deadd"])
    assert (result.exit_code, "'dead'" in result.stderr) == (2, True)


def test_a_daemon_that_is_away_is_said() -> None:
    result = CliRunner().invoke(main, ["jobs", "list", "--url", "http://127.0.0.1:9"])
    assert (result.exit_code, "Cannot reach" in result.stderr) == (3, True)


async def test_the_webhook_of_a_job_is_shown_with_its_status(tmp_path: Path) -> None:
    here = OutboxWebhookConfig(allowed_networks=("127.0.0.0/8",), allow_http=True)
    async with receiving() as receiver, running(tmp_path, cloud=JobCloud(), jobs=OutboxConfig(webhooks=here)) as device:
        url = f"http://127.0.0.1:{receiver.port}/hook"
        waits = await accepted(device, webhook=url, not_before_ms=3_600_000)
        assert f"webhook after its end: {url}\n" in (await call(device, "show", waits)).stdout
        job = await accepted(device, webhook=url)
        await ended(device, job)
        async with asyncio.timeout(60.0):
            while (await view(device, job))["webhook_status"] == "pending":  # noqa: ASYNC110 -- the API has no event for it
                await asyncio.sleep(0.01)
        assert f"webhook delivered: {url}\n" in (await call(device, "show", job)).stdout
