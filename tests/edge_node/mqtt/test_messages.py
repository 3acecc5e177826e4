"""Messages on a real broker become jobs of a real daemon, and their answers come back."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from causeway_server.edge_node.config.schema import OutboxConfig
from tests.edge_node.jobs.cloud import JobCloud
from tests.edge_node.jobs.support import PROMPT
from tests.mosquitto import Mosquitto
from tests.waiting import until

from ..backends.test_residency import HASTY, three_regions
from ..device import running
from ..scripted import CLOUD_WORDS, EDGE_WORDS
from .peer import ASK, FILTER, bridge_of, mqtt_config, outbox_of, peer_of
from .relay import relay_to

pytestmark = [pytest.mark.mosquitto, pytest.mark.slow]
TWICE = [("x-causeway-prefer", "prefer_cloud"), ("X-Causeway-Prefer", "only_on_device")]
EDGE, CLOUD = "".join(EDGE_WORDS), "".join(CLOUD_WORDS)


async def test_a_message_is_a_job_and_its_answer_is_published(mosquitto: Mosquitto, tmp_path: Path) -> None:
    """The topic's tags bind a message as those of an API key bind a request: the policy keeps it on the device."""
    mosquitto.start()
    async with running(tmp_path, jobs=PROMPT, mqtt=mqtt_config(mosquitto.port, tags=("private",))) as device:
        with peer_of(mosquitto) as peer:
            await peer.state("online")
            peer.ask("hello", correlation=b"\x00 7", properties=[("x-causeway-tags", "cloud")])
            answer = await peer.answer()
            assert (answer.text, answer.correlation, answer.retain) == (EDGE, b"\x00 7", False)
            assert answer.content_type == "application/json"
            assert answer.properties["x-causeway-status"] == "succeeded"
            assert device.cloud.bodies == []
            job, _ = await (await device.parts.jobs.open()).store.get(answer.properties["x-causeway-job"], None)
            assert (job.tags, job.owner, job.may_leave) == (("cloud", "private"), f"mqtt:{FILTER}", False)
            await until(lambda: outbox_of(device).replies_due == 0)


async def test_text_is_asked_and_answered_as_text(mosquitto: Mosquitto, tmp_path: Path) -> None:
    """Without a response topic the answer goes to the topic's own. A CloudEvent is refused."""
    mosquitto.start()
    topic = {"form": "text", "system": "Be brief.", "priority": "bulk"}
    async with running(tmp_path, mqtt=mqtt_config(mosquitto.port, topic=topic, tags=("edge",))) as device:
        with peer_of(mosquitto) as peer:
            await peer.state("online")
            peer.ask("Wie spät?".encode(), answers="")
            answer = await peer.answer()
            assert (answer.topic, answer.payload.decode()) == (f"{ASK}/answer", EDGE)
            peer.ask(b"And now?", answers=f"{ASK}/answer")  # which needs not be listed
            assert (await peer.answer()).topic == f"{ASK}/answer"
            assert answer.content_type.startswith("text/plain")
            peer.ask(b"{}", answers="", content_type="application/cloudevents+json")
            refused = await peer.answer()
            assert refused.properties["x-causeway-status"] == "refused"
            assert "CloudEvents are not read" in refused.payload.decode()
            call, _ = device.engine.calls
            assert [message.content for message in call.request.messages] == ["Be brief.", "Wie spät?"]


@pytest.mark.parametrize("correlation", [b"7", b""])
async def test_a_message_that_comes_again_is_the_same_job(
    mosquitto: Mosquitto, tmp_path: Path, correlation: bytes
) -> None:
    """The device stores it, and the acknowledgement is lost with the link: the broker sends it again."""
    mosquitto.start()
    cloud = JobCloud()
    async with (
        relay_to(mosquitto.port) as relay,
        running(tmp_path, jobs=PROMPT, mqtt=mqtt_config(relay.port, tags=("cloud",)), cloud=cloud) as device,
    ):
        with peer_of(mosquitto) as peer:
            await peer.state("online")
            relay.mute = True
            peer.ask("once", correlation=correlation)
            await until(lambda: outbox_of(device).accepted == 1)
            relay.cut()
            relay.mute = False
            answer = await peer.answer()
            assert (answer.text, answer.correlation) == (CLOUD, correlation)
            await until(lambda: bridge_of(device).stats.messages.get("known") == 1)
            peer.ask("twice", correlation=b"8")
            assert (await peer.answer()).correlation == b"8"
            assert (outbox_of(device).accepted, cloud.effects) == (2, {"once": 1, "twice": 1})


async def test_a_repeated_id_is_answered_again_and_an_equal_message_is_another(
    mosquitto: Mosquitto, tmp_path: Path
) -> None:
    """A machine that lost its answer asks again with the same correlation data."""
    mosquitto.start()
    cloud = JobCloud()
    config = mqtt_config(mosquitto.port, tags=("cloud",))
    async with running(tmp_path, jobs=PROMPT, mqtt=config, cloud=cloud) as device:
        with peer_of(mosquitto) as peer:
            await peer.state("online")
            jobs = []
            for correlation in (b"7", b"7", b"", b""):
                peer.ask("hello", correlation=correlation)
                jobs.append((await peer.answer()).properties["x-causeway-job"])
            assert jobs[0] == jobs[1]
            assert len(set(jobs)) == outbox_of(device).accepted == cloud.effects["hello"] == 3


async def test_every_tag_of_the_user_properties_binds(mosquitto: Mosquitto, tmp_path: Path) -> None:
    """Names and tags have no case, and a name that comes twice is one list."""
    mosquitto.start()
    config = mqtt_config(mosquitto.port, tags=("Cloud",))
    async with running(tmp_path, jobs=PROMPT, mqtt=config) as device:
        with peer_of(mosquitto) as peer:
            await peer.state("online")
            for properties in (
                [("x-causeway-tags", "a"), ("x-causeway-tags", "Private")],
                [("X-Causeway-Tags", "PRIVATE"), ("x-causeway-tags", "a")],
            ):
                peer.ask("hello", correlation=properties[0][0].encode(), properties=properties)
                assert (await peer.answer()).properties["x-causeway-route"] == "edge"
                assert {"a", "cloud", "private"} <= set(device.newest().request.tags)
            assert device.cloud.bodies == []


async def test_a_message_that_is_bound_to_a_region_reaches_no_other_cloud(mosquitto: Mosquitto, tmp_path: Path) -> None:
    """While its region is cut it waits: a message without a region, which comes later, is answered before it."""
    mosquitto.start()
    config = mqtt_config(mosquitto.port, tags=("cloud",))
    async with three_regions(tmp_path, HASTY, PROMPT, mqtt=config) as bed:
        with peer_of(mosquitto) as peer:
            await peer.state("online")
            for number, tags in enumerate(["eu", "EU, a", "eu", "a"]):
                if number == 2:
                    await bed.clouds["eu"].stop()
                peer.ask("hello", correlation=str(number).encode(), properties=[("x-causeway-tags", tags)])
                if number != 2:
                    answer = await peer.answer()
                    assert (answer.correlation, answer.properties["x-causeway-route"]) == (
                        str(number).encode(),
                        "cloud",
                    )
                assert bed.asked["us"] == (number == 3)
            assert (bed.asked["eu"] > 1, bed.asked["none"]) == (True, 0)


async def test_what_is_no_request_is_answered_with_an_error_once(mosquitto: Mosquitto, tmp_path: Path) -> None:
    """Errors are acknowledged and never retained, and an answer never goes where it would be a request."""
    mosquitto.start()
    async with running(tmp_path, jobs=PROMPT, mqtt=mqtt_config(mosquitto.port, max_message_bytes=4096)) as device:
        with peer_of(mosquitto) as peer:
            await peer.state("online")
            refused = [
                peer.ask("hello", correlation=b"1", retain=True),
                peer.ask(b"{", correlation=b"2"),
                peer.ask("x" * 5000, correlation=b"3"),
                peer.ask(json.dumps({"model": "none", "messages": []}).encode(), correlation=b"4"),
                peer.ask("hello", correlation=b"5", properties=[("x-causeway-prefr", "only_on_device")]),
                peer.ask("hello", correlation=b"8", properties=TWICE),
                peer.ask("hello", correlation=b"6", answers="plant/8/ask"),
                peer.ask("hello", correlation=b"7", answers="valve/1/open"),
            ]
            answers = [await peer.answer() for _ in refused]
            codes = {answer.correlation: (answer.topic, answer.code) for answer in answers}
            own = f"{ASK}/answer"
            assert codes == {
                b"1": ("plant/7/answers", "invalid_value"),
                b"2": ("plant/7/answers", "invalid_json"),
                b"3": ("plant/7/answers", "invalid_value"),
                b"4": ("plant/7/answers", codes[b"4"][1]),
                b"5": ("plant/7/answers", "unknown_parameter"),
                b"8": ("plant/7/answers", "invalid_value"),
                b"6": (own, "invalid_value"),
                b"7": (own, "invalid_value"),
            }
            assert {answer.properties["x-causeway-status"] for answer in answers} == {"refused"}
            assert not any(answer.retain for answer in answers)
            peer.ask("hello", correlation=b"good")
            assert (await peer.answer()).correlation == b"good"
            assert (outbox_of(device).accepted, bridge_of(device).stats.messages) == (1, {"refused": 8, "accepted": 1})


async def test_a_flood_waits_at_the_broker(mosquitto: Mosquitto, tmp_path: Path) -> None:
    """The outbox is full: messages are not acknowledged, so the broker keeps the others, and none is lost."""
    mosquitto.start()
    jobs = OutboxConfig(max_jobs=3, device_concurrency=1)
    config = mqtt_config(mosquitto.port, tags=("edge",), receive_maximum=4)
    async with running(tmp_path, jobs=jobs, mqtt=config) as device:
        device.engine.gate = asyncio.Event()
        with peer_of(mosquitto) as peer:
            await peer.state("online")
            for number in range(60):
                peer.ask(f"message {number}", correlation=b"%d" % number)
            await until(lambda: any("Messages wait unacknowledged" in one for one in device.parts.problems()))
            assert outbox_of(device).accepted == 3
            device.engine.gate.set()
            answers = [(await peer.answer()).correlation for _ in range(60)]
            assert sorted(answers) == sorted(b"%d" % number for number in range(60))
            assert outbox_of(device).accepted == 60
            await until(lambda: not bridge_of(device).problems)
