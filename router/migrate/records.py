"""Decision records of the previous version, with the present names of signals."""

from __future__ import annotations

from typing import Any

import msgspec

from ..renames import IMAGES_TEXT, find
from ..types import DecisionRecord

_NAMES_BEFORE = IMAGES_TEXT.partition("_")[0].encode()


class _Estimates(msgspec.Struct, frozen=True):
    images_text: bool | None = msgspec.field(name=IMAGES_TEXT, default=None)


class RecordBefore(msgspec.Struct, frozen=True):
    """The fields of a previous version's record whose names have changed."""

    estimates: _Estimates


Decoder = msgspec.msgpack.Decoder[Any] | msgspec.json.Decoder[Any]


def with_new_names(record: DecisionRecord, data: bytes, before: Decoder) -> DecisionRecord:
    """Return the record that was decoded from `data`, with the fields that it has there under previous names."""
    if _NAMES_BEFORE not in data:
        return record
    old: RecordBefore = before.decode(data)
    estimates = record.estimates
    if old.estimates.images_text is not None:
        estimates = msgspec.structs.replace(estimates, images_text=old.estimates.images_text)
    found = ((name, find("signal", name)) for name in record.unrecorded)
    unrecorded = tuple(name if renamed is None else renamed.new for name, renamed in found)
    return msgspec.structs.replace(record, estimates=estimates, unrecorded=unrecorded)
