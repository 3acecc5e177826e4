"""Notifications to systemd over a real datagram socket."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

from causeway_server.edge_node.daemon.lifecycle import SystemdNotifier


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(5)
        yield receiver


def test_each_call_is_one_datagram(systemd: socket.socket) -> None:
    """Ready, watchdog and stopping have the format of sd_notify(3), in UTF-8."""
    notifier = SystemdNotifier({"NOTIFY_SOCKET": systemd.getsockname()})
    assert notifier.ready("listening on 127.0.0.1:8080 – ünd")
    assert systemd.recv(4096).decode() == "READY=1\nSTATUS=listening on 127.0.0.1:8080 – ünd"
    assert notifier.ready("two\nlines=1")
    assert systemd.recv(4096) == b"READY=1\nSTATUS=two lines=1"
    assert notifier.watchdog()
    assert systemd.recv(4096) == b"WATCHDOG=1"
    assert notifier.stopping("draining")
    assert systemd.recv(4096) == b"STOPPING=1\nSTATUS=draining"


def test_the_unit_has_a_finite_start_timeout_that_a_starting_daemon_extends(systemd: socket.socket) -> None:
    unit = files("causeway_server.edge_node.deploy").joinpath("causeway-edge.service").read_text()
    (timeout_s,) = re.findall(r"^TimeoutStartSec=(\d+)$", unit, re.MULTILINE)
    assert SystemdNotifier({"NOTIFY_SOCKET": systemd.getsockname()}).starting("waiting for target small")
    message, status = systemd.recv(4096).decode().splitlines()
    assert int(message.removeprefix("EXTEND_TIMEOUT_USEC=")) / 1e6 <= int(timeout_s)
    assert status == "STATUS=waiting for target small"


def test_an_abstract_socket_is_supported() -> None:
    """Its address begins with @."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("")  # the kernel picks an abstract name
        receiver.settimeout(5)
        name = "@" + receiver.getsockname()[1:].decode()
        assert SystemdNotifier({"NOTIFY_SOCKET": name}).ready()
        assert receiver.recv(4096) == b"READY=1"


@pytest.mark.parametrize("name", ["", "vsock:2:1234", "relative"])
def test_without_a_usable_socket_calls_return_false(name: str) -> None:
    assert not SystemdNotifier({"NOTIFY_SOCKET": name}).ready()


def test_a_full_or_closed_socket_does_not_block(systemd: socket.socket) -> None:
    """The message is lost."""
    notifier = SystemdNotifier({"NOTIFY_SOCKET": systemd.getsockname()})
    while notifier.ready("fill"):
        pass
    assert not notifier.watchdog()
    systemd.close()
    assert not notifier.watchdog()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "42"}, 15.0),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "43"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_the_watchdog_interval_is_half_of_watchdog_usec(environ: dict[str, str], expected: float | None) -> None:
    """If WATCHDOG_PID names this process."""
    assert SystemdNotifier(environ, pid=42).watchdog_s == expected
