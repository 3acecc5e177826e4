"""A real Triton under the product's launcher, with two obedient models.

`python -m tests.cloud_pool.dispatch.replica NAME …`.
`obedient` has the product's own configuration, `picky` one whose prompt is a number, so that our tensor is invalid.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from urllib.request import urlopen

import psutil

from causeway_server.cloud_pool.cli.process import until_stopped
from causeway_server.cloud_pool.cli.triton import ENVIRONMENT
from causeway_server.cloud_pool.triton_server import server_process
from causeway_server.cloud_pool.triton_server.encoder_runtime import EncoderOptions
from causeway_server.cloud_pool.triton_server.launcher import Launcher, ServerCommand
from causeway_server.cloud_pool.triton_server.server_process import (
    TEMPLATES,
    Ports,
    ServedModel,
    clear_orphans,
    command,
    find_environment,
    memory_prefix,
)
from causeway_server.cloud_pool.upstreams.triton.model_control import default_key_file, ensure_key
from causeway_server.models.parts.installed import ENCODERS
from causeway_server.models.parts.process.messages import PartLimits, WorkerSpec
from causeway_server.router.types import Modality
from tests.ports import free_port
from tests.stack import Process

ROOT = Path(__file__).parents[3]
MODELS = ("obedient", "picky")
_TEXT = 'name: "text_input" data_type: TYPE_STRING'


class Replica:
    """The process, its journal, and its child processes. `encoders`: it also has some, see `encoder_options`."""

    def __init__(self, name: str, folder: Path, *, restart: bool = True, encoders: bool = False) -> None:
        self.name = name
        self.journal = folder / f"{name}.journal"
        self.journal.touch()
        self.encode = gate(self.journal)
        """Where this file is, no encoder hangs."""
        self.port = free_port()
        self.metrics_port = free_port()
        ports = [str(port) for port in (self.port, self.metrics_port)]
        argv = [
            sys.executable,
            "-m",
            "tests.cloud_pool.dispatch.replica",
            name,
            "--journal",
            str(self.journal),
            "--ports",
            *ports,
        ]
        argv += ["--encoders"] if encoders else []
        argv += [] if restart else ["--no-restart"]
        self.process = Process(name, argv, folder / f"{name}.log", {"PYTHONPATH": str(ROOT)})

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def server(self) -> psutil.Process:
        (found,) = psutil.Process(self.process.popen.pid).children()
        return found

    def stub(self, model: str) -> psutil.Process:
        """The model's process; Triton does not reap those that died before."""
        (found,) = (
            one
            for one in self.server.children()
            if one.status() != psutil.STATUS_ZOMBIE and any(f"/{model}/" in word for word in one.cmdline())
        )
        return found

    def gauge(self, name: str, model: str) -> float:
        """Read one of an encoder's figures from Triton's metrics."""
        text = urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics").read().decode()
        found = re.search(rf'^causeway_encoder_{name}{{model="{model}"}} (\S+)$', text, re.MULTILINE)
        assert found is not None, text
        return float(found[1])

    def noted(self, mark: str) -> list[str]:
        """What the journal says about the request with this mark."""
        lines = (line.split(" ", 1) for line in self.journal.read_text().splitlines())
        return [what for whose, what in lines if whose == mark]


def write_repository(folder: Path, name: str, journal: Path) -> None:
    config = (TEMPLATES / "llama_cpp" / "config.pbtxt").read_text()
    assert _TEXT in config
    for model in MODELS:
        version = folder / model / "1"
        version.mkdir(parents=True)
        picky = config.replace(_TEXT, _TEXT.replace("TYPE_STRING", "TYPE_FP32"))
        (folder / model / "config.pbtxt").write_text(picky if model == "picky" else config)
        (version / "model.py").write_text((Path(__file__).parent / "models" / "obedient.py").read_text())
        (version / "replica.json").write_text(json.dumps({"name": name, "journal": str(journal)}))


def gate(journal: Path) -> Path:
    return journal.with_suffix(".encode")


def encoder_options(kind: Modality, journal: Path) -> EncoderOptions:
    """Of the product's encoder model around a tiny worker."""
    text = "please open|the door" if kind == "audio" else "TOTAL 42.00"
    options = {"text": text, "then": os.devnull, "until": str(gate(journal))}
    spec = WorkerSpec("tests.models.parts.workers:SizedEncoder", options=options)
    python = journal.with_suffix(".python")  # finds the worker, which is a test's
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{ROOT}:$PYTHONPATH" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return EncoderOptions(kind, spec, str(python), PartLimits(audio_s=20.0, pixels=1_000_000, text_bytes=64 * 1024))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--ports", type=int, nargs=2, required=True, help="gRPC, metrics")
    parser.add_argument("--no-restart", action="store_true")
    parser.add_argument("--encoders", action="store_true")
    arguments = parser.parse_args()
    environment = find_environment(Path(os.environ.get("CAUSEWAY_TRITON_ENV", ENVIRONMENT)))
    clear_orphans()
    prefix, key = memory_prefix(os.getpid()), ensure_key(default_key_file())
    ports = Ports(grpc=arguments.ports[0], metrics=arguments.ports[1])
    with tempfile.TemporaryDirectory(prefix="causeway-dispatch-") as folder:
        write_repository(Path(folder), arguments.name, arguments.journal.absolute())
        encoders = tuple(
            ServedModel(name, encoder_options(kind, arguments.journal.absolute())) for name, kind in ENCODERS.items()
        )
        if arguments.encoders:
            server_process.write_repository(Path(folder), encoders)
        names = (*MODELS, *(model.name for model in encoders if arguments.encoders))
        launcher = Launcher(
            ServerCommand(
                argv=command(environment, Path(folder), names, ports, drain_s=1.0, prefix=prefix, key=key),
                environ=environment.environ(os.environ),
                ports=ports,
                memory_prefix=prefix,
            ),
            drain_s=1.0,
            restart=not arguments.no_restart,
            print_ready=lambda line: print(line, flush=True),
            log=lambda line: print(f"triton: {line}", file=sys.stderr, flush=True),
        )
        status = until_stopped(launcher.run)
    sys.exit(status)


if __name__ == "__main__":
    main()
