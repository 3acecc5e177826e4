"""A full collection of a running gateway has little to look at, so that it stops no stream."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
COUNT_ON_SIGNAL = """
import gc, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: print("objects", len(gc.get_objects()), gc.get_freeze_count(), flush=True))
from causeway_server.cloud_pool.cli.main import main
sys.argv = ["causeway-cloud", *sys.argv[1:]]
main()
"""


def test_what_exists_after_the_start_is_not_collected() -> None:
    command = [sys.executable, "-c", COUNT_ON_SIGNAL, "serve", "--port", "0", "--operator-port", "0"]
    with subprocess.Popen(
        [*command, "--triton", "127.0.0.1:1"], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as gateway:
        try:
            assert gateway.stdout is not None
            assert gateway.stdout.readline().startswith("ready ")
            gateway.send_signal(signal.SIGUSR1)
            name, seen, frozen = gateway.stdout.readline().split()
            assert name == "objects"
            assert int(seen) * 10 < int(frozen)
        finally:
            gateway.terminate()
