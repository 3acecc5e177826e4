"""`file` parts: text and images in files, and every other file as a clear error."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from causeway_server.models.parts.decoding.decoder import decode_text
from causeway_server.models.parts.installed import find_encoders
from causeway_server.models.parts.process.messages import Refusal, WorkerSpec
from causeway_server.router.bundle.settings import PartsConfig
from causeway_server.router.types import Modality
from tests.edge_node.device import running
from tests.edge_node.parts.test_fusion import BOTH, INVOICE, ask, prompt, text, texts
from tests.router.decision.test_parts_constraint import KEPT

from .files import HOSTILE_IMAGES, HOSTILE_TEXTS, png
from .test_decoding import needs_pillow

ALL: dict[Modality, WorkerSpec] = {**BOTH, "file": find_encoders(())["file"]}
NOTE = "Total: 99,50 €\nDue: Friday"


def file(data: bytes | str = NOTE, kind: str = "text/plain", **more: object) -> dict[str, object]:
    encoded = base64.b64encode(data.encode() if isinstance(data, str) else data).decode()
    return {"type": "file", "file": {"file_data": f"data:{kind};base64,{encoded}", **more}}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_text_is_decoded_with_plain_line_ends(encoding: str) -> None:
    assert decode_text(NOTE.replace("\n", "\r\n").encode(encoding), 64_000).fact.text == NOTE


@pytest.mark.parametrize("name", HOSTILE_TEXTS)
def test_other_files_are_refused_with_what_to_send(name: str) -> None:
    with pytest.raises(Refusal, match="Send"):
        decode_text(HOSTILE_TEXTS[name], 64_000)


async def test_the_text_of_a_file_reaches_the_model_and_the_record_has_its_hash(tmp_path: Path) -> None:
    async with running(tmp_path, encoders=ALL) as device:
        answer = await ask(device, text("When is it due?"), file(filename="note.txt"))
        assert answer.headers["x-causeway-modalities"] == "file=ok"
        assert texts(prompt(device.engine))[1] == f"[A file named note.txt; text in it:\n{NOTE}\n]"
        record = await device.record(answer)
        (part,) = record.parts
        assert (part.part, part.modality, part.status) == ("messages[0].content[1].file.file_data", "file", "ok")
        assert NOTE.splitlines()[1] not in (await device.get(f"/v1/decisions/{record.id}")).body.decode()
        bare: dict[str, object] = {"type": "file", "file": {"file_data": base64.b64encode(NOTE.encode()).decode()}}
        assert (await ask(device, text("hello"), bare)).status == 200
        assert NOTE in texts(prompt(device.engine))[1]


@pytest.mark.slow
@needs_pillow
async def test_an_image_in_a_file_is_read_as_an_image(tmp_path: Path) -> None:
    seen = file(png(32, 16), "image/png")
    async with running(tmp_path / "all", encoders=ALL) as device:
        answer = await ask(device, text("hello"), seen)
        assert answer.headers["x-causeway-modalities"] == "file=ok"
        assert INVOICE in texts(prompt(device.engine))[1]
        bomb = await ask(device, text("hello"), file(HOSTILE_IMAGES["100 megapixels of nothing"], "image/png"))
        assert "messages[0].content[1].file.file_data" in bomb.message
        assert "megapixels" in bomb.message
    async with running(tmp_path / "none", encoders={"file": ALL["file"]}) as device:
        assert "no encoder for images" in (await ask(device, text("hello"), seen)).message


@pytest.mark.slow
async def test_files_that_are_not_taken_are_named_and_the_next_one_is(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, object], str, str]] = [
        (file(b"%PDF-1.7\n", "application/pdf", filename="a.pdf"), "file_data", "a PDF"),
        (file(HOSTILE_TEXTS["SVG"], "image/svg+xml"), "file_data", "SVG"),
        (file("a" * 2000), "file_data", "1 KiB"),
        ({"type": "file", "file": {"file_id": "file-1"}}, "file_id", "does not read uploaded files"),
        ({"type": "file", "file": {"filename": "a.txt"}}, "file_data", "missing"),
        ({"type": "file", "file": {"file_data": "http://127.0.0.1:1/a.txt"}}, "file_data", "data: URL"),
        ({"type": "file", "file": {"file_data": "%%%"}}, "file_data", "base64"),
        ({"type": "file", "file": {"file_data": 5}}, "file", "Expected"),
    ]
    async with running(tmp_path, encoders=ALL, parts=PartsConfig(max_text_bytes=1024)) as device:
        for part, path, words in cases:
            answer = await ask(device, text("hello"), part)
            assert answer.status == 400, words
            assert f"messages[0].content[1].file{'' if path == 'file' else '.' + path}" in answer.message
            assert words in answer.message
            assert (await ask(device, text("hello"), file())).status == 200
        device.assert_nothing_leaks()


async def test_the_cloud_gets_the_text_of_a_file_that_must_stay(tmp_path: Path) -> None:
    async with running(tmp_path, policy=KEPT, encoders=ALL) as device:
        answer = await ask(device, text("hello"), file(), tags="cloud")
        assert answer.headers["x-causeway-target"] == "large"
        sent = str(device.cloud.bodies[-1])
        assert NOTE.splitlines()[1] in sent
        assert "file_data" not in sent
