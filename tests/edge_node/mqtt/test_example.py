"""The example of a sensor, as a program of its own, against a real broker and the device of its configuration."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import msgspec
import pytest
import yaml

from causeway_server.edge_node.config.schema import MqttConfig
from tests.mosquitto import Mosquitto

from ..device import running
from ..scripted import EDGE_WORDS

pytestmark = [pytest.mark.mosquitto, pytest.mark.slow]
EXAMPLES = Path(__file__).parents[3] / "examples"


async def test_the_sensor_prints_the_devices_answer(mosquitto: Mosquitto, tmp_path: Path) -> None:
    mosquitto.start()
    section = yaml.safe_load((EXAMPLES / "mqtt.yaml").read_text(encoding="utf-8"))["mqtt"]
    config = msgspec.convert({**section, "url": f"mqtt://127.0.0.1:{mosquitto.port}"}, MqttConfig)
    async with running(tmp_path, mqtt=config):
        command = (sys.executable, str(EXAMPLES / "mqtt_sensor.py"), str(mosquitto.port), "7", "wake me up at six am")
        sensor = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        printed, _ = await sensor.communicate()
    assert (sensor.returncode, printed.decode().strip()) == (0, "".join(EDGE_WORDS).strip())
