"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

_ENCODER = msgspec.json.Encoder()


class ModelUse(msgspec.Struct):
    """Ours, beside OpenAI's fields. `endpoints`: the paths that accept the model."""

    endpoints: tuple[str, ...]


class ModelObject(msgspec.Struct):
    """One model. `created`: Unix time in seconds. `causeway`: left out where every path accepts every model."""

    id: str
    owned_by: str
    created: int
    object: str = "model"
    causeway: ModelUse | msgspec.UnsetType = msgspec.UNSET


class ModelList(msgspec.Struct):
    data: list[ModelObject]
    object: str = "list"


def encode_models(models: Iterable[ModelObject]) -> bytes:
    """Encode the list of models."""
    return _ENCODER.encode(ModelList([*models]))


def encode_model(model: ModelObject) -> bytes:
    """Encode one model."""
    return _ENCODER.encode(model)
