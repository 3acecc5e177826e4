"""`fusion: early` and `hybrid` on a real daemon: real image decoder and vision encoder, all tiny."""

from __future__ import annotations

import io
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import aiohttp
import msgspec
import pytest

from causeway_server.edge_node.app import build
from causeway_server.edge_node.cli.doctor.policy_and_models import check_encoders
from causeway_server.edge_node.clock import system_clock
from causeway_server.edge_node.config.schema import EngineConfig
from causeway_server.edge_node.serving.generation import Generation
from causeway_server.edge_node.serving.part_encoders import PartEncoders
from causeway_server.models.catalog.artifact import MMPROJ_FILE, Artifact, save_manifest
from causeway_server.models.catalog.projector import Projector
from causeway_server.models.llama_cpp.protocol import SoftTokens
from causeway_server.models.parts.graph.graph import EncoderGraph
from causeway_server.models.parts.process.messages import WorkerSpec
from causeway_server.models.publish.publish import place_mmproj, publish_gguf
from causeway_server.router.decision.decide import decide
from causeway_server.router.parts.reading import find_parts
from causeway_server.router.policy.compiled import parse_policy
from causeway_server.router.types import (
    AUTO,
    AudioPart,
    Decision,
    DeviceSetup,
    Estimates,
    ImagePart,
    Message,
    Modality,
    Part,
    PartRecord,
    Request,
    Snapshot,
    TextPart,
)
from tests.edge_node.device import POLICY, Device, config, running
from tests.edge_node.parts.test_bad_days import metric
from tests.edge_node.parts.test_fusion import BOTH, COMMAND, INVOICE, PATIENT, ask, audio, encoder, image, text, texts
from tests.edge_node.scripted import ScriptedCloud, ScriptedEngine
from tests.models.llama_cpp.tiny_gguf import write_tiny_gguf
from tests.models.llama_cpp.tiny_mmproj import needs_mtmd, write_tiny_mmproj

from .test_decoding import needs_pillow

EARLY, HYBRID = (
    POLICY.replace("edge-first\n    use", f"edge-first\n    fusion: {way}\n    use") for way in ("early", "hybrid")
)
IMAGE, AUDIO = ImagePart("data:image/png;base64,"), AudioPart("", "wav")
PROJECTS: dict[str, tuple[Modality, ...]] = {"m-small": ("image",)}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}


# --- the plan: pure --------------------------------------------------------------------------------------------------


def decision(
    policy: str, *parts: Part, encoders: tuple[Modality, ...] = ("audio", "image"), projectors: object = PROJECTS
) -> Decision:
    request = Request(kind="chat", model=AUTO, messages=(Message("user", (TextPart("hello"), *parts)),))
    setup = DeviceSetup(engine=True, cloud=True, encoders=encoders, projectors=projectors)  # type: ignore[arg-type]
    return decide(parse_policy(policy), request, Snapshot(setup=setup), Estimates())


def forms(decided: Decision) -> dict[str, tuple[tuple[Modality, ...], tuple[Modality, ...]]]:
    return {plan.target.name: (plan.facts, plan.soft) for plan in decided.attempts}


def test_early_leaves_out_targets_without_a_projector_and_hybrid_gives_them_text() -> None:
    assert forms(decision(EARLY, IMAGE)) == {"small": ((), ("image",))}
    assert forms(decision(HYBRID, IMAGE, AUDIO)) == {
        "small": (("audio",), ("image",)),
        "large": (("audio", "image"), ()),
    }
    assert forms(decision(HYBRID, IMAGE, projectors={})) == {"small": (("image",), ()), "large": (("image",), ())}
    assert forms(decision(POLICY, IMAGE)) == {"small": (("image",), ()), "large": (("image",), ())}
    assert {plan.fusion for plan in decision(HYBRID, IMAGE).attempts} == {"hybrid"}


def test_early_without_a_projector_names_what_the_targets_lack() -> None:
    for decided in (decision(EARLY, IMAGE, projectors={}), decision(EARLY, IMAGE, AUDIO)):
        assert not decided.attempts
        unable = [reason.target for reason in decided.reasons if reason.code == "target_unable"]
        assert unable == ["small", "large"]
    assert decided.missing_abilities == ("image", "audio")


def test_a_projector_needs_no_encoder_of_text() -> None:
    assert forms(decision(EARLY, IMAGE, encoders=())) == {"small": ((), ("image",))}
    assert decision(POLICY, IMAGE, encoders=()).missing_abilities == ("image",)


def test_parts_that_stay_on_the_device_reach_the_cloud_as_text_or_not_at_all() -> None:
    kept = "  - name: parts-stay\n    keep: parts_on_device\nroutes:"
    able = "tools, json, logprobs]\nconstraints", "tools, json, logprobs, image]\nconstraints"
    early, hybrid = (policy.replace("routes:", kept).replace(*able) for policy in (EARLY, HYBRID))
    assert forms(decision(early, IMAGE)) == {"small": ((), ("image",))}
    assert forms(decision(hybrid, IMAGE)) == {"small": ((), ("image",)), "large": (("image",), ())}


# --- a scripted engine -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A tiny vision model `m-small`."""
    folder = tmp_path_factory.mktemp("soft")
    model = publish_gguf(write_tiny_gguf(folder / "tiny.gguf"), "m-small", folder / "models")
    return place_mmproj(model, write_tiny_mmproj(folder / "mmproj.gguf"), "copy")


def solid(level: int) -> dict[str, object]:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (32, 16), (level, level, level)).save(file, "PNG")
    return image(file.getvalue())


@pytest.mark.slow
@needs_mtmd
@needs_pillow
async def test_the_prompt_has_a_mark_and_the_vectors_and_the_record_says_so(tiny: Artifact, tmp_path: Path) -> None:
    models = (str(tiny.folder.parent),)
    async with running(tmp_path, policy=HYBRID, encoders=BOTH, parts=PATIENT, model_dirs=models) as device:
        answer = await ask(device, text("hello"), solid(0), audio(), solid(0))
        assert answer.status == 200, answer.body
        assert answer.headers["x-causeway-modalities"] == "audio=ok,image=ok"
        call = device.engine.calls[-1]
        (soft,) = call.soft
        hello, seen, heard, again = texts(call.request.messages[-1])
        assert (hello, seen, again) == ("hello", soft.marker, seen)
        assert COMMAND in heard
        record = await device.record(answer)
        forms_of = [(part.modality, part.soft) for part in record.parts]
        assert forms_of == [("audio", False), ("image", True), ("image", True)]
        assert record.decision is not None
        assert (record.decision.attempts[0].soft, record.decision.attempts[0].fusion) == (("image",), "hybrid")
        body = {"model": "auto", "messages": [{"role": "user", "content": [solid(0)]}]}
        async with device.session.post("/v1/route", json=body) as response:
            assert (await response.json())["decision"]["attempts"][0]["soft"] == ["image"]
        device.engine.fault = "refuse"
        fallback = await ask(device, text("hello"), solid(0))
        assert fallback.headers["x-causeway-target"] == "large"
        assert INVOICE.splitlines()[0] in str(device.cloud.bodies[-1])
        assert [part.soft for part in (await device.record(fallback)).parts] == [False, True]
        assert (await device.record(fallback)).parts[1].cached
        device.assert_nothing_leaks()


@pytest.mark.slow
@needs_mtmd
@needs_pillow
async def test_a_projector_that_fails_is_left_out_and_said_so(tiny: Artifact, tmp_path: Path) -> None:
    """Here: its files are gone when the first image comes."""
    folder = _copied(tiny, tmp_path)
    models = (str(folder.parent),)
    async with running(tmp_path, policy=EARLY, encoders=BOTH, parts=PATIENT, model_dirs=models) as device:
        await device.ask("hello")  # the projector was found
        (folder / MMPROJ_FILE).unlink()
        answer = await ask(device, text("hello"), solid(0))
        assert answer.headers["x-causeway-modalities"] == "image=failed"
        assert answer.headers["x-causeway-degraded"] == "true"
        assert texts(device.engine.calls[-1].request.messages[-1])[1] == "[An image that could not be read.]"
        assert device.engine.calls[-1].soft == ()
        assert (await ask(device, solid(0))).status == 503
        assert await metric(device, 'encoder_process_starts_total{part="projector"}') == 2
        broken = await ask(device, text("hello"), image(b"nonsense"))
        assert (broken.status, "messages[0].content[1].image_url" in broken.message) == (400, True)
        device.assert_nothing_leaks()


@pytest.mark.slow
@needs_mtmd
@needs_pillow
async def test_under_hybrid_the_text_of_an_image_stands_in_for_a_projector_that_fails(
    tiny: Artifact, tmp_path: Path
) -> None:
    folder = _copied(tiny, tmp_path)
    models = (str(folder.parent),)
    async with running(tmp_path, policy=HYBRID, encoders=BOTH, parts=PATIENT, model_dirs=models) as device:
        await device.ask("hello")  # the projector was found
        (folder / MMPROJ_FILE).unlink()
        answer = await ask(device, text("hello"), solid(0))
        assert INVOICE.splitlines()[0] in texts(device.engine.calls[-1].request.messages[-1])[1]
        assert device.engine.calls[-1].soft == ()
        assert answer.headers["x-causeway-modalities"] == "image=failed"
        forms_of = [(part.soft, part.status) for part in (await device.record(answer)).parts]
        assert sorted(forms_of) == [(False, "ok"), (True, "failed")]
        device.assert_nothing_leaks()


@needs_mtmd
@needs_pillow
@pytest.mark.parametrize("other", ["model_sha256", "sha256"])
async def test_a_projector_for_something_else_is_refused_and_said_so(
    tiny: Artifact, tmp_path: Path, other: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = _copied(tiny, tmp_path)
    entry = tiny.manifest.projector
    assert entry is not None
    entry = msgspec.structs.replace(entry, **{other: "0" * 64})
    save_manifest(msgspec.structs.replace(tiny.manifest, projector=entry), folder)
    async with running(tmp_path, policy=EARLY, encoders=BOTH, model_dirs=(str(folder.parent),)) as device:
        answer = await ask(device, text("hello"), solid(0))
        assert (answer.status, answer.code) == (400, "unsupported_feature")
        assert "m-small does not take images as soft tokens" in caplog.text
        settings = msgspec.structs.replace(config(tmp_path), engine=EngineConfig(model_dirs=(str(folder.parent),)))
        (finding,) = check_encoders(settings, lambda _: False)
        assert (finding.level, finding.check) == ("fail", "projector")
        assert (await device.ask("hello")).status == 200


@needs_pillow
async def test_an_image_is_read_again_when_a_bundle_replaced_its_model_meanwhile() -> None:
    """Soft tokens of the old projector mean nothing to the new model."""
    found = ["old"]
    encoders = PartEncoders(
        {},
        PATIENT,
        system_clock(),
        find_projector=lambda _: Projector(Path(found[0]), found[0], Path("m-small.gguf"), 0),
    )
    encoders.projectors.kinds("m-small")

    class Graph:
        async def read(self, request: Request, *_: object) -> list[object]:
            (part,) = find_parts(request, ("image",), 1)
            made_by = encoders.projectors.digest("m-small")
            if made_by == "old":
                found[0] = "new"
                encoders.projectors.kinds("m-small")
            record = PartRecord(part.path, "image", part.sha256, len(part.data), "ok", soft=True)
            return [(part, (SoftTokens(made_by.encode()), record))]

    encoders.graph = cast("EncoderGraph", Graph())
    shown = ImagePart(str(cast("dict[str, Any]", solid(0)["image_url"])["url"]))
    request = Request(kind="chat", model=AUTO, messages=(Message("user", (TextPart("hello"), shown)),))
    generation = SimpleNamespace(request=request, facts=None, soft=None, deadline=1.0, job=None)
    (plan, *_) = decision(EARLY, shown).attempts
    _, soft = await encoders.prepare(cast("Generation", generation), plan)
    assert [one.vectors for one in soft] == [b"new"]


def _copied(model: Artifact, to: Path) -> Path:
    """The model's folder, in a place of the test's own."""
    return shutil.copytree(model.folder, to / "models" / model.folder.name)


# --- the engine ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def real_device(tiny: Artifact, tmp_path: Path, policy: str) -> AsyncIterator[Device]:
    settings = config(tmp_path, policy=policy.replace("20s", "60s").replace("25s", "60s"))
    engine = EngineConfig(model_dirs=(str(tiny.folder.parent),), threads=1, sequences=4)
    encoders: dict[Modality, WorkerSpec] = {"image": encoder(INVOICE)}
    app = build(msgspec.structs.replace(settings, engine=engine, parts=PATIENT), environ={}, encoders=encoders)
    await app.start()
    try:
        async with aiohttp.ClientSession(f"http://127.0.0.1:{app.port}") as session:
            yield Device(app, ScriptedEngine(), ScriptedCloud(), session)
    finally:
        await app.close()
