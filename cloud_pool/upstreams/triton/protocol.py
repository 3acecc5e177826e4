"""The messages of inference.proto, from its compiled form: tritonclient's stubs import gRPC and numpy."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_SERVICE = "/inference.GRPCInferenceService/"
INFER = f"{_SERVICE}ModelStreamInfer"
SERVER_READY = f"{_SERVICE}ServerReady"
REPOSITORY_INDEX = f"{_SERVICE}RepositoryIndex"
MODEL_LOAD = f"{_SERVICE}RepositoryModelLoad"
MODEL_UNLOAD = f"{_SERVICE}RepositoryModelUnload"
# A pool of its own, because a program that imports tritonclient, too, has these names in the default one.
_pool = descriptor_pool.DescriptorPool()
for _file in descriptor_pb2.FileDescriptorSet.FromString(
    files(__package__).joinpath("inference.binpb").read_bytes()
).file:
    _pool.Add(_file)


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"inference.{name}"))


ModelInferRequest = _message("ModelInferRequest")
ModelInferResponse = _message("ModelInferResponse")
ModelStreamInferResponse = _message("ModelStreamInferResponse")
ServerReadyResponse = _message("ServerReadyResponse")
RepositoryIndexResponse = _message("RepositoryIndexResponse")
RepositoryModelLoadRequest = _message("RepositoryModelLoadRequest")
RepositoryModelUnloadRequest = _message("RepositoryModelUnloadRequest")
