"""A sensor that asks the device by MQTT, prints the answer, and ends: `mqtt_sensor.py PORT SENSOR TEXT`.

The device takes questions from `plant/+/ask` as text and answers on the same topic with `/answer` (mqtt.yaml).
"""

import queue
import sys

from paho.mqtt import client as mqtt
from paho.mqtt.enums import CallbackAPIVersion

ANSWER_TIMEOUT_S = 60.0


def ask(port: int, sensor: str, text: str) -> str:
    """Publish a question and wait for its answer. Raises queue.Empty without one."""
    topic = f"plant/{sensor}/ask"
    answers: queue.Queue[str] = queue.Queue()
    client = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
    client.on_message = lambda _client, _data, message: answers.put(message.payload.decode())
    # The question follows the subscription, so that no answer is missed.
    client.on_connect = lambda client, *_: client.subscribe(f"{topic}/answer", qos=1)
    client.on_subscribe = lambda client, *_: client.publish(topic, text, qos=1)
    client.connect("127.0.0.1", port)
    client.loop_start()
    try:
        return answers.get(timeout=ANSWER_TIMEOUT_S)
    finally:
        client.disconnect()
        client.loop_stop()


if __name__ == "__main__":
    print(ask(int(sys.argv[1]), sys.argv[2], sys.argv[3]))
