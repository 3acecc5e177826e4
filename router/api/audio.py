"""The operation of `/v1/audio/transcriptions`, of both daemons."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from .. import errors
from ..openai.audio import TranscriptFormat
from .generation import ANY_REQUEST, BODY, Errors
from .operation import EVENTS, FORM, JSON, TEXT, ApiResponse, Operation, Parameter


class TranscriptionForm(Struct):
    """The form of `POST /v1/audio/transcriptions`."""

    file: Annotated[str, Meta(extra_json_schema={"contentMediaType": "application/octet-stream"})]
    model: Annotated[str, Meta(max_length=64)]
    language: str = ""
    prompt: Annotated[str, Meta(max_length=1000)] = ""
    response_format: TranscriptFormat = "json"
    temperature: Annotated[float, Meta(ge=0, le=1)] = 0.0
    stream: bool = False
    granularities: list[Literal["segment", "word"]] = field(name="timestamp_granularities[]", default_factory=list)


class TranscriptBody(Struct):
    """The words of a sound; with `verbose_json` also its language, its length and times; plain text for the rest."""

    text: str


def transcription_operation(
    caller: str, parameters: tuple[Parameter, ...], headers: Mapping[str, str], more_errors: Errors
) -> Operation:
    """Return the operation. `headers`: of its answers."""
    return Operation(
        method="POST",
        path="/v1/audio/transcriptions",
        summary="The words of a sound.",
        caller=caller,
        request={FORM: TranscriptionForm},
        parameters=parameters,
        responses=(ApiResponse(200, {JSON: TranscriptBody, TEXT: str, EVENTS: None}, headers=headers),),
        errors=(
            *(*ANY_REQUEST, *BODY, errors.ModelNotFound, errors.RateLimited, errors.Draining),
            *(errors.DeadlineExceeded, errors.EncoderFailed, *more_errors),
        ),
    )
