"""One request to the model and its responses, without Triton's types, and its translation into jobs of the engine."""

from __future__ import annotations

import itertools

import msgspec

from models.llama_cpp.protocol import Job, Prompt
from router.errors import InvalidRequest
from router.types import TokenLogprob

from ..upstreams.triton.messages import SamplingParameters


class RequestedOutputs(msgspec.Struct, frozen=True):
    """Which optional output tensors the request wants."""

    finish_reason: bool = False
    num_input_tokens: bool = False
    num_output_tokens: bool = False
    logprobs: bool = False
    cumulative_logprob: bool = False


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str = ""
    token_ids: tuple[int, ...] = ()  # instead of `prompt`
    parameters: SamplingParameters
    stream: bool = False
    with_input: bool = False  # the answer begins with the prompt (only when not streaming)
    outputs: RequestedOutputs = RequestedOutputs()
    embed: bool = False
    deadline_s: float | None = None  # time left
    call_name: str = ""  # the name by which it can be cancelled
    caller: str = ""  # see `Job.caller`


class ModelResponse(msgspec.Struct, frozen=True):
    """One response; each tuple has one element per sequence."""

    texts: tuple[str, ...]
    finish_reasons: tuple[str | None, ...]
    new_tokens: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]
    cumulative_logprobs: tuple[float, ...]
    input_tokens: int = 0  # known with the last response
    embedding: tuple[float, ...] = ()


def jobs_of(request: ModelRequest, ids: itertools.count[int]) -> list[Job]:
    """Translate a request into one job per sequence. Raises InvalidRequest."""
    parameters = request.parameters
    if request.stream and request.with_input:
        raise InvalidRequest("exclude_input_in_output = false is not possible while streaming")
    guided = parameters.guided
    return [
        Job(
            id=next(ids),
            # The gateway rendered the prompt and broke up special tokens in the user's text: those left are intended.
            # What is to be embedded is the user's text alone.
            prompt=Prompt(tokens=request.token_ids)
            if request.token_ids
            else Prompt(text=request.prompt, parse_special=not request.embed),
            adapter=parameters.lora_name,
            max_tokens=parameters.max_tokens,
            sampling=parameters.sampling(index),
            stop=parameters.stops,
            grammar=guided.grammar,
            json_schema=guided.schema,
            call_frame=guided.call_frame,
            thinking=guided.thinking,
            thinking_tokens=guided.thinking_tokens,
            copy_source=guided.copy_source,
            answer_prefix=guided.answer_prefix,
            logprobs=_logprobs(request),
            ignore_eos=parameters.ignore_eos,
            deadline_s=request.deadline_s,
            embed=request.embed,
            caller=request.caller,
            refusal="skip",  # there is no stronger model to defer to
        )
        for index in range(parameters.n)
    ]


def _logprobs(request: ModelRequest) -> int | None:
    outputs, count = request.outputs, request.parameters.logprobs
    if outputs.cumulative_logprob and count is None:
        return 0
    return count if outputs.logprobs or outputs.cumulative_logprob else None
