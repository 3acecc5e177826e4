"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

_ENCODER = msgspec.json.Encoder()


class ModelObject(msgspec.Struct):
    id: str
    owned_by: str
    created: int
    object: str = "model"


class ModelList(msgspec.Struct):
    data: list[ModelObject]
    object: str = "list"


def encode_models(models: Iterable[tuple[str, str, int]]) -> bytes:
    """Encode the list of models. Each model is (id, owned_by, created: Unix time in seconds)."""
    return _ENCODER.encode(ModelList([ModelObject(name, owner, created) for name, owner, created in models]))


def encode_model(name: str, owned_by: str, created: int) -> bytes:
    """Encode one model. `created` is Unix time in seconds."""
    return _ENCODER.encode(ModelObject(name, owned_by, created))
