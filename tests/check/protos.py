"""`python -m tests.check.protos` compiles each .proto file of the packages again, into a descriptor set beside it."""

from __future__ import annotations

import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

from .sources import ROOT

PROTOS = (
    ROOT / "cloud_pool" / "grpc_api" / "generation.proto",
    ROOT / "cloud_pool" / "upstreams" / "triton" / "inference.proto",
)


def compiled(proto: Path) -> bytes:
    """Return the descriptor set of a .proto file. Raises ValueError if the compiler refuses it."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "set"
        includes = (f"-I{proto.parent}", f"-I{files('grpc_tools').joinpath('_proto')}")
        if protoc.main(("protoc", *includes, f"--descriptor_set_out={target}", proto.name)):
            raise ValueError(f"protoc refuses {proto}")
        return target.read_bytes()


def main() -> None:
    for proto in PROTOS:
        proto.with_suffix(".binpb").write_bytes(compiled(proto))


if __name__ == "__main__":
    main()
