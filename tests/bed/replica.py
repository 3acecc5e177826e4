"""`python -m tests.bed.replica NAME`: one Triton under the product's launcher, with a model of this folder."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path

from causeway_server.cloud_pool.cli.process import until_stopped
from causeway_server.cloud_pool.cli.triton import ENVIRONMENT
from causeway_server.cloud_pool.triton_server.launcher import Launcher, ServerCommand
from causeway_server.cloud_pool.triton_server.server_process import (
    TEMPLATES,
    Ports,
    ServedModel,
    clear_orphans,
    command,
    find_environment,
    memory_prefix,
    write_repository,
)
from causeway_server.cloud_pool.upstreams.triton.model_control import default_key_file, ensure_key
from causeway_server.models.catalog.artifact import find_artifact
from causeway_server.models.llama_cpp.protocol import EngineOptions

_MODELS = Path(__file__).parent / "models"


def options(artifact: str) -> EngineOptions:
    resolved = find_artifact(artifact, ())
    refuse_token = resolved.manifest.refuse_token or ""
    return EngineOptions(model_path=str(resolved.path.absolute()), sequences=16, threads=1, refuse_token=refuse_token)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="name of the tier, and of the artifact with --model journaled")
    parser.add_argument("--model", choices=("journaled", "paced"), default="paced")
    parser.add_argument("--journal", type=Path, required=True)
    parser.add_argument("--speed", type=Path, default=Path())
    parser.add_argument("--ports", type=int, nargs=2, required=True, help="gRPC, metrics")
    arguments = parser.parse_args()
    environment = find_environment(Path(os.environ.get("CAUSEWAY_TRITON_ENV", ENVIRONMENT)))
    clear_orphans()
    prefix, key = memory_prefix(os.getpid()), ensure_key(default_key_file())
    ports = Ports(grpc=arguments.ports[0], metrics=arguments.ports[1])
    with tempfile.TemporaryDirectory(prefix="causeway-bed-") as folder:
        write_repository(Path(folder), (ServedModel(arguments.name, options(arguments.name)),))
        version = Path(folder) / arguments.name / "1"
        (version / "model.py").write_bytes((_MODELS / f"{arguments.model}.py").read_bytes())
        bed = {
            "model": str(TEMPLATES / "llama_cpp" / "1" / "model.py"),
            "journal": str(arguments.journal.absolute()),
            "speed": str(arguments.speed.absolute()),
            "peak": str(arguments.journal.with_suffix(".peak").absolute()),
        }
        (version / "bed.json").write_text(json.dumps(bed))
        launcher = Launcher(
            ServerCommand(
                argv=command(environment, Path(folder), (arguments.name,), ports, drain_s=1.0, prefix=prefix, key=key),
                environ=environment.environ(os.environ),
                ports=ports,
                memory_prefix=prefix,
                expected_children=1,
            ),
            drain_s=1.0,
            restart=True,
            print_ready=lambda line: print(line, flush=True),
            log=lambda line: print(f"triton: {line}", file=sys.stderr, flush=True),
            stuck_s=5.0,
        )
        status = until_stopped(launcher.run)
    sys.exit(status)


if __name__ == "__main__":
    main()
