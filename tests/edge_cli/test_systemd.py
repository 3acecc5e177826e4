"""What systemd hears, over a real datagram socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_node.daemon.systemd import SystemdNotifier


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "notify"))
        receiver.settimeout(5)
        yield receiver


def test_each_call_is_one_datagram(systemd: socket.socket) -> None:
    """Ready, status, watchdog and stopping arrive as sd_notify(3) writes them, umlauts included."""
    notifier = SystemdNotifier({"NOTIFY_SOCKET": systemd.getsockname()})
    assert notifier.ready("listening on 127.0.0.1:8080 – ünd")
    assert systemd.recv(4096).decode() == "READY=1\nSTATUS=listening on 127.0.0.1:8080 – ünd"
    assert notifier.status("two\nlines=1")
    assert systemd.recv(4096) == b"STATUS=two lines=1"
    assert notifier.watchdog()
    assert systemd.recv(4096) == b"WATCHDOG=1"
    assert notifier.stopping("draining")
    assert systemd.recv(4096) == b"STOPPING=1\nSTATUS=draining"


def test_an_abstract_socket_is_reached() -> None:
    """An address that begins with @ has no file."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind("")  # the kernel picks an abstract name
        receiver.settimeout(5)
        name = "@" + receiver.getsockname()[1:].decode()
        assert SystemdNotifier({"NOTIFY_SOCKET": name}).ready()
        assert receiver.recv(4096) == b"READY=1"


@pytest.mark.parametrize("name", ["", "vsock:2:1234", "relative"])
def test_without_a_socket_nothing_happens(name: str) -> None:
    """Outside systemd the calls are silent."""
    assert not SystemdNotifier({"NOTIFY_SOCKET": name}).ready()


def test_a_dead_systemd_holds_nobody_up(systemd: socket.socket) -> None:
    """A full or closed socket loses the message and returns at once."""
    notifier = SystemdNotifier({"NOTIFY_SOCKET": systemd.getsockname()})
    while notifier.status("fill"):
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
def test_the_watchdog_is_fed_twice_as_often_as_needed(environ: dict[str, str], expected: float | None) -> None:
    """Half of WATCHDOG_USEC, if it is meant for us."""
    assert SystemdNotifier(environ, pid=42).watchdog_s == expected
