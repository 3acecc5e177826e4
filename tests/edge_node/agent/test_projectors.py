"""Bundles with a projector: tried before the device changes, counted into its memory, shared and removed as all
files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import msgspec
import psutil
import pytest

from causeway_server.edge_node.agent.interfaces import AgentSettings, FleetLink
from causeway_server.edge_node.agent.source import FolderSource
from causeway_server.edge_node.app import App, build
from causeway_server.edge_node.config.schema import EngineConfig
from causeway_server.models.catalog.artifact import find_artifact, sha256_of
from causeway_server.models.catalog.projector import find_projector
from causeway_server.models.llama_cpp.protocol import adapter_files
from causeway_server.router.bundle.protocol import DeviceState
from tests.edge_node.parts.test_fusion import INVOICE, PATIENT, encoder
from tests.models.llama_cpp.tiny_adapter import write_tiny_adapter
from tests.models.llama_cpp.tiny_gguf import write_tiny_gguf
from tests.models.llama_cpp.tiny_mmproj import LANGUAGE, MARKS, Family, needs_mtmd, write_tiny_mmproj
from tests.models.parts.test_decoding import needs_pillow
from tests.models.parts.test_soft_tokens import solid

from ..device import config
from .fleet import FACTORY, Publisher, TestDevice, member
from .test_daemon import TRIAL, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.engine]
FAMILY: Family = "gemma3"
SEES = """\
version: 1
name: sees
targets:
  small: {at: edge, model: m-small, can: [chat, completion, embedding]}
routes:
  - {name: device, fusion: early, use: [small]}
"""
MODEL = "    models:\n      m-small: {{file: model.gguf, projector: {{{}}}}}\n"


def write_vision_model(folder: Path, *, dimensions: int = 64) -> str:
    """Write a tiny vision model; return the `extra` of a bundle with it."""
    write_tiny_gguf(folder / "model.gguf", architecture=LANGUAGE[FAMILY], marks=MARKS[FAMILY], window=512)
    write_tiny_mmproj(folder / "mmproj.gguf", FAMILY, dimensions=dimensions)
    return MODEL.format("file: mmproj.gguf")


@needs_mtmd
@needs_pillow
async def test_a_bundle_brings_an_mmproj_file(publisher: Publisher, device: TestDevice) -> None:
    """The model finds it as a file of the store, which stays while a kept bundle needs it."""
    bundle = publisher.release(extra=write_vision_model(publisher.path))
    await device.change()
    dirs = [device.booted.store.load(bundle).models]
    found = find_projector("m-small", dirs)
    assert found is not None
    blobs = device.folder / "store" / "blobs"
    assert {found.path.parent, found.model.parent} == {blobs}
    assert found.path.name == sha256_of(publisher.path / "mmproj.gguf")
    for kept in (True, False):
        publisher.release()
        await device.change()
        assert found.path.exists() is kept


@needs_mtmd
@needs_pillow
async def test_the_process_of_a_projector_ends_with_the_bundle_that_needs_it(
    publisher: Publisher, tmp_path: Path
) -> None:
    """A real daemon; the next bundle names another model, and the process held its memory until the daemon's end."""
    (publisher.path / "other").mkdir()
    write_tiny_gguf(publisher.path / "other" / "model.gguf")
    first = publisher.release(policy=SEES, extra=write_vision_model(publisher.path))
    engine = EngineConfig(threads=1, sequences=2, model_dirs=(str(tmp_path / "none"),))
    async with daemon(tmp_path, publisher, engine) as app:
        await wait_for(app, DeviceState.TRIAL, first)
        assert await ask(app, solid(0)) == (200, "image=ok")
        (child,) = projector_children()
        for _ in range(6):
            await ask(app)
        await wait_for(app, DeviceState.IDLE, first)
        assert child.is_running()
        second = publisher.release(model="m-other", extra="    models: {m-other: {file: other/model.gguf}}\n")
        await wait_for(app, DeviceState.TRIAL, second)
        assert not child.is_running()
        assert (await ask(app))[0] == 200
        assert projector_children() == []


def projector_children() -> list[psutil.Process]:
    """The processes of ours that have mtmd in memory."""
    ours = psutil.Process().children(recursive=True)
    return [one for one in ours if "libmtmd" in Path(f"/proc/{one.pid}/maps").read_text()]


@asynccontextmanager
async def daemon(tmp_path: Path, publisher: Publisher, engine: EngineConfig) -> AsyncIterator[App]:
    settings = config(tmp_path / "device", policy=FACTORY)
    (Path(settings.state_dir) / "fleet").mkdir(parents=True, exist_ok=True)
    link = FleetLink(
        member=lambda: member(publisher.root),
        source=FolderSource(publisher.folder),
        settings=AgentSettings(check_interval_s=0.2, retry_s=0.2, trial=TRIAL),
    )
    app = build(
        msgspec.structs.replace(settings, engine=engine, parts=PATIENT),
        environ={},
        fleet=link,
        encoders={"image": encoder(INVOICE)},
    )
    await app.start()
    try:
        yield app
    finally:
        await app.close()


async def ask(app: App, *parts: dict[str, object]) -> tuple[int, str]:
    """Return the status of an answer, and what became of its image."""
    content = [{"type": "text", "text": "hello"}, *parts]
    body = {"model": "auto", "messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 2}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{app.port}/v1/chat/completions", json=body) as response,
    ):
        if response.status != 200:
            raise AssertionError(await response.text())
        await response.read()
        return response.status, response.headers.get("x-causeway-modalities", "")


@needs_mtmd
@needs_pillow
async def test_an_mmproj_file_of_another_model_is_never_used(publisher: Publisher, device: TestDevice) -> None:
    bundle = publisher.release(extra=write_vision_model(publisher.path, dimensions=32))
    await device.until(DeviceState.IDLE)
    assert device.agent.row.quarantined[bundle].startswith("model_unusable: The projector of m-small: ")
    assert device.host.used == []


@needs_mtmd
async def test_the_process_of_a_projector_is_counted_into_the_memory(publisher: Publisher, device: TestDevice) -> None:
    """On this device the model alone would fit."""
    device.host.memory_bytes = 300 << 20
    bundle = publisher.release(extra=write_vision_model(publisher.path))
    await device.until(DeviceState.IDLE)
    reason = device.agent.row.quarantined[bundle]
    assert (reason.startswith("model_too_large: m-small with "), "for its projector" in reason) == (True, True)
    bundle = publisher.release(extra="    models: {m-small: {file: model.gguf}}\n")
    await device.until(DeviceState.TRIAL)


async def test_an_engine_loads_adapters_again_after_their_bundle_is_gone(
    publisher: Publisher, device: TestDevice
) -> None:
    """Bundles that keep the model keep its engine too, which opens its files again after a crash or an unload."""
    write_tiny_gguf(publisher.path / "model.gguf")
    write_tiny_adapter(publisher.path / "night.gguf")
    extra = "    models:\n      m-small: {file: model.gguf, adapters: {night: {file: night.gguf}}}\n"
    first = publisher.release(extra=extra)
    await device.change()
    (adapter,) = adapter_files(find_artifact("m-small", [device.booted.store.load(first).models]))
    for _ in range(2):
        publisher.release(extra=extra)
        await device.change()
    assert not (device.folder / "bundles" / first).exists()
    assert sha256_of(Path(adapter.path)) == sha256_of(publisher.path / "night.gguf")
