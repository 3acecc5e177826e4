"""CloudEvents by MQTT: both modes mean the same."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, Literal

import msgspec
import pytest

from causeway_server.edge_node.jobs.record import DueReply, EdgeJob
from causeway_server.edge_node.mqtt.messages import (
    Message,
    address_of,
    answer_of,
    in_binary_mode,
    read_message,
    refusal,
)
from causeway_server.router.errors import CausewayError, DeadlineExceeded, InvalidRequest, UnsupportedMediaType
from causeway_server.router.jobs.cloud_event import CONTENT_TYPE, event_format, parse_event
from causeway_server.router.jobs.job import JobState

from .peer import NOW, message, mqtt_config

SUCCEEDED = EdgeJob(
    id="job_1",
    owner="mqtt",
    priority="bulk",
    endpoint="/v1/chat/completions",
    model="auto",
    may_leave=True,
    lane="",
    state=JobState.SUCCEEDED,
    due=0.0,
    deadline=1.0,
    accepted_unix=0.0,
    ended_unix=NOW,
)
BINARY = {"specversion": "1.0", "id": "e-1", "source": "/sensor/7", "type": "asked"}


def structured(content_type: str = CONTENT_TYPE["json"], **fields: Any) -> Message:
    """A message that is an event."""
    event = {"specversion": "1.0", "id": "e-1", "source": "/sensor/7", "type": "asked", "data": {"n": 1}} | fields
    encode = msgspec.msgpack.encode if content_type == CONTENT_TYPE["msgpack"] else msgspec.json.encode
    return message(payload=encode(event), content_type=content_type)


@pytest.mark.parametrize("content_type", [*CONTENT_TYPE.values(), "Application/CloudEvents+JSON; charset=utf-8"])
def test_a_structured_event_is_the_same_job_as_one_in_binary_mode(content_type: str) -> None:
    """Its attributes bind it: tags join those of the message, and its expiry is a deadline."""
    (topic,) = mqtt_config(1883).topics
    given = {"causewaytags": "private", "causewaypriority": "bulk", "expirytime": "1970-01-01T00:17:00Z"}
    received = structured(content_type, **given, time="1970-01-01T00:16:00Z")
    tagged = msgspec.structs.replace(received, properties={"x-causeway-tags": "camera", "causewaytags": "door"})
    read = read_message(in_binary_mode(tagged, "chat"), topic, NOW)
    assert read.headers["x-causeway-tags"] == "camera,door,private"
    assert read.headers["x-causeway-priority"] == "bulk"
    assert (read.body, read.deadline_ms) == (b'{"n":1}', 20_000)
    binary = message(payload=b'{"n":1}', properties=BINARY | given)
    assert read_message(binary, topic, NOW).key == read_message(in_binary_mode(received, "chat"), topic, NOW).key
    assert read_message(binary, topic, NOW).deadline_ms == 20_000


@pytest.mark.parametrize("content_type", list(CONTENT_TYPE.values()))
def test_a_structured_event_is_answered_with_one(content_type: str) -> None:
    """It has the attributes that an answer in binary mode has, and its data is the answer."""
    received = in_binary_mode(structured(content_type), "chat")
    address = address_of(received, mqtt_config(1883).topics[0], "plant/7/answers", "device")
    answer = answer_of(DueReply(SUCCEEDED, b'{"choices":[]}', address.encoded(), 0.0))
    assert (answer.content_type, answer.is_text) == (content_type, content_type == CONTENT_TYPE["json"])
    assert dict(answer.properties) == {"x-causeway-status": "succeeded", "x-causeway-job": "job_1"}
    event = parse_event(answer.payload, event_format(content_type))
    assert (event.id, event.source, event.type) == ("job_1", "/causeway/device", "causeway.job.succeeded")
    assert event.time == datetime.fromtimestamp(NOW, UTC)
    assert bytes(event.data) == b'{"choices":[]}'
    refused = refusal(address, InvalidRequest("no"))
    event = parse_event(refused.payload, event_format(content_type))
    assert (event.type, json.loads(bytes(event.data))["error"]["message"]) == ("causeway.job.refused", "no")


@pytest.mark.parametrize(
    ("received", "form", "error"),
    [
        (structured("application/cloudevents-batch+json"), "chat", UnsupportedMediaType),
        (structured("application/cloudevents+avro"), "chat", UnsupportedMediaType),
        (message(payload=b"{", content_type=CONTENT_TYPE["json"]), "chat", InvalidRequest),
        (message(payload=b"[" * 5000, content_type=CONTENT_TYPE["json"]), "chat", InvalidRequest),
        (message(payload=b"\xc1", content_type=CONTENT_TYPE["msgpack"]), "chat", InvalidRequest),
        (structured(specversion="0.3"), "chat", InvalidRequest),
        (structured(), "text", InvalidRequest),
        (structured(causewaypriority="first"), "chat", InvalidRequest),
        (structured(expirytime="tomorrow"), "chat", InvalidRequest),
        (structured(expirytime="1970-01-01T00:00:00Z"), "chat", DeadlineExceeded),
        (message(properties=BINARY | {"expirytime": "tomorrow"}), "chat", InvalidRequest),
    ],
)
def test_an_event_that_is_none_is_refused(
    received: Message, form: Literal["chat", "text"], error: type[CausewayError]
) -> None:
    (topic,) = mqtt_config(1883, topic={"form": form}).topics
    with pytest.raises(error):
        read_message(in_binary_mode(received, form), topic, NOW)


def test_a_message_that_is_no_event_stays_as_it_is() -> None:
    received = message(content_type="application/json", properties={"causewaytags": "x"})
    assert in_binary_mode(received, "chat") is received
    assert "x-causeway-tags" not in read_message(received, mqtt_config(1883).topics[0], NOW).headers
