"""Headers of NATS messages, with nats-py's own parser and with that of its extra `fast-parse`."""

from __future__ import annotations

from typing import Any

import pytest

nats_client = pytest.importorskip("nats.aio.client")


@pytest.mark.parametrize(
    "headers",
    [
        {"Causeway-Message": "m-2", "other": "one"},
        {"Causeway-Message": ["m-1", "m-2"], "other": ["one"]},  # findings/nats-headers-become-lists.sh
    ],
)
def test_a_header_is_text_whichever_parser_read_it(headers: Any) -> None:
    from causeway_server.cloud_pool.brokers.jetstream import incoming

    reply = "$JS.ACK.stream.consumer.1.7.7.1800000000000000000.0"
    message = nats_client.Msg(_client=None, subject="topic", reply=reply, data=b"hi", headers=headers)
    read = incoming(message)
    assert read.headers == {"causeway-message": "m-2", "other": "one"}
    assert (read.position, read.body) == ("7", b"hi")
