"""Audio and images in chat requests on a real daemon: real decoders, tiny encoders, late fusion."""

from __future__ import annotations

import asyncio
import base64
import functools
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from causeway_server.edge_node.clock import Clock
from causeway_server.models.parts.process.messages import WorkerSpec
from causeway_server.router.bundle.settings import PartsConfig
from causeway_server.router.types import Message, Modality, TextPart
from tests.jumping_loop import JumpingLoop, run_jumping
from tests.models.parts.files import png, tone, wav
from tests.models.parts.test_decoding import WAIT_S, needs_pillow
from tests.waiting import until

from ..device import POLICY, Answer, Device, running
from ..scripted import ScriptedEngine

PATIENT = PartsConfig(audio_timeout_s=WAIT_S, image_timeout_s=WAIT_S)
COMMAND = "turn on the kitchen lights"
INVOICE = "Invoice 4711\nTotal 99.50 EUR"
SPEECH = wav(tone(0.2))
SILENCE = wav(np.zeros(3200))
IMAGE = png(32, 16)
MIXED = POLICY.replace(
    "can: [chat, completion, embedding, tools, json, logprobs]\nconstraints",
    "can: [chat, completion, embedding, tools, json, logprobs, image]\nconstraints",
)
ASKS_TOKENS = POLICY.replace(
    "  - name: edge-first\n    use", "  - name: short\n    when: request.prompt_tokens == 5\n    use"
)


def encoder(text: str, fault: str = "") -> WorkerSpec:
    return WorkerSpec("tests.models.parts.workers:TinyEncoder", options={"text": text, "fault": fault})


BOTH: dict[Modality, WorkerSpec] = {"audio": encoder(COMMAND), "image": encoder(INVOICE)}


def audio(data: bytes = SPEECH) -> dict[str, object]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def image(data: bytes = IMAGE) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(data).decode()}}


def text(words: str) -> dict[str, object]:
    return {"type": "text", "text": words}


async def ask(device: Device, *parts: dict[str, object], tags: str = "", **body: object) -> Answer:
    headers = {"x-causeway-tags": tags} if tags else {}
    whole = {"model": "auto", "messages": [{"role": "user", "content": list(parts)}], **body}
    async with device.session.post("/v1/chat/completions", json=whole, headers=headers) as response:
        return Answer(response.status, dict(response.headers), await response.read())


def prompt(engine: ScriptedEngine) -> Message:
    return engine.calls[-1].request.messages[-1]


def texts(message: Message) -> list[str]:
    assert isinstance(message.content, tuple)
    assert all(isinstance(part, TextPart) for part in message.content)
    return [part.text for part in message.content if isinstance(part, TextPart)]


@pytest.mark.slow
async def test_a_spoken_command_reaches_the_device_as_a_typed_one_and_its_record_has_only_its_hash(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, encoders=BOTH) as device:
        answer = await ask(device, audio())
        assert answer.status == 200, answer.body
        assert answer.headers["x-causeway-modalities"] == "audio=ok"
        assert prompt(device.engine).content == COMMAND
        record = await device.record(answer)
        (part,) = record.parts
        assert (part.part, part.modality, part.status) == ("messages[0].content[0].input_audio.data", "audio", "ok")
        assert (part.size_bytes, part.confidence, part.cached) == (len(SPEECH), 0.875, False)
        assert record.decision is not None
        assert record.decision.attempts[0].facts == ("audio",)
        stored = (await device.get(f"/v1/decisions/{answer.headers['x-causeway-decision']}")).body.decode()
        assert COMMAND not in stored
        assert base64.b64encode(SPEECH).decode()[:40] not in stored
        again = await ask(device, audio(), stream=True)
        assert again.text == answer.text
        assert again.headers["x-causeway-modalities"] == "audio=ok"
        assert (await device.record(again)).parts[0].cached
        async with device.session.delete("/v1/me/data") as erased:
            assert erased.status == 200
        assert not (await device.record(await ask(device, audio(), stream=True))).parts[0].cached, "an erasure forgets"
        device.assert_nothing_leaks()


@pytest.mark.slow
async def test_a_model_that_learned_from_spoken_commands_gets_them_as_they_are_said(tmp_path: Path) -> None:
    policy = POLICY.replace("m-small", "assistant")  # its manifest says `transcripts: spoken`
    async with running(
        tmp_path, policy=policy, encoders={"audio": encoder("Wake me up at six a.m., please!")}
    ) as device:
        assert (await ask(device, audio())).status == 200
        assert prompt(device.engine).content == "wake me up at six am please"
        assert (await ask(device, audio(), tags="cloud")).headers["x-causeway-target"] == "large"
        messages = device.cloud.bodies[-1]["messages"]
        assert messages == [{"role": "user", "content": "Wake me up at six a.m., please!"}]


@pytest.mark.slow
async def test_a_doubtful_transcript_is_less_likely_to_be_answered_right(tmp_path: Path) -> None:
    """The shipped calibrator has learned it from speech; none is surer than if it were typed."""
    policy = POLICY.replace("m-small", "assistant")
    scores = []
    for at, sure in enumerate(("", "0.95", "0.2")):
        options = {"text": COMMAND, "fault": "", "confidence": sure or "1"}
        spec = WorkerSpec("tests.models.parts.workers:TinyEncoder", options=options)
        async with running(tmp_path / str(at), policy=policy, encoders={"audio": spec}, parts=PATIENT) as device:
            said = audio() if sure else text(COMMAND)
            confidence = (await device.record(await ask(device, said, tags="handoff"))).outcome.attempts[0].confidence
            assert confidence is not None
            scores.append(confidence.score)
    typed, clear, doubtful = scores
    assert doubtful < clear <= typed


@pytest.mark.slow
@needs_pillow
async def test_typed_text_an_audio_clip_and_an_image_are_fused_in_their_order_with_their_confidence(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, encoders=BOTH) as device:
        answer = await ask(device, text("What is the total?"), image(), audio())
        assert answer.headers["x-causeway-modalities"] == "audio=ok,image=ok"
        question, seen, heard = texts(prompt(device.engine))
        assert question == "What is the total?"
        assert INVOICE in seen
        assert "0.88" in seen
        assert COMMAND in heard


@pytest.mark.slow
@needs_pillow
async def test_branches_of_one_request_run_at_the_same_time(tmp_path: Path) -> None:
    """Each encoder waits for the other one: one after the other they would end in a timeout."""
    place = tmp_path / "meeting"
    place.mkdir()
    meeting = {
        kind: msgspec.structs.replace(spec, options=spec.options | {"fault": "meet", "folder": str(place)})
        for kind, spec in BOTH.items()
    }
    parts = PartsConfig(audio_timeout_s=WAIT_S, image_timeout_s=WAIT_S)
    async with running(tmp_path, encoders=meeting, parts=parts) as device:
        answer = await ask(device, image(), audio())
        assert answer.headers["x-causeway-modalities"] == "audio=ok,image=ok"


@pytest.mark.slow
async def test_an_audio_clip_in_which_nobody_speaks_is_a_clear_error_alone_and_a_fact_beside_text(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, encoders=BOTH) as device:
        alone = await ask(device, audio(SILENCE))
        assert (alone.status, alone.code) == (400, "invalid_value")
        assert "messages[0].content[0].input_audio.data" in alone.message
        assert (await ask(device, text("hello"), audio(SILENCE))).status == 200
        assert texts(prompt(device.engine))[1] == "[An audio clip without words in it.]"


def test_a_branch_that_hangs_is_left_out_and_said_so(tmp_path: Path) -> None:
    async def hang(loop: JumpingLoop) -> None:
        clock = Clock(monotonic=loop.time)
        async with running(tmp_path, encoders={"audio": encoder("", "hang")}, clock=clock) as device:

            async def late(*parts: dict[str, object], **body: Any) -> Answer:
                asking = asyncio.create_task(ask(device, *parts, **body))
                encoders = device.parts.encoders
                await until(lambda: encoders is not None and encoders.graph.running)
                loop.jump(PartsConfig().audio_timeout_s)
                return await asking

            await assert_left_out(device, late, "timeout")

    run_jumping(hang)


@pytest.mark.slow
async def test_a_branch_that_dies_is_left_out_and_said_so(tmp_path: Path) -> None:
    async with running(tmp_path, encoders={"audio": encoder("", "die")}, parts=PATIENT) as device:
        await assert_left_out(device, functools.partial(ask, device), "failed")


async def assert_left_out(device: Device, send: Callable[..., Awaitable[Answer]], status: str) -> None:
    answer = await send(text("hello"), audio(), temperature=0)
    assert answer.status == 200
    assert answer.headers["x-causeway-modalities"] == f"audio={status}"
    assert answer.headers["x-causeway-degraded"] == "true"
    assert texts(prompt(device.engine)) == ["hello", "[An audio clip that could not be read.]"]
    assert (await device.record(answer)).parts[0].status == status
    again = await send(text("hello"), audio(), temperature=0)
    assert again.headers["x-causeway-cache"] == "miss"  # such an answer is not kept
    alone = await send(audio(), tags="edge")
    assert alone.status == 503
    assert "could be read in time" in alone.message
    assert (await device.ask("hello")).status == 200
    device.assert_nothing_leaks()


@pytest.mark.slow
@needs_pillow
async def test_a_policy_may_answer_from_the_first_branch_that_is_ready(tmp_path: Path) -> None:
    policy = POLICY.replace("edge-first\n    use", "edge-first\n    wait_for: first\n    use")
    encoders: dict[Modality, WorkerSpec] = {"audio": encoder(COMMAND), "image": encoder("", "hang")}
    parts = PartsConfig(image_timeout_s=WAIT_S)
    async with running(tmp_path, policy=policy, encoders=encoders, parts=parts) as device:
        answer = await ask(device, image(), audio())
        assert answer.headers["x-causeway-modalities"] == "audio=ok,image=skipped"
        assert answer.headers["x-causeway-degraded"] == "true"
        assert COMMAND in texts(prompt(device.engine))[1]
        record = await device.record(answer)
        assert {part.modality: part.status for part in record.parts} == {"audio": "ok", "image": "skipped"}
        assert record.decision is not None
        plan = record.decision.attempts[0]
        assert (plan.facts, plan.fusion, plan.wait_for) == (("audio", "image"), "late", "first")
        body = {"model": "auto", "messages": [{"role": "user", "content": [image()]}]}
        async with device.session.post("/v1/route", json=body) as response:
            planned = (await response.json())["decision"]["attempts"][0]
        assert (planned["facts"], planned["fusion"], planned["wait_for"]) == (["image"], "late", "first")
        device.assert_nothing_leaks()


@needs_pillow
async def test_a_preview_that_reads_parts_takes_turns_with_requests(tmp_path: Path) -> None:
    """It uses the same child processes. One of text is answered beside a full queue."""
    full = POLICY.replace("limits: {concurrent: 4, queue: 4", "limits: {concurrent: 1, queue: 0")
    async with running(tmp_path, policy=full, encoders=BOTH, parts=PATIENT) as device:

        async def preview(*content: dict[str, object]) -> Answer:
            body = {"model": "auto", "messages": [{"role": "user", "content": list(content)}]}
            async with device.session.post("/v1/route", json=body) as response:
                return Answer(response.status, dict(response.headers), await response.read())

        device.engine.gate = asyncio.Event()
        running_request = asyncio.ensure_future(ask(device, text("hello")))
        await device.engine.entered.wait()
        refused = await preview(image())
        assert (refused.status, refused.code) == (429, "queue_full")
        assert (await preview(text("hello"))).status == 200
        device.engine.gate.set()
        assert (await running_request).status == 200
        assert (await preview(image())).status == 200
        device.assert_nothing_leaks()


@pytest.mark.slow
async def test_invalid_parts_are_named_and_the_next_good_request_is_answered(tmp_path: Path) -> None:
    url: dict[str, object] = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}
    cases: list[tuple[dict[str, object], str, str]] = [
        (audio(b"nonsense"), "input_audio.data", "Send WAV"),
        (audio(b""), "input_audio.data", "empty"),
        ({"type": "input_audio", "input_audio": {"data": "%%%", "format": "wav"}}, "input_audio.data", "base64"),
        (url, "image_url.url", "does not fetch from the network"),
        ({"type": "image_url", "image_url": {"url": "data:text/html;base64,aGk="}}, "image_url.url", "data: URL"),
    ]
    async with running(tmp_path, encoders=BOTH, parts=PartsConfig(max_parts=2, max_audio_s=5.0)) as device:
        for part, path, words in cases:
            answer = await ask(device, text("hello"), part)
            assert answer.status == 400, words
            assert f"messages[0].content[1].{path}" in answer.message
            assert words in answer.message
        assert "at most 2" in (await ask(device, audio(), audio(), audio())).message
        assert "longer than 5 s" in (await ask(device, audio(wav(np.zeros(96_000))))).message
        assert (await ask(device, audio())).status == 200
        device.assert_nothing_leaks()


async def test_without_an_encoder_and_for_files_it_is_the_clear_400_as_before(tmp_path: Path) -> None:
    file: dict[str, object] = {"type": "file", "file": {"file_data": "data:application/pdf;base64,aGk="}}
    async with running(tmp_path, encoders={"audio": encoder(COMMAND)}) as device:
        for part in (image(), file):
            answer = await ask(device, text("hello"), part)
            assert (answer.status, answer.code) == (400, "unsupported_feature")
    async with running(tmp_path, encoders=BOTH, parts=PartsConfig(enabled=False)) as device:
        assert (await ask(device, audio())).code == "unsupported_feature"


@pytest.mark.slow
@needs_pillow
async def test_a_target_that_takes_images_gets_the_image_and_the_fallback_its_facts(tmp_path: Path) -> None:
    async with running(tmp_path, policy=MIXED, encoders=BOTH) as device:
        answer = await ask(device, text("hello"), image(), tags="cloud")
        assert answer.headers["x-causeway-target"] == "large"
        assert "x-causeway-modalities" not in answer.headers
        assert "image_url" in json.dumps(device.cloud.bodies[-1]["messages"])
        device.cloud.fault = "refuse"
        fallback = await ask(device, text("hello"), image(), tags="cloud")
        assert fallback.headers["x-causeway-target"] == "small"
        assert fallback.headers["x-causeway-modalities"] == "image=ok"
        assert INVOICE in texts(prompt(device.engine))[1]


@pytest.mark.slow
async def test_signals_of_a_spoken_request_are_those_of_its_words(tmp_path: Path) -> None:
    async with running(tmp_path, policy=ASKS_TOKENS, encoders=BOTH) as device:
        answer = await ask(device, audio())
        assert answer.status == 200, answer.body
        assert answer.headers["x-causeway-reason"] == "short"  # five words


async def test_a_client_that_leaves_ends_its_branches(tmp_path: Path) -> None:
    async with running(tmp_path, encoders={"audio": encoder("", "hang")}) as device:
        asking = asyncio.create_task(ask(device, text("hello"), audio()))
        await until(lambda: device.parts.admission.running, WAIT_S)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(lambda: not device.parts.admission.running, WAIT_S)
        device.assert_nothing_leaks()
