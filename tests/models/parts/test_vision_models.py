"""`fusion: early` with the `mmproj` file of a vision model: real decoder, encoder and engine children, all tiny."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import psutil
import pytest

from causeway_server.edge_node.cli.doctor.policy_and_models import check_encoders
from causeway_server.edge_node.config.schema import EngineConfig
from causeway_server.edge_node.serving.part_encoders import Projectors
from causeway_server.models.catalog import projector
from causeway_server.models.catalog.artifact import Artifact
from causeway_server.models.llama_cpp.protocol import EngineOptions, Prompt, SoftTokens
from causeway_server.models.parts.process.messages import ImagePixels, WorkerJob, WorkerResult, WorkerSpec
from causeway_server.models.parts.process.parent import WorkerProcess
from causeway_server.models.publish.add import add_mmproj
from causeway_server.models.publish.publish import publish_gguf
from causeway_server.router.types import Message
from tests.edge_node.device import config, running
from tests.edge_node.parts.test_fusion import BOTH, INVOICE, PATIENT, ask, text, texts
from tests.models.llama_cpp.conftest import Rig
from tests.models.llama_cpp.tiny_gguf import write_tiny_gguf
from tests.models.llama_cpp.tiny_mmproj import LANGUAGE, MARKS, Family, needs_mtmd, write_tiny_mmproj

from .test_decoding import needs_pillow
from .test_soft_tokens import EARLY, GREEDY, HYBRID, real_device, solid

FAMILY: Family = "gemma3"
pytestmark = [pytest.mark.engine, pytest.mark.slow, needs_mtmd]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """A tiny vision model `m-small`."""
    folder = tmp_path_factory.mktemp("vision")
    file = write_tiny_gguf(folder / "tiny.gguf", architecture=LANGUAGE[FAMILY], marks=MARKS[FAMILY], window=512)
    model = publish_gguf(file, "m-small", folder / "models")
    return add_mmproj(model, write_tiny_mmproj(folder / "mmproj.gguf", FAMILY))


def seen_by_the_engine(model: Artifact, level: int) -> tuple[str, int]:
    """What the engine says of an image of one brightness, without a daemon: its answer, and the prompt's tokens."""
    from causeway_server.models.llama_cpp.native.mtmd import VisionEncoder

    encoder = VisionEncoder(model.folder / "mmproj.gguf", model.path, threads=1)
    vectors, runs = encoder.encode(bytes([level]) * (32 * 16 * 3), 32, 16)
    encoder.close()
    soft = SoftTokens(vectors.tobytes(), runs)
    rig = Rig(EngineOptions(model_path=str(model.path), threads=1, prompt_lookup=False))
    message = Message("user", f"tell me\n{soft.text}")
    answer = rig.run(Prompt(messages=(message,), soft=(soft,)), max_tokens=GREEDY["max_tokens"])
    rig.engine.close()
    return answer.text, answer.end.prompt_tokens


def encoder_child() -> psutil.Process:
    """The process that has mtmd in memory."""
    ours = psutil.Process().children(recursive=True)
    (found,) = [one for one in ours if "libmtmd" in Path(f"/proc/{one.pid}/maps").read_text()]
    return found


@needs_pillow
async def test_a_vision_model_sees_the_image(tiny: Artifact, tmp_path: Path) -> None:
    async with real_device(tiny, tmp_path, EARLY) as device:

        async def said(level: int) -> tuple[str, int]:
            answer = await ask(device, text("tell me"), solid(level), **GREEDY)
            assert answer.status == 200, answer.body
            assert answer.headers["x-causeway-modalities"] == "image=ok"
            assert [(part.soft, part.status) for part in (await device.record(answer)).parts] == [(True, "ok")]
            whole = answer.json
            return whole["choices"][0]["message"]["content"], whole["usage"]["prompt_tokens"]

        black, white = await said(0), await said(255)
        assert (black, white) == (seen_by_the_engine(tiny, 0), seen_by_the_engine(tiny, 255))
        assert black != white
        again = await ask(device, text("hello"), solid(0), **GREEDY)
        assert (await device.record(again)).parts[0].cached
        device.assert_nothing_leaks()


@needs_pillow
async def test_a_dead_encoder_is_replaced(tiny: Artifact, tmp_path: Path) -> None:
    async with real_device(tiny, tmp_path, EARLY) as device:
        assert (await ask(device, text("tell me"), solid(0), **GREEDY)).status == 200
        encoder_child().kill()
        after = await ask(device, text("tell me"), solid(9), **GREEDY)
        assert after.status == 200, after.body
        assert after.headers["x-causeway-modalities"] in ("image=ok", "image=failed")  # the kill was seen or not
        last = await ask(device, text("tell me"), solid(17), **GREEDY)
        assert last.headers["x-causeway-modalities"] == "image=ok"
        device.assert_nothing_leaks()


@needs_pillow
async def test_without_mtmd_an_image_is_text_and_the_log_says_why(
    tiny: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = msgspec.structs.replace(config(tmp_path), engine=EngineConfig(model_dirs=(str(tiny.folder.parent),)))
    (good,) = check_encoders(settings, lambda _: False)
    assert (good.level, "mmproj" in good.found) == ("ok", True)
    monkeypatch.setattr(projector, "has_mtmd", lambda: False)
    (bad,) = check_encoders(settings, lambda _: False)
    assert (bad.level, "lacks mtmd" in bad.found) == ("fail", True)
    models = (str(tiny.folder.parent),)
    async with running(tmp_path, policy=HYBRID, encoders=BOTH, parts=PATIENT, model_dirs=models) as device:
        answer = await ask(device, text("hello"), solid(0))
        assert answer.status == 200, answer.body
        assert INVOICE.splitlines()[0] in texts(device.engine.calls[-1].request.messages[-1])[1]
        assert "lacks mtmd" in caplog.text


async def test_a_projector_that_no_model_needs_ends_after_the_image_that_it_reads(tiny: Artifact) -> None:
    """Its process stands still while the policy changes; the request of the policy before gets its soft tokens."""
    decoder = AtOnce()
    projectors = Projectors(lambda model: projector.find_projector(model, [tiny.folder.parent]), decoder, 4, 60.0)
    assert projectors.kinds("m-small") == ("image",)
    by = asyncio.get_running_loop().time() + 60.0
    before = await projectors.run("m-small", b"", "1", by)
    child = encoder_child()
    child.suspend()
    decoder.done.clear()
    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(projectors.run("m-small", b"", "2", by))
        await decoder.done.wait()
        projectors.use({"m-other"})
        assert child.is_running()
        child.resume()
    assert reading.result() == before
    assert not child.is_running()
    assert projectors.running == 0
    await projectors.run("m-small", b"", "3", by)  # it was decided before, too
    assert (projectors.running, projectors.starts) == (0, 2)


class AtOnce(WorkerProcess):
    """A decoder that finds the same image in all bytes."""

    def __init__(self) -> None:
        super().__init__(WorkerSpec("none"))
        self.done = asyncio.Event()

    async def run(self, job: WorkerJob, deadline: float, tell: object = None) -> WorkerResult:
        self.done.set()
        return ImagePixels(bytes(32 * 16 * 3), 32, 16)
