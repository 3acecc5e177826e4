"""Kafka's commits and logins, without a broker."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiokafka.errors import KafkaError, ProducerFenced
from hypothesis import given
from hypothesis import strategies as st

from causeway_server.cloud_pool.brokers.kafka.client import translate
from causeway_server.cloud_pool.brokers.kafka.source import ContiguousOffsets
from causeway_server.cloud_pool.brokers.open import open_sink
from causeway_server.cloud_pool.brokers.port import BrokerLogin, parse_topic
from causeway_server.router.errors import ConfigError


@given(
    gaps=st.lists(st.integers(1, 3), min_size=1, max_size=30),
    order=st.randoms(use_true_random=False),
    forgets=st.sets(st.integers(0, 29), max_size=3),
)
def test_a_commit_passes_no_message_that_is_not_acknowledged(gaps: list[int], order: object, forgets: set[int]) -> None:
    """In any order of ends, with gaps as markers leave them, and after going back."""
    delivered = [sum(gaps[: number + 1]) for number in range(len(gaps))]
    offsets, done, committed = ContiguousOffsets(), set[int](), 0
    for offset in delivered:
        offsets.deliver(offset)
    ending = list(delivered)
    order.shuffle(ending)  # type: ignore[attr-defined]
    for number, offset in enumerate(ending):
        offsets.acknowledge(offset)
        done.add(offset)
        due = offsets.to_commit()
        if due is not None:
            assert due > committed or committed == 0
            assert all(below in done for below in delivered if below < due)
            offsets.committed(due)
            committed = due
        assert offsets.to_commit() is None
        if number in forgets:
            floor = offsets.floor
            offsets.reset()
            assert offsets.floor == floor
            for again in delivered:
                if floor is not None and again >= floor:
                    offsets.deliver(again)
            for again in done:
                offsets.acknowledge(again)
    assert offsets.to_commit() is None
    assert (committed, offsets.unacknowledged) == (delivered[-1] + 1, 0)


def test_nothing_is_committed_before_the_first_message() -> None:
    assert ContiguousOffsets().to_commit() is None


@pytest.mark.parametrize(
    ("url", "login", "wrong"),
    [
        ("kafka://host/t", {}, "does not support authentication by token"),
        ("kafka://host/t", {"username": "u", "sasl": "PLAIN"}, r"kafka\+tls://"),
        ("kafka+tls://host/t", {"username": "u", "sasl": "PLAIN"}, ""),
        ("kafka://host/t", {"username": "u"}, ""),
    ],
)
async def test_a_login_that_kafka_cannot_take_is_refused(
    tmp_path: Path, url: str, login: dict[str, str], wrong: str
) -> None:
    """A password that goes over the wire as it is needs TLS."""
    pytest.importorskip("aiokafka")
    (tmp_path / "password").write_text("secret\n")
    complete = BrokerLogin(password_file=str(tmp_path / "password"), **login)  # type: ignore[arg-type]
    address = parse_topic(url, "--out")
    assert str(address) == url.replace("/t", ":9092/t")
    if wrong:
        with pytest.raises(ConfigError, match=wrong):
            open_sink(address, "p", complete)
    else:
        open_sink(address, "p", complete)


def test_a_fault_that_the_client_did_not_expect_is_named() -> None:
    unexpected = KafkaError("Unexpected error during batch delivery")
    unexpected.__cause__ = KeyError("node")
    faults = (unexpected, KafkaError("no cause"), ProducerFenced())
    names = ("KeyError", "KafkaError", "ProducerFenced")
    assert [str(translate(fault)) for fault in faults] == [f"Kafka does not answer ({name})." for name in names]
