"""What the gateway and our encoder models in Triton tell each other: JSON in the tensors `job` and `text_output`.

The part itself travels beside the job, as the bytes that the client sent. What becomes of it is an answer and no error
of Triton's: a file that kills its decoder says nothing about the tier.
"""

from __future__ import annotations

import msgspec

from models.modalities.process.messages import Found, Refused, SegmentFound
from router.types import Modality


class EncodeJob(msgspec.Struct, frozen=True):
    """What to find in a part. All but `kind`: as `Transcribe`, for a sound."""

    kind: Modality
    language: str = ""
    prompt: str = ""
    temperature: float = 0.0
    tell: bool = False
    words: bool = False


class PartRead(msgspec.Struct, frozen=True, tag="read"):
    """The part was read. `seconds`: of a sound."""

    found: Found
    seconds: float = 0.0


class PartFailed(msgspec.Struct, frozen=True, tag="failed"):
    """It was not. `late`: in time."""

    reason: str
    late: bool = False


PartReply = SegmentFound | PartRead | Refused | PartFailed
"""Segments, where they are asked for, and then one of the others."""

read_job = msgspec.json.Decoder(EncodeJob).decode
"""Read the tensor `job`. Raises msgspec.DecodeError."""
read_reply = msgspec.json.Decoder[PartReply](PartReply).decode
"""Read the tensor `text_output`. Raises msgspec.DecodeError."""
