"""The body of `POST /v1/completions` → `Request`."""

from __future__ import annotations

from typing import Final

from ..errors import InvalidRequest
from ..types import Request, RoutingHints
from .request_body import (
    extra_of,
    includes_usage,
    load,
    merge_hints,
    resume_of,
    sampling_of,
    stop_of,
    too_deep,
    validate,
)
from .wire import WireCompletion

Prompts = tuple[str | tuple[int, ...], ...]

_FIELDS: Final = frozenset(WireCompletion.__struct_fields__)


def parse_completion(body: bytes, hints: RoutingHints, *, resumes: bool = False) -> Request:
    """Parse and validate a legacy completion request. Arguments and errors as for `parse_chat`."""
    try:
        document = load(body)
        wire = validate(document, WireCompletion)
        return Request(
            kind="completion",
            model=wire.model,
            prompts=prompts_of(wire.prompt, "prompt", empty_text=True),
            max_tokens=wire.max_tokens,
            sampling=sampling_of(wire),
            stop=stop_of(wire.stop),
            n=wire.n or 1,
            stream=wire.stream is True,
            include_usage=includes_usage(wire),
            logprobs=wire.logprobs,
            echo=wire.echo is True,
            suffix=wire.suffix,
            user=wire.user,
            extra=extra_of(document, _FIELDS),
            hints=merge_hints(hints, wire.causeway),
            resume=resume_of(wire.causeway, accepted=resumes),
        )
    except RecursionError:
        raise too_deep() from None


def prompts_of(wire: str | list[str | int | list[int]], field: str, *, empty_text: bool) -> Prompts:
    """Return the prompts of text, several texts, token ids (one prompt), or several lists of token ids.

    Raises:
        InvalidRequest: text and token ids are mixed, or a prompt is empty (an empty text is valid if `empty_text`).
    """
    if isinstance(wire, str):
        wire = [wire]
    kinds = {type(item) for item in wire}
    if len(kinds) != 1:
        raise InvalidRequest(f"`{field}` mixes text and token ids. Send all of one kind.", param=field)
    if kinds == {int}:
        return (tuple([item for item in wire if isinstance(item, int)]),)
    prompts: list[str | tuple[int, ...]] = []
    for at, item in enumerate(wire):
        if not item and not (item == "" and empty_text):
            param = f"{field}[{at}]" if len(wire) > 1 else field
            raise InvalidRequest(f"`{param}` is empty. Send some text or token ids.", param=param)
        prompts.append(item if isinstance(item, str) else tuple(item) if isinstance(item, list) else ())
    return tuple(prompts)
