"""A client asks for a model with one of its LoRA adapters: a real daemon, engine child and adapter."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from causeway_server.edge_node.agent.dry_run import describe
from causeway_server.edge_node.app import build
from causeway_server.edge_node.config.schema import EngineConfig
from causeway_server.models.catalog.artifact import AdapterEntry, Answers, Artifact, save_manifest, sha256_of
from causeway_server.models.publish.publish import publish_gguf
from causeway_server.router.bundle.manifest import Blob, BundleAdapter, BundleModel
from tests.models.llama_cpp.tiny_adapter import write_tiny_adapter
from tests.models.llama_cpp.tiny_gguf import write_tiny_gguf
from tests.waiting import until

from ..device import POLICY, Device, config
from ..scripted import ScriptedCloud, ScriptedEngine

pytestmark = [pytest.mark.engine, pytest.mark.slow]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


def with_adapter(model: Artifact, name: str, seed: int, answers: Answers | None = None) -> Artifact:
    """Put an adapter into the manifest, as `add_adapter` does once it has checked the file."""
    file = write_tiny_adapter(model.folder / f"{name}.gguf", seed)
    entry = AdapterEntry(file.name, sha256_of(file), file.stat().st_size, answers=answers)
    manifest = msgspec.structs.replace(model.manifest, adapters=model.manifest.adapters | {name: entry})
    return save_manifest(manifest, model.folder)


@asynccontextmanager
async def real_device(tmp_path: Path, answers: Answers = "text") -> AsyncIterator[tuple[Device, Artifact]]:
    """A device without a cloud, whose model `tiny` has the adapter `kiosk`."""
    folder = tmp_path / "models"
    weights = write_tiny_gguf(tmp_path / "tiny.gguf")
    model = with_adapter(publish_gguf(weights, "tiny", folder, answers=answers), "kiosk", 1)
    settings = config(tmp_path, policy=POLICY.replace("m-small", "tiny").replace("20s", "60s").replace("25s", "60s"))
    engine = EngineConfig(model_dirs=(str(folder),), threads=1, sequences=4)
    app = build(msgspec.structs.replace(settings, engine=engine), environ={})
    await app.start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{app.port}") as session:
            yield Device(app, ScriptedEngine(), ScriptedCloud(), session), model
    finally:
        await app.close()


async def test_a_client_asks_for_an_adapter_by_its_name(tmp_path: Path) -> None:
    """Behind the target's name or the model's; the cache keeps the answers apart."""
    async with real_device(tmp_path) as (device, _):
        models = (await device.get("/v1/models")).json["data"]
        assert [(model["id"], model["owned_by"]) for model in models][1:] == [
            ("small", "edge"),
            ("large", "cloud"),
            ("small+kiosk", "edge"),
        ]
        assert (await device.get("/v1/models/small+kiosk")).json["id"] == "small+kiosk"
        answers: dict[str, str] = {}
        for name in ("small", "small+kiosk", "tiny+kiosk", "tiny", "small+kiosk"):
            answer = await device.ask(model=name, **GREEDY)
            assert answer.status == 200, answer.message
            answers.setdefault(name, answer.json["choices"][0]["message"]["content"])
            record = await device.record(answer)
            assert record.outcome.target == ("small+kiosk" if "+" in name else "small")
        assert answers["small+kiosk"] == answers["tiny+kiosk"] != answers["tiny"] == answers["small"]
        assert 'target="small+kiosk"' in (await device.get("/metrics")).body.decode()
        device.assert_nothing_leaks()


async def test_a_policy_s_target_names_an_adapter(tmp_path: Path) -> None:
    """`auto` is answered with it; a policy that names one which is not there changes nothing."""
    policy = POLICY.replace("m-small", "tiny").replace("20s", "60s").replace("25s", "60s")
    async with real_device(tmp_path) as (device, _):
        plain, named = [
            (await device.ask(model=model, **GREEDY)).json["choices"][0]["message"]["content"]
            for model in ("small", "small+kiosk")
        ]
        file = Path(device.parts.policies.report.file)
        for adapter, refused in (("kiosk", ""), ("shop", "tiny has no adapter `shop`. Available: kiosk")):
            await asyncio.to_thread(file.write_text, policy.replace("model: tiny", f"model: tiny+{adapter}"))
            await device.parts.policies.reload()
            assert refused in device.parts.policies.report.refused
            answer = await device.ask(model="auto", **GREEDY)
            assert answer.json["choices"][0]["message"]["content"] == named != plain
        assert (await device.record(answer)).outcome.target == "small"
        device.assert_nothing_leaks()


async def test_an_unknown_adapter_is_a_404_that_names_those_there_are(tmp_path: Path) -> None:
    """An adapter that is added is offered after the policy is loaded again."""
    async with real_device(tmp_path) as (device, model):
        for name in ("small+shop", "small+", "+kiosk", "small+kiosk+kiosk", "large+kiosk"):
            answer = await device.ask(model=name)
            assert (answer.status, answer.code) == (404, "model_not_found")
            assert "auto, small, large, small+kiosk" in answer.message
        with_adapter(model, "shop", 2)
        await device.parts.policies.reload()
        engines = device.parts.engines
        assert engines is not None
        await until(lambda: engines.state == "ready")
        texts = [
            (await device.ask(model=name, **GREEDY)).json["choices"][0]["message"]["content"]
            for name in ("small+shop", "small+kiosk", "small")
        ]
        assert len(set(texts)) == 3


async def test_an_adapter_whose_answers_are_calls_gets_the_call_grammar(tmp_path: Path) -> None:
    """Greedy without a temperature, with arguments of the user's words; the model without it answers as before."""
    async with real_device(tmp_path) as (device, model):
        before = (await device.ask(model="small", **GREEDY)).json["choices"][0]["message"]["content"]
        with_adapter(model, "commands", 2, "calls")
        await device.parts.policies.reload()
        engines = device.parts.engines
        assert engines is not None
        await until(lambda: engines.state == "ready")
        words = [{"role": "user", "content": "turn on the kitchen light"}]
        texts = [
            (await device.ask(model="small+commands", messages=words)).json["choices"][0]["message"]["content"]
            for _ in range(2)
        ]
        call = msgspec.json.decode(texts[0])
        assert call.keys() == {"name", "arguments"}
        lists = (one if isinstance(one, list) else [one] for one in call["arguments"].values())
        values = [value for one in lists for value in one]
        assert all(value in "turn on the kitchen light" for value in values)
        assert texts[0] == texts[1]
        assert (await device.ask(model="small", **GREEDY)).json["choices"][0]["message"]["content"] == before


async def test_an_adapter_answers_in_the_form_of_its_model(tmp_path: Path) -> None:
    """Where its manifest, or the bundle that brings it, names none: a model of calls keeps its grammar."""
    async with real_device(tmp_path, "calls") as (device, model):
        words = [{"role": "user", "content": "turn on the kitchen light"}]
        answer = await device.ask(model="small+kiosk", messages=words, temperature=0, max_tokens=256)
        assert answer.status == 200, answer.message
        assert msgspec.json.decode(answer.json["choices"][0]["message"]["content"]).keys() == {"name", "arguments"}
    blob = Blob(model.manifest.sha256, model.manifest.size_bytes)
    entry = model.manifest.adapters["kiosk"]
    brought = BundleAdapter("kiosk", Blob(entry.sha256, entry.size_bytes), 1.0, ())
    described = describe(BundleModel("tiny", blob, (), (brought,)), model.path, (model.folder.parent,))
    assert described.answers == "calls"
    assert described.adapters["kiosk"].answers is None
