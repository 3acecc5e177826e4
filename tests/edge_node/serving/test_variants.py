"""Variants of targets in a daemon: who gets one, what names it, feedback, verdicts, reloads, faults, restarts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from causeway_server.edge_node.config.schema import KeyConfig, ServerConfig

from ..device import POLICY, Answer, Device, running
from ..scripted import ScriptedEngine

TRIAL = "\n    trial: {least: 20, sticky: conversation, metrics: [{name: errors}, {name: feedback}]}"


def policy(share: float, *, model: str = "v2", at: str = "small", trial: str = TRIAL) -> str:
    own = f"model: m-{at}\n"
    return POLICY.replace(
        own, f"{own}    variants: [{{model: {model}, share: {share}}}]{trial}\n".replace("\n\n", "\n")
    )


async def feedback(
    device: Device, answer: Answer, score: float, headers: Mapping[str, str] = {}, **more: object
) -> Answer:
    body = {"id": answer.headers["x-causeway-decision"], "score": score, **more}
    async with device.session.post("/v1/feedback", json=body, headers=headers) as response:
        return Answer(response.status, dict(response.headers), await response.read())


async def write(device: Device, folder: Path, text: str) -> None:
    (folder / "policy.yaml").write_text(text)
    await device.app.parts.policies.reload()


async def test_a_variant_answers_in_the_place_of_its_target_s_model(tmp_path: Path) -> None:
    """The backend gets its model; header, record and metrics name it. A request that names the model gets the model."""
    async with running(tmp_path, policy=policy(100)) as device:
        answer = await device.ask()
        assert (answer.headers["x-causeway-target"], answer.headers["x-causeway-variant"]) == ("small", "v2")
        assert device.engine.calls[-1].target.model == "v2"
        record = await device.record(answer)
        assert (record.outcome.target, record.outcome.variant, record.outcome.model) == ("small", "v2", "v2")
        assert record.trial_group is not None
        named = await device.ask(model="small")
        assert named.headers["x-causeway-variant"] == "v2"
        own = await device.ask(model="m-small")
        assert "x-causeway-variant" not in own.headers
        assert device.engine.calls[-1].target.model == "m-small"
        metrics = (await device.get("/metrics")).body.decode()
        assert 'causeway_edge_variant_answers_total{result="ok",target="small",variant="v2"} 2.0' in metrics
        assert 'causeway_edge_variant_share{state="running",target="small",variant="v2"} 1.0' in metrics


async def test_a_variant_in_the_cloud_is_asked_for_by_its_name(tmp_path: Path) -> None:
    async with running(tmp_path, policy=policy(100, at="large")) as device:
        answer = await device.ask(tags="cloud")
        assert (answer.headers["x-causeway-target"], answer.headers["x-causeway-variant"]) == ("large", "v2")
        assert device.cloud.bodies[-1]["model"] == "v2"


async def test_a_conversation_stays_with_its_model_and_others_are_spread(tmp_path: Path) -> None:
    async with running(tmp_path, policy=policy(50)) as device:
        found = set()
        for text in map(str, range(12)):
            first = (await device.ask(text)).headers.get("x-causeway-variant", "")
            history = [{"role": "user", "content": text}, {"role": "assistant", "content": "a"}]
            again = await device.ask(messages=[*history, {"role": "user", "content": "and now?"}])
            assert again.headers.get("x-causeway-variant", "") == first
            found.add(first)
        assert found == {"", "v2"}


async def test_variants_share_no_cached_answer_with_their_target_s_model(tmp_path: Path) -> None:
    async with running(tmp_path, policy=policy(100)) as device:
        assert (await device.ask(temperature=0)).headers["x-causeway-cache"] == "miss"
        hit = await device.ask(temperature=0)
        assert (hit.headers["x-causeway-cache"], hit.headers["x-causeway-variant"]) == ("hit", "v2")
        await write(device, tmp_path, policy(0))
        own = await device.ask(temperature=0)
        assert (own.headers["x-causeway-cache"], own.headers.get("x-causeway-variant")) == ("miss", None)


async def test_variants_are_added_moved_and_removed_with_the_policy_file(tmp_path: Path) -> None:
    async with running(tmp_path) as device:
        assert "x-causeway-variant" not in (await device.ask()).headers
        await write(device, tmp_path, policy(100))
        assert (await device.ask()).headers["x-causeway-variant"] == "v2"
        await write(device, tmp_path, policy(100, model="v3"))
        assert (await device.ask()).headers["x-causeway-variant"] == "v3"
        await write(device, tmp_path, POLICY)
        assert "x-causeway-variant" not in (await device.ask()).headers


class TwoModels(ScriptedEngine):
    """An engine whose `v2` fails."""

    def generate(self, call):  # type: ignore[no-untyped-def]
        self.fault = "refuse" if call.target.model == "v2" else "none"
        return super().generate(call)


async def test_a_variant_that_fails_costs_no_answer_and_is_returned(tmp_path: Path) -> None:
    """The next target answers; after the verdict the target's own model does, also after a restart."""
    text = policy(50)
    async with running(tmp_path, policy=text, engine=TwoModels()) as device:
        for number in range(90):
            answer = await device.ask(str(number))
            assert answer.status == 200
        (problem,) = [one for one in device.app.parts.problems() if "v2" in one]
        assert problem.startswith(
            "The variant v2 of small is returned and answers 0 % of the requests: errors: 100.00% of"
        )
        found = [await device.ask(str(number)) for number in range(20)]
        assert {(one.headers["x-causeway-target"], one.headers.get("x-causeway-variant")) for one in found} == {
            ("small", None)
        }
    async with running(tmp_path, policy=text, engine=TwoModels()) as device:
        found = [await device.ask(str(number)) for number in range(20)]
        assert {one.headers.get("x-causeway-variant") for one in found} == {None}


async def test_feedback_returns_a_variant_that_clients_like_less(tmp_path: Path) -> None:
    """And it is a signal and a metric."""
    async with running(tmp_path, policy=policy(50)) as device:
        for number in range(100):
            answer = await device.ask(str(number))
            sent = await feedback(device, answer, 0.0 if "x-causeway-variant" in answer.headers else 1.0)
            assert (sent.status, sent.json["counted"]) == (200, True)
        assert any("feedback: 100.00%" in one for one in device.app.parts.problems())
        assert (await device.ask("5")).headers.get("x-causeway-variant") is None
        signal = device.newest().snapshot.edge.feedback
        assert signal is not None
        assert 0.3 < signal < 0.9
        metrics = (await device.get("/metrics")).body.decode()
        assert 'causeway_edge_feedback_total{result="bad",target="small",variant="v2"}' in metrics


async def test_an_answer_counts_once_under_each_label(tmp_path: Path) -> None:
    async with running(tmp_path) as device:
        answer = await device.ask()
        assert (await feedback(device, answer, 1.0)).json["counted"] is True
        assert (await feedback(device, answer, 0.0)).json["counted"] is False
        assert (await feedback(device, answer, 0.0, label="tone")).json["counted"] is True


KEYS = ServerConfig(
    port=0,
    drain_s=1.0,
    default_deadline_s=60.0,
    keys=(
        KeyConfig("ann", "8254c329a92850f6d539dd376f4816ee2764517da5e0235514af433164480d7a"),
        KeyConfig("bob", "50e721e49c013f00c62cf59f2163542a9d8df02464efeb615d31051b0fddc326", rights=("decisions",)),
    ),
)


async def test_only_the_client_of_an_answer_may_score_it(tmp_path: Path) -> None:
    """Another's decision and an unknown one get the same answer, also for a client that may read all decisions."""
    async with running(tmp_path, server=KEYS) as device:
        ann, bob = {"Authorization": "Bearer k"}, {"Authorization": "Bearer w"}
        answer = await device.ask(headers=ann)
        assert answer.status == 200
        other = await feedback(device, answer, 1.0, bob)
        unknown = await feedback(device, Answer(200, {"x-causeway-decision": "0" * 24}, b""), 1.0, bob)
        decision = answer.headers["x-causeway-decision"]
        assert (other.status, unknown.status) == (404, 404)
        assert other.message.replace(decision, "ID") == unknown.message.replace("0" * 24, "ID")
        assert (await feedback(device, answer, 1.0)).status == 401
        assert (await feedback(device, answer, 1.0, ann)).json["counted"] is True


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{}", "id"),
        (b'{"id": "x"}', "score"),
        (b'{"id": "x", "score": 2}', "score"),
        (b'{"id": "x", "score": "good"}', "score"),
        (b'{"id": "x", "score": 1, "label": "a b"}', "label"),
        (b'{"id": "x", "score": 1, "stars": 5}', "stars"),
        (b"[]", "object"),
        (b"nothing", "JSON"),
    ],
)
async def test_a_bad_body_is_refused_with_its_field(device: Device, body: bytes, message: str) -> None:
    headers = {"Content-Type": "application/json"}
    async with device.session.post("/v1/feedback", data=body, headers=headers) as response:
        assert response.status == 400
        assert message in await response.text()


async def test_records_of_before_have_no_variant(device: Device) -> None:
    """A row that an earlier version wrote is read."""
    record = await device.record(await device.ask())
    fields = msgspec.json.decode(msgspec.json.encode(record))
    del fields["trial_group"], fields["outcome"]["variant"]
    assert msgspec.convert(fields, type(record)) == record
