"""The state folder: one daemon at a time, and what it keeps when the daemon is killed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from edge_node.app import build
from edge_node.config.schema import ServerConfig
from router.errors import ConfigError

from .box import config, running
from .scripted import ScriptedCloud, ScriptedEngine
from .test_app import cloud_only, daemon


async def test_a_second_daemon_on_one_state_folder_is_refused(tmp_path: Path) -> None:
    """The message names the folder, the process and what to do; the first daemon keeps answering."""
    async with running(tmp_path) as box:
        second = build(config(tmp_path), make_engine=lambda _: ScriptedEngine(), environ={})
        with pytest.raises(ConfigError) as refused:
            await second.start()
        for text in (f"process {os.getpid()}", str(tmp_path / "state"), "--state-dir"):
            assert text in refused.value.message
        assert (await box.ask()).status == 200
    after = build(config(tmp_path), make_engine=lambda _: ScriptedEngine(), environ={})
    await after.start()
    await after.close()


@pytest.mark.slow
async def test_a_killed_daemon_leaves_no_lock(tmp_path: Path) -> None:
    cloud = await ScriptedCloud().start()
    settings = cloud_only(tmp_path, cloud.url)
    async with daemon(tmp_path, settings) as (process, _):
        process.kill()
        await process.wait()
    async with daemon(tmp_path, settings):
        pass
    await cloud.stop()


async def test_a_failed_start_leaves_no_lock(tmp_path: Path) -> None:
    bad = build(config(tmp_path, policy="version: 1\n"), make_engine=lambda _: ScriptedEngine(), environ={})
    with pytest.raises(ConfigError):
        await bad.start()
    async with running(tmp_path, server=ServerConfig(port=0)) as box:
        assert (await box.ask()).status == 200


async def test_a_folder_that_cannot_be_locked_does_not_stop_the_daemon(tmp_path: Path) -> None:
    """A read-only folder or a full disk: answers come from memory."""
    (tmp_path / "state" / "lock").mkdir(parents=True)
    async with running(tmp_path) as box:
        assert (await box.ask()).status == 200
