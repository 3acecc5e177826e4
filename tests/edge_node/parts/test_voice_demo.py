"""The parts of `make demo-voice` that its figures rest on: the commands that ship, and the watch over the network."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from causeway_train.function_calls.call import slot_spans
from causeway_train.function_calls.dataset import read_rows
from causeway_train.function_calls.intents import is_device_row
from tests.bench.voice.measure import COMMANDS, choose_rows
from tests.bench.voice.network import NamespaceWatch, namespace_command
from tests.check.sources import ROOT

_WATCHED = """
import socket, sys
from tests.bench.voice.network import NamespaceWatch, raise_loopback
raise_loopback()
watch = NamespaceWatch()
watch.start()
with socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection(server.getsockname()).close()
exec(sys.argv[1])
print(watch.stop()[-1].split()[5])
"""
_CONNECT = "socket.socket().connect_ex(('192.0.2.1', 443))"
_SEND = "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'?', ('127.0.0.1', 53))"
_CHILD = f"import subprocess; subprocess.run([sys.executable, '-c', {'import socket; ' + _CONNECT!r}])"


def test_the_commands_that_ship_are_the_devices_own() -> None:
    """Each is a command that the device's assistant answers, and the values of its slots are in its text."""
    rows = read_rows(COMMANDS, "hwu64")
    assert len(rows) >= 30
    assert [row.text for row in rows if not is_device_row(row.source, row.intent) or slot_spans(row) is None] == []
    assert len(choose_rows(None, 100)) == len(rows)
    assert len(choose_rows(None, 4)) == 4


@pytest.mark.parametrize(("action", "sought"), [("pass", 0), (_CONNECT, 1), (_SEND, 1), (_CHILD, 1)])
def test_the_watch_counts_what_seeks_a_way_out(action: str, sought: int) -> None:
    """Connections over loopback are not counted; those to another machine, a child's too, and name lookups are."""
    command = namespace_command()
    if command is None:
        pytest.skip("no network namespaces here")
    program = [*command, sys.executable, "-c", _WATCHED, action]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == [str(sought)], done.stderr


def test_the_watch_refuses_a_namespace_with_a_way_out() -> None:
    """Started outside of a namespace of its own it would report a silence that it cannot see."""
    if [name for _, name in socket.if_nameindex()] == ["lo"]:
        pytest.skip("this machine has no interface but loopback")
    with pytest.raises(RuntimeError, match="is not isolated: it has"):
        NamespaceWatch()
