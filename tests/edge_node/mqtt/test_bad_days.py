"""Brokers, links and daemons that fail: nothing accepted is lost or done twice, and operators are told."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

import msgspec
import pytest

from tests.edge_node.jobs.cloud import JobCloud
from tests.edge_node.jobs.support import PROMPT
from tests.mosquitto import Mosquitto
from tests.ports import free_port
from tests.redis_deployments import Certificates
from tests.stack import Stack
from tests.waiting import until

from ..device import Device, running
from .peer import bridge_of, mqtt_config, outbox_of, peer_of
from .relay import relay_to

pytestmark = [pytest.mark.mosquitto, pytest.mark.slow]


def has_problem(device: Device, text: str) -> bool:
    return any(text in problem for problem in device.parts.problems())


async def test_a_killed_daemon_answers_once(mosquitto: Mosquitto, tmp_path: Path) -> None:
    """SIGKILL while the job runs: the will says offline, and the next start answers the message."""
    mosquitto.start()
    cloud = JobCloud()
    cloud.waits = True
    await cloud.start()
    stack = Stack(tmp_path / "stack")
    edge = f"""
engine: {{enabled: false}}
jobs: {{jitter_s: 0}}
mqtt:
  url: mqtt://127.0.0.1:{mosquitto.port}
  client_id: device
  response_topics: [plant/+/answers]
  topics: [{{filter: plant/+/ask}}]
"""
    try:
        with peer_of(mosquitto) as peer:
            daemon = stack.start_edge(edge, cloud_port=cloud.port)
            await peer.state("online")
            peer.ask("first", correlation=b"1")
            await until(lambda: cloud.submissions)
            await asyncio.to_thread(daemon.kill)
            assert (await peer.state("offline")).retain
            peer.ask("second", correlation=b"2")  # kept by the broker
            cloud.waits = False
            stack.start_edge(edge, cloud_port=cloud.port)
            answers = [await peer.answer() for _ in range(2)]
            assert {answer.correlation for answer in answers} == {b"1", b"2"}
            peer.ask("third", correlation=b"3")
            assert (await peer.answer()).correlation == b"3"
            assert cloud.effects == {"first": 1, "second": 1, "third": 1}
            await asyncio.to_thread(stack.close)
            assert (await peer.state("offline")).retain
    finally:
        await asyncio.to_thread(stack.close)
        await cloud.stop()


async def test_a_broker_that_comes_late_or_again(
    mosquitto: Mosquitto, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Away at the start; then killed while a job runs, with every session: its answer waits for the broker."""
    cloud = JobCloud()
    cloud.waits = True
    settings = mqtt_config(mosquitto.port, tags=("cloud",))
    async with running(tmp_path, jobs=PROMPT, mqtt=settings, cloud=cloud) as device:
        await until(lambda: has_problem(device, "The broker cannot be used"))
        mosquitto.start()
        with peer_of(mosquitto) as peer:
            await peer.state("online")
            await until(lambda: not has_problem(device, "broker"))
            peer.ask("hello", correlation=b"1")
            await until(lambda: cloud.submissions)
        mosquitto.kill()
        await until(lambda: has_problem(device, "closed the connection"))
        mosquitto.start()
        with peer_of(mosquitto) as peer:
            await peer.state("online")
            cloud.waits = False
            assert (await peer.answer()).correlation == b"1"
            await until(lambda: outbox_of(device).replies_due == 0)
        assert "has discarded this device" in caplog.text
        assert cloud.effects == {"hello": 1}


async def test_a_link_that_is_silent_is_cut(mosquitto: Mosquitto, tmp_path: Path) -> None:
    """Connections stay open, and nothing passes: the device notices by its ping and connects again."""
    mosquitto.start()
    async with (
        relay_to(mosquitto.port) as relay,
        running(tmp_path, jobs=PROMPT, mqtt=mqtt_config(relay.port, tags=("edge",), keepalive_s=1.0)) as device,
    ):
        with peer_of(mosquitto) as peer:
            await peer.state("online")
            relay.silent = relay.mute = True
            peer.ask("hello", correlation=b"1")
            await until(lambda: has_problem(device, "The broker cannot be used"))
            relay.silent = relay.mute = False
            assert (await peer.answer()).correlation == b"1"


async def test_a_device_that_stops_says_so_and_goes_on_later(mosquitto: Mosquitto, tmp_path: Path) -> None:
    """What runs at the end of a drain is given back, and answered by the next start."""
    mosquitto.start()
    cloud = JobCloud()
    cloud.waits = True
    settings = mqtt_config(mosquitto.port, tags=("cloud",))
    with peer_of(mosquitto) as peer:
        async with running(tmp_path, jobs=PROMPT, mqtt=settings, cloud=cloud) as device:
            await peer.state("online")
            peer.ask("hello", correlation=b"1")
            await until(lambda: cloud.submissions)
            await device.app.drain()
            peer.ask("late", correlation=b"2")
        assert (await peer.state("offline")).retain
        cloud.waits, cloud.url = False, ""
        async with running(tmp_path, jobs=PROMPT, mqtt=settings, cloud=cloud):
            answers = {(await peer.answer()).correlation for _ in range(2)}
            assert answers == {b"1", b"2"}
        assert cloud.effects == {"hello": 1, "late": 1}


async def test_a_broker_that_refuses_this_device_is_told(
    mosquitto: Mosquitto, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong password is an ERROR and a problem, until the file is corrected."""
    passwords, secret = tmp_path / "passwords", tmp_path / "secret"
    secret.write_text("wrong\n")
    command = ["mosquitto_passwd", "-b", "-c", str(passwords), "device", "right"]
    await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
    mosquitto.settings = ["allow_anonymous false", f"password_file {passwords}"]
    mosquitto.start()
    settings = mqtt_config(mosquitto.port, username="device", password_file=str(secret))
    async with running(tmp_path, jobs=PROMPT, mqtt=settings) as device:
        await until(lambda: has_problem(device, "refuses this device: Not authorized"))
        assert [record.levelname for record in caplog.records if "refuses this device" in record.message] == ["ERROR"]
        assert (await device.get("/readyz")).status == 200


async def test_tls_with_certificates_of_both_sides(
    mosquitto: Mosquitto, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An authority that did not sign the broker's certificate is an ERROR and a problem; the right one connects."""
    files, port = Certificates(tmp_path), free_port()
    mosquitto.settings += [f"listener {port} 127.0.0.1", f"cafile {files.ca}", "require_certificate true"]
    mosquitto.settings += [f"certfile {files.server}", f"keyfile {files.server_key}"]
    mosquitto.start()
    other = tmp_path / "other"
    other.mkdir()
    trusting = mqtt_config(
        port,
        tags=("edge",),
        url=f"mqtts://127.0.0.1:{port}",
        ca_file=str(files.ca),
        cert_file=str(files.client),
        key_file=str(files.client_key),
    )
    wary = msgspec.structs.replace(trusting, ca_file=str(Certificates(other).ca))
    async with running(tmp_path / "wary", jobs=PROMPT, mqtt=wary) as device:
        await until(lambda: has_problem(device, "CERTIFICATE_VERIFY_FAILED"))
        assert {record.levelname for record in caplog.records if "CERTIFICATE" in record.message} == {"ERROR"}
    async with running(tmp_path / "trusting", jobs=PROMPT, mqtt=trusting):
        with peer_of(mosquitto) as peer:
            await peer.state("online")
            peer.ask("hello", correlation=b"1")
            assert (await peer.answer()).correlation == b"1"


async def test_answers_that_the_broker_refuses_wait(mosquitto: Mosquitto, tmp_path: Path) -> None:
    """Its access list lets the device read and not answer: told, and the answer is kept."""
    acl = tmp_path / "acl"
    acl.write_text("topic readwrite #\nuser device\ntopic read plant/+/ask\ntopic write causeway/#\n")
    mosquitto.settings.append(f"acl_file {acl}")
    mosquitto.start()
    settings = mqtt_config(mosquitto.port, tags=("edge",), username="device")
    async with running(tmp_path, jobs=PROMPT, mqtt=settings) as device:
        with peer_of(mosquitto) as peer:
            await peer.state("online")
            peer.ask("hello", correlation=b"1")
            await until(lambda: has_problem(device, "The broker refuses answers. Correct its permissions"))
            assert outbox_of(device).replies_due == 1


async def test_two_devices_with_one_name_are_told(mosquitto: Mosquitto, tmp_path: Path) -> None:
    """Copied images have the same `client_id`: each connection ends the other's."""
    mosquitto.start()
    settings = mqtt_config(mosquitto.port)
    async with running(tmp_path / "one", mqtt=settings) as one:
        await until(lambda: bridge_of(one).stats.connected)
        async with running(tmp_path / "two", mqtt=settings):
            await until(lambda: has_problem(one, "another client may have the name 'device'"))
