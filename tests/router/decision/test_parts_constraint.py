"""`keep: parts_on_device`: cloud attempts see what encoders found, never the parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from causeway_server.router.decision.abilities import no_route
from causeway_server.router.decision.decide import decide
from causeway_server.router.errors import NoRoute
from causeway_server.router.policy.compiled import parse_policy
from causeway_server.router.types import (
    AUTO,
    AudioPart,
    Decision,
    DeviceSetup,
    Estimates,
    FilePart,
    ImagePart,
    Message,
    Modality,
    Part,
    Request,
    Snapshot,
    TextPart,
)
from tests.edge_node.device import POLICY, running
from tests.edge_node.parts.test_fusion import BOTH, INVOICE, ask, audio, image, text
from tests.models.parts.files import png
from tests.models.parts.test_decoding import needs_pillow

KEPT = POLICY.replace("routes:", "  - name: parts-stay\n    keep: parts_on_device\nroutes:").replace(
    "tools, json, logprobs]\nconstraints", "tools, json, logprobs, image, audio, file]\nconstraints"
)
IMAGE, AUDIO, FILE = ImagePart("data:image/png;base64,"), AudioPart("", "wav"), FilePart("{}")


def decision(*parts: Part, encoders: tuple[Modality, ...], policy: str = KEPT) -> Decision:
    request = Request(kind="chat", model=AUTO, messages=(Message("user", (TextPart("hello"), *parts)),))
    snapshot = Snapshot(setup=DeviceSetup(engine=True, cloud=True, encoders=encoders))
    return decide(parse_policy(policy), request, snapshot, Estimates())


def plans(decided: Decision) -> dict[str, tuple[Modality, ...]]:
    return {plan.target.name: plan.facts for plan in decided.attempts}


def test_a_cloud_target_that_takes_parts_gets_their_facts() -> None:
    decided = decision(IMAGE, AUDIO, encoders=("audio", "image"))
    assert decided.parts_on_device
    assert not decided.on_device
    assert plans(decided) == {"small": ("audio", "image"), "large": ("audio", "image")}


def test_without_the_constraint_it_gets_the_parts() -> None:
    free = KEPT.replace("  - name: parts-stay\n    keep: parts_on_device\n", "")
    assert plans(decision(IMAGE, encoders=("image",), policy=free)) == {"small": ("image",), "large": ()}


@pytest.mark.parametrize("part", [IMAGE, AUDIO, FILE])
def test_a_part_without_an_encoder_keeps_the_whole_request_from_the_cloud(part: Part) -> None:
    decided = decision(part, encoders=())
    assert plans(decided) == {}
    assert "constraint_excluded" in {reason.code for reason in decided.reasons}
    assert isinstance(no_route(decided), NoRoute)


def test_text_needs_no_decision_about_parts() -> None:
    request = Request(kind="chat", model=AUTO, messages=(Message("user", "hello"),))
    decided = decide(parse_policy(KEPT), request, Snapshot(), Estimates())
    assert not decided.parts_on_device
    assert "parts-stay" not in {reason.rule for reason in decided.reasons}


def test_one_that_cannot_be_evaluated_binds() -> None:
    unknown = KEPT.replace("keep: parts_on_device", "when: device.battery < 0.5\n    keep: parts_on_device")
    assert decision(IMAGE, encoders=("image",), policy=unknown).parts_on_device


@pytest.mark.slow
@needs_pillow
async def test_the_cloud_never_receives_a_part(tmp_path: Path) -> None:
    async with running(tmp_path, policy=KEPT, encoders=BOTH) as device:
        answer = await ask(device, text("hello"), image(png(64, 64)), audio(), tags="cloud")
        assert answer.headers["x-causeway-target"] == "large"
        assert answer.headers["x-causeway-modalities"] == "audio=ok,image=ok"
        sent = str(device.cloud.bodies[-1])
        assert INVOICE.splitlines()[0] in sent
        assert "image_url" not in sent
        assert "input_audio" not in sent
        assert (await device.record(answer)).outcome.status == "ok"
