"""Addresses, ranges and logins of brokers, and clients that are not installed: no broker is needed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from causeway_server.cloud_pool.brokers.open import open_sink, open_source
from causeway_server.cloud_pool.brokers.port import BrokerLogin, parse_topic
from causeway_server.router.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("nats://broker/plant.asks", "nats://broker:4222/plant.asks"),
        ("nats+tls://broker:7000/asks", "nats+tls://broker:7000/asks"),
        ("kafka://a,b:9093,[::1]/asks", "kafka://a:9092,b:9093,[::1]:9092/asks"),
    ],
)
def test_an_address_is_completed_by_the_brokers_port(text: str, whole: str) -> None:
    address = parse_topic(text, "--in")
    assert str(address) == whole
    assert str(address.sibling(".failed")) == f"{whole}.failed"
    assert parse_topic(whole, "--in") == address


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("broker/asks", "nats://"),
        ("amqp://broker/asks", "nats://"),
        ("kafka://broker", "no valid topic name"),
        ("kafka://broker/", "no valid topic name"),
        ("nats://broker/a topic", "no valid topic name"),
        ("nats://broker/asks?x=1", "no valid topic name"),
        ("nats://user:secret@broker/asks", "`streams.login`"),
        ("kafka://a,,b/asks", "'' is not of the form `host:port`"),
        ("kafka://a:port/asks", "'a:port' is not of the form `host:port`"),
    ],
)
def test_an_address_that_cannot_work_is_refused_at_its_option(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_topic(text, "--out")
    assert raised.value.where == "--out"
    assert said in raised.value.message
    assert "secret" not in raised.value.message


# --- logins -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("login", "where"),
    [
        (BrokerLogin(username="u"), "username"),
        (BrokerLogin(cert_file="c"), "cert_file"),
        (BrokerLogin(key_file="k"), "cert_file"),
    ],
)
def test_half_a_login_is_refused_by_its_key(login: BrokerLogin, where: str) -> None:
    with pytest.raises(ConfigError) as raised:
        login.check()
    assert raised.value.where == f"streams.login.{where}"
    BrokerLogin(username="u", password_file="p", cert_file="c", key_file="k").check()


def test_a_password_is_read_again_and_one_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "password"
    login = BrokerLogin(username="u", password_file=str(file))
    for content in ("first\n", "second"):
        file.write_text(content)
        assert login.password() == content.strip()
    file.write_bytes(b"pass\xffword")
    for _ in range(2):
        with pytest.raises(ConfigError, match=str(file)) as raised:
            login.password()
        assert raised.value.where == "streams.login.password_file"
        file.unlink(missing_ok=True)
    assert BrokerLogin().password() == ""


@pytest.mark.parametrize("key", ["ca_file", "cert_file"])
@pytest.mark.parametrize("content", [None, "no certificate"], ids=["missing", "other content"])
def test_certificates_that_cannot_be_used_are_refused(tmp_path: Path, key: str, content: str | None) -> None:
    file = tmp_path / "file.pem"
    if content is not None:
        file.write_text(content)
    login = BrokerLogin(ca_file=str(file)) if key == "ca_file" else BrokerLogin(cert_file=str(file), key_file=str(file))
    with pytest.raises(ConfigError, match=r"file\.pem (holds no PEM|cannot be read)") as raised:
        login.tls_context()
    assert raised.value.where == f"streams.login.{key}"


# --- clients ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "part", "library"),
    [
        ("kafka", "source", "kafka.source"),
        ("kafka", "sink", "kafka.sink"),
        ("nats", "source", "jetstream"),
        ("nats", "sink", "jetstream"),
    ],
)
def test_a_client_that_is_not_installed_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, kind: str, part: str, library: str
) -> None:
    """At the option that needs it."""
    monkeypatch.setitem(sys.modules, f"causeway_server.cloud_pool.brokers.{library}", None)
    address, login = parse_topic(f"{kind}://broker/asks", "--in"), BrokerLogin()
    parts: dict[str, Callable[[], object]] = {
        "source": lambda: open_source(address, "p", login, ack_wait_s=30.0),
        "sink": lambda: open_sink(address, "p", login),
    }
    with pytest.raises(ConfigError, match=rf"pip install 'causeway-router\[{kind}\]'") as raised:
        parts[part]()
    assert raised.value.where == ("--out" if part == "sink" else "--in")
