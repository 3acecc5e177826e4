"""The messages of generation.proto, from its compiled form: generated modules fit some versions of protobuf only."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf import struct_pb2 as struct_pb2  # its file is imported by ours

COMPILED = "generation.binpb"
SERVICE = "causeway.v1.Generation"


def compiled() -> Any:
    """Return the compiled form of generation.proto, a FileDescriptorProto."""
    content = files(__package__).joinpath(COMPILED).read_bytes()
    (found,) = descriptor_pb2.FileDescriptorSet.FromString(content).file
    return found


_pool = descriptor_pool.Default()
_pool.AddSerializedFile(compiled().SerializeToString())


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"causeway.v1.{name}"))


InputChunk = _message("InputChunk")
OutputChunk = _message("OutputChunk")
Head = _message("Head")
Delta = _message("Delta")
ToolCall = _message("ToolCall")
TokenLogprobs = _message("TokenLogprob")
UsageReport = _message("Usage")
