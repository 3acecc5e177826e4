"""Signals about images and audio clips: read before the decision if the policy names them, by what each of them
needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from causeway_server.models.parts.process.messages import WorkerSpec
from causeway_server.router.bundle.settings import DecisionsConfig
from causeway_server.router.checks.cases import CaseAudio, CaseRequest, CaseSnapshot, estimates_of
from causeway_server.router.checks.what_if import what_if
from causeway_server.router.decision.decide import decide
from causeway_server.router.policy.compiled import check_policy, parse_policy
from causeway_server.router.policy.signals import modalities
from causeway_server.router.types import AUTO, Estimates, ImagePart, Message, Modality, Request, Snapshot
from tests.edge_node.device import POLICY, running
from tests.edge_node.parts.test_fusion import (
    BOTH,
    COMMAND,
    INVOICE,
    MIXED,
    SILENCE,
    ask,
    audio,
    encoder,
    image,
    prompt,
    text,
    texts,
)
from tests.models.parts.files import HOSTILE_IMAGES, png
from tests.models.parts.test_decoding import needs_pillow

IMAGE_32X16 = 32 * 16
SPOKEN: dict[Modality, WorkerSpec] = {"audio": encoder(COMMAND)}


def rule(condition: str, policy: str = MIXED) -> str:
    return policy.replace("routes:", f"routes:\n  - name: seen\n    when: {condition}\n    use: [large]")


@pytest.mark.slow
@needs_pillow
async def test_the_size_of_images_decides_and_no_encoder_runs_for_it(tmp_path: Path) -> None:
    async with running(tmp_path, policy=rule("request.image_pixels > 1000"), encoders=BOTH) as device:
        two = await ask(device, text("hello"), image(), image(png(40, 30)))
        assert (two.headers["x-causeway-reason"], two.headers["x-causeway-target"]) == ("seen", "large")
        record = await device.record(two)
        assert record.estimates == Estimates(image_pixels=IMAGE_32X16 + 1200)
        assert record.parts == ()
        assert record.unrecorded == ("request.prompt_tokens", "edge.quality", "images.text")
        one = await ask(device, text("hello"), image())
        assert one.headers["x-causeway-target"] == "small"
        assert (await device.record(one)).estimates.image_pixels == IMAGE_32X16
        invalid = await ask(device, text("hello"), image(HOSTILE_IMAGES["declares 4 gigapixels"]))
        assert invalid.status == 400
        assert "messages[0].content[1].image_url.url" in invalid.message


@pytest.mark.slow
@needs_pillow
async def test_text_in_an_image_decides_and_is_read_once(tmp_path: Path) -> None:
    policy = rule("images.text").replace("use: [large]", "use: [small]", 1)
    async with running(tmp_path, policy=policy, encoders=BOTH) as device:
        answer = await ask(device, text("hello"), image())
        assert answer.headers["x-causeway-reason"] == "seen"
        record = await device.record(answer)
        assert record.estimates.images_text is True
        assert [(part.modality, part.cached) for part in record.parts] == [("image", False)]
        assert INVOICE in texts(prompt(device.engine))[1]
        assert INVOICE not in (await device.get(f"/v1/decisions/{record.id}")).body.decode()
        assert (await device.ask()).headers["x-causeway-reason"] == "edge-first"  # no image: no text in one


@pytest.mark.slow
@needs_pillow
@pytest.mark.parametrize(("words", "fault", "known"), [("", "", False), ("words", "die", None)])
async def test_images_without_text_and_images_that_cannot_be_read(
    tmp_path: Path, words: str, fault: str, known: bool | None
) -> None:
    """A target that takes images still gets them, and nothing is degraded for it."""
    policy = rule("images.text").replace("edge-first\n    use: [small, large]", "edge-first\n    use: [large]")
    async with running(tmp_path, policy=policy, encoders={"image": encoder(words, fault)}) as device:
        answer = await ask(device, text("hello"), image())
        assert answer.headers["x-causeway-reason"] == "edge-first"
        assert "x-causeway-modalities" not in answer.headers
        assert answer.headers["x-causeway-degraded"] == "false"
        record = await device.record(answer)
        assert record.estimates.images_text is known
        assert record.decision is not None
        absent = [reason.detail for reason in record.decision.reasons if reason.code == "signal_absent"]
        assert absent == ([] if known is False else ["images.text"])


@pytest.mark.slow
@needs_pillow
async def test_what_is_known_of_an_image_is_recorded_beside_a_broken_audio(tmp_path: Path) -> None:
    async with running(tmp_path, encoders=BOTH, decisions=DecisionsConfig(signals="all")) as device:
        broken: dict[str, object] = {"type": "input_audio", "input_audio": {"data": "aGVsbG8=", "format": "wav"}}
        answer = await ask(device, text("hello"), image(), broken)
        assert answer.status == 400
        record = await device.record(answer)
        assert (record.estimates.image_pixels, record.estimates.audio_s) == (IMAGE_32X16, None)


@pytest.mark.slow
@needs_pillow
async def test_records_can_keep_every_signal(tmp_path: Path) -> None:
    async with running(tmp_path, encoders=BOTH, decisions=DecisionsConfig(signals="all")) as device:
        record = await device.record(await ask(device, text("hello"), image()))
        assert (record.estimates.image_pixels, record.estimates.images_text) == (IMAGE_32X16, True)
        assert record.unrecorded == ()


@pytest.mark.slow
@needs_pillow
async def test_a_signal_that_was_not_computed_is_unknown_until_it_is_set(tmp_path: Path) -> None:
    named = parse_policy(rule("images.text"))
    async with running(tmp_path, policy=MIXED, encoders=BOTH) as device:
        record = await device.record(await ask(device, text("hello"), image()))
        answer = what_if(named, record, {}).changed
        assert answer.hangs_on == ("images.text",)
        (decision,) = what_if(named, record, {"images.text": True}).changed.decisions
        assert decision is not None
        assert decision.rule == "seen"
        typed = await device.record(await device.ask())
        assert what_if(named, typed, {}).changed.hangs_on == ()


@pytest.mark.slow
async def test_the_length_of_audio_clips_decides_and_no_encoder_runs_for_it(tmp_path: Path) -> None:
    async with running(tmp_path, policy=rule("request.audio_s > 0.3", POLICY), encoders=SPOKEN) as device:
        two = await ask(device, text("hello"), audio(), audio())
        assert two.headers["x-causeway-reason"] == "seen"
        record = await device.record(two)
        assert record.estimates == Estimates(audio_s=0.4)
        assert record.unrecorded == ("request.prompt_tokens", "edge.quality", "request.language", "audio.speech")
        assert (await ask(device, text("hello"), audio())).headers["x-causeway-reason"] == "edge-first"
        assert (await device.ask()).headers["x-causeway-reason"] == "edge-first"
        invalid = await ask(device, text("hello"), audio(b"nonsense"))
        assert invalid.status == 400
        assert "messages[0].content[1].input_audio.data" in invalid.message


@pytest.mark.slow
async def test_speech_and_its_language_decide_and_are_heard_once(tmp_path: Path) -> None:
    policy = rule('audio.speech && request.language == "en"', POLICY).replace("use: [large]", "use: [small]", 1)
    async with running(tmp_path, policy=policy, encoders=SPOKEN) as device:
        answer = await ask(device, audio())
        assert answer.headers["x-causeway-reason"] == "seen"
        record = await device.record(answer)
        assert (record.estimates.audio_speech, record.estimates.language) == (True, "en")
        assert [(part.modality, part.cached) for part in record.parts] == [("audio", False)]
        assert prompt(device.engine).content == COMMAND
        silent = await device.record(await ask(device, text("hello"), audio(SILENCE)))
        assert (silent.estimates.audio_speech, silent.estimates.language) == (False, None)
        assert (await device.ask()).headers["x-causeway-reason"] == "edge-first"


@pytest.mark.slow
async def test_speech_that_cannot_be_heard_is_absent_and_a_constraint_on_it_binds(tmp_path: Path) -> None:
    kept = POLICY.replace("constraints:", "constraints:\n  - {name: heard, when: audio.speech, keep: on_device}")
    async with running(tmp_path, policy=kept, encoders={"audio": encoder("", "die")}) as device:
        record = await device.record(await ask(device, text("hello"), audio(), tags="cloud"))
        assert record.estimates.audio_speech is None
        assert record.decision is not None
        assert record.decision.on_device
        typed = await device.record(await device.ask(tags="cloud"))
        assert typed.decision is not None
        assert not typed.decision.on_device


def test_a_case_states_an_audio_clip_by_its_signals() -> None:
    request = CaseRequest(audio_s=2.5, language="de")
    estimates = estimates_of(request, CaseSnapshot(audio=CaseAudio(speech=True)))
    assert (estimates.audio_s, estimates.language, estimates.audio_speech) == (2.5, "de", True)
    assert modalities(request.build()) == ["text", "audio"]


def test_a_constraint_on_images_binds_where_they_cannot_be_measured() -> None:
    policy = parse_policy(
        POLICY.replace("constraints:", "constraints:\n  - {name: big, when: request.image_pixels > 9, keep: on_device}")
    )
    pictured = Request(kind="chat", model=AUTO, messages=(Message("user", (ImagePart("data:image/png;base64,"),)),))
    typed = Request(kind="chat", model=AUTO, messages=(Message("user", "hello"),))
    assert decide(policy, pictured, Snapshot(), Estimates()).on_device
    assert not decide(policy, pictured, Snapshot(), Estimates(image_pixels=9)).on_device
    assert not decide(policy, typed, Snapshot(), Estimates()).on_device


def test_lint_names_a_wait_for_the_first_branch_that_a_signal_of_the_text_prevents() -> None:
    first = POLICY.replace("edge-first\n    use", "edge-first\n    wait_for: first\n    use")
    assert not any("waited for" in problem.message for problem in check_policy(first)[1])
    _, problems = check_policy(rule("request.prompt_tokens > 9", first))
    assert any("all are waited for" in problem.message for problem in problems), problems


@pytest.mark.parametrize(
    ("condition", "says"),
    [
        ("images.text", "absent (this device has no encoder"),
        ("request.image_pixels < 0", "at least 0"),
        ("audio.speech", "absent (this device has no encoder"),
        ("request.audio_s < 0.0", "at least 0"),
        ('request.language == "en"', "absent (the request's audio has no speech"),
    ],
)
def test_lint_knows_them(condition: str, says: str) -> None:
    _, problems = check_policy(rule(condition))
    assert any(says in problem.message for problem in problems), problems
