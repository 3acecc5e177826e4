"""`GET /v1/models` and `GET /v1/models/{id}`."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

_ENCODER = msgspec.json.Encoder()


class _Model(msgspec.Struct):
    id: str
    owned_by: str
    created: int
    object: str = "model"


class _Models(msgspec.Struct):
    data: list[_Model]
    object: str = "list"


def encode_models(models: Iterable[tuple[str, str, int]]) -> bytes:
    """Encode the list of models. Each model is (id, owned_by, created: Unix time in seconds)."""
    return _ENCODER.encode(_Models([_Model(name, owner, created) for name, owner, created in models]))


def encode_model(name: str, owned_by: str, created: int) -> bytes:
    """Encode one model. `created` is Unix time in seconds."""
    return _ENCODER.encode(_Model(name, owned_by, created))
