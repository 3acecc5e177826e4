"""The model's runtime with the real engine and a recording responder."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from causeway_server.cloud_pool.triton_server.model_runtime import (
    ModelRequest,
    ModelResponse,
    ModelRuntime,
    RequestedOutputs,
)
from causeway_server.cloud_pool.upstreams.triton.messages import SamplingParameters
from causeway_server.cloud_pool.upstreams.triton.messages import decode_parameters as decode
from causeway_server.models.catalog.artifact import find_artifact
from causeway_server.models.llama_cpp.engine import Engine
from causeway_server.models.llama_cpp.protocol import (
    Emission,
    Emit,
    EngineOptions,
    EngineStats,
    OnFailure,
    SequenceRequest,
)
from causeway_server.router.errors import CausewayError

pytestmark = pytest.mark.engine
PATIENCE_S = 60.0
LONG = SamplingParameters(max_tokens=1900, temperature=0.0, ignore_eos=True)


class RecordingResponder:
    """A model_request Responder that records responses. `late` counts what comes after the end."""

    def __init__(self) -> None:
        self.outputs: list[ModelResponse] = []
        self.error: CausewayError | None = None
        self.ended = threading.Event()
        self.began = threading.Event()
        self.cancelled = False
        self.late = 0

    def send(self, outputs: ModelResponse, *, last: bool) -> None:
        self.late += self.ended.is_set()
        self.outputs.append(outputs)
        self.began.set()
        if last:
            self.ended.set()

    def fail(self, error: CausewayError) -> None:
        self.late += self.ended.is_set()
        self.error = error
        self.ended.set()

    def is_cancelled(self) -> bool:
        return self.cancelled

    def wait(self) -> RecordingResponder:
        assert self.ended.wait(PATIENCE_S)
        return self


class Bed:
    def __init__(self) -> None:
        self.stats: list[EngineStats] = []
        self.idle = threading.Event()
        self.broken = threading.Event()
        self.on_failure: OnFailure | None = None
        self.runtime = ModelRuntime(self._start, report=self._report, broken=self.broken.set)

    def submit(self, request: ModelRequest) -> RecordingResponder:
        self.idle.clear()
        responder = RecordingResponder()
        self.runtime.submit(request, responder)
        return responder

    def comes_to_rest(self) -> bool:
        """Whether nothing runs or waits in the engine, now or soon."""
        stats = self.engine.stats()
        return stats.running + stats.waiting == 0 or self.idle.wait(PATIENCE_S)

    def _start(self, emit: Emit, on_failure: OnFailure) -> Engine:
        self.on_failure = on_failure
        path = str(find_artifact("assistant").path)
        self.engine = engine = Engine(EngineOptions(model_path=path, sequences=4, threads=1, queue=8), emit, on_failure)
        engine.start()
        return engine

    def _report(self, stats: EngineStats) -> None:
        self.stats.append(stats)
        if stats.running + stats.waiting == 0:
            self.idle.set()


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    made = Bed()
    yield made
    made.runtime.close()


def prompt(text: str = "wake me up at seven") -> str:
    return f"<|user|>{text}<|assistant|>"


def test_stream_has_one_response_per_step(bed: Bed) -> None:
    """The last one has the finish reason and the prompt's length."""
    parameters = SamplingParameters(max_tokens=6, temperature=0.0, ignore_eos=True)
    responder = bed.submit(ModelRequest(prompt=prompt(), parameters=parameters, stream=True)).wait()
    assert sum(sum(one.new_tokens) for one in responder.outputs) == 6
    assert [one.finish_reasons for one in responder.outputs[:-1]] == [(None,)] * (len(responder.outputs) - 1)
    assert responder.outputs[-1].finish_reasons == ("length",)
    assert responder.outputs[-1].input_tokens > 0
    assert len(responder.outputs) > 1


def test_whole_answer_is_one_response(bed: Bed) -> None:
    """With `with_input` it begins with the prompt."""
    parameters = SamplingParameters(max_tokens=6, temperature=0.0)
    (plain,) = bed.submit(ModelRequest(prompt=prompt(), parameters=parameters)).wait().outputs
    (whole,) = bed.submit(ModelRequest(prompt=prompt(), parameters=parameters, with_input=True)).wait().outputs
    assert whole.texts[0] == prompt() + plain.texts[0]


def test_sequences_of_one_request_share_responses(bed: Bed) -> None:
    parameters = SamplingParameters(n=3, max_tokens=5, seed=1, ignore_eos=True)
    responder = bed.submit(ModelRequest(prompt=prompt(), parameters=parameters, stream=True)).wait()
    assert {len(one.texts) for one in responder.outputs} == {3}
    assert responder.outputs[-1].finish_reasons == ("length",) * 3
    assert [sum(one.new_tokens[at] for one in responder.outputs) for at in range(3)] == [5, 5, 5]


def test_cumulative_logprob_is_the_sum(bed: Bed) -> None:
    parameters = SamplingParameters(max_tokens=4, temperature=0.0, logprobs=2)
    outputs = RequestedOutputs(logprobs=True, cumulative_logprob=True)
    (output,) = bed.submit(ModelRequest(prompt=prompt(), parameters=parameters, outputs=outputs)).wait().outputs
    assert len(output.logprobs[0]) == output.new_tokens[0]
    assert output.cumulative_logprobs[0] == pytest.approx(sum(token.logprob for token in output.logprobs[0]))


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (ModelRequest(prompt="word " * 9000, parameters=LONG), "context_length_exceeded"),
        (ModelRequest(prompt="", parameters=LONG), "invalid_value"),
        (
            ModelRequest(prompt="a", parameters=decode('{"guided_decoding": "{\\"grammar\\": \\"start: (\\"}"}')),
            "invalid_schema",
        ),
        (ModelRequest(prompt="a", parameters=decode('{"guided_decoding": "{"}')), "invalid_value"),
        (ModelRequest(prompt="a", parameters=LONG, stream=True, with_input=True), "invalid_value"),
        (ModelRequest(prompt="a", parameters=LONG, deadline_s=0.0), "deadline_exceeded"),
        (
            ModelRequest(prompt="a", parameters=decode('{"n": 40, "max_tokens": 1900, "ignore_eos": true}')),
            "queue_full",
        ),
    ],
)
def test_refused_request_gets_one_error(bed: Bed, request_: ModelRequest, code: str) -> None:
    """Nothing stays in the engine."""
    responder = bed.submit(request_).wait()
    assert responder.error is not None
    assert responder.error.code == code
    assert bed.comes_to_rest()
    assert responder.late == 0


class EarlyRefusal:
    """An engine that refuses the first job of a request before it has got the others. `jobs`: those that it keeps."""

    def __init__(self, emit: Emit, responder: RecordingResponder) -> None:
        self._emit, self._responder = emit, responder
        self.jobs: list[int] = []

    def submit(self, job: SequenceRequest) -> None:
        if self._responder.ended.is_set():
            self.jobs.append(job.id)
            return
        self._emit([Emission(job.id, error="queue_full", detail="8 jobs are waiting already")])
        self._responder.wait()

    def cancel(self, job_id: int) -> None:
        if job_id in self.jobs:
            self.jobs.remove(job_id)

    def stats(self) -> EngineStats:
        return EngineStats(running=0, waiting=0, tokens_per_s=0.0, kv_used=0, kv_total=0, steps=0, rss_bytes=0)

    def close(self) -> None:
        pass


def test_jobs_that_reach_the_engine_after_their_requests_end_are_cancelled() -> None:
    """The caller's thread may be slower than the engine's refusal."""
    responder, made = RecordingResponder(), list[EarlyRefusal]()

    def start(emit: Emit, on_failure: OnFailure) -> EarlyRefusal:
        made.append(EarlyRefusal(emit, responder))
        return made[0]

    runtime = ModelRuntime(start, report=lambda stats: None, broken=lambda: None)
    runtime.submit(ModelRequest(prompt="a", parameters=SamplingParameters(n=3, max_tokens=1900)), responder)
    assert responder.error is not None
    assert responder.error.code == "queue_full"
    assert not made[0].jobs
    runtime.close()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
def test_cancelled_request_frees_its_sequences(bed: Bed, stream: bool, n: int) -> None:
    parameters = SamplingParameters(n=n, max_tokens=1900, temperature=0.0, ignore_eos=True)
    before = bed.engine.stats().steps
    responder = bed.submit(ModelRequest(prompt=prompt(), parameters=parameters, stream=stream))
    responder.cancelled = True
    responder.wait()
    assert responder.error is not None
    assert responder.error.code == "client_gone"
    assert bed.comes_to_rest()
    assert bed.engine.stats().steps - before < 1500


@pytest.mark.parametrize("n", [1, 3])
def test_request_is_cancelled_by_its_call_name(bed: Bed, n: int) -> None:
    """All of its sequences end, and those of no other request; an unknown or ended name does nothing.

    The last response counts the prompt, and what was generated until the engine stopped.
    """
    assert bed.comes_to_rest()
    before = bed.engine.stats().generated
    parameters = SamplingParameters(n=n, max_tokens=1900, temperature=0.0, ignore_eos=True)
    other = bed.submit(
        ModelRequest(prompt=prompt(), parameters=SamplingParameters(max_tokens=300, ignore_eos=True), call_name="b")
    )
    responder = bed.submit(ModelRequest(prompt=prompt(), parameters=parameters, stream=True, call_name="a"))
    assert responder.began.wait(PATIENCE_S)
    for name in ("unknown", "a", "a"):
        bed.runtime.cancel(name)
    responder.wait()
    assert responder.error is None
    assert responder.outputs[-1].finish_reasons == (None,) * n
    assert responder.outputs[-1].input_tokens > 0
    tokens = sum(sum(one.new_tokens) for one in responder.outputs)
    assert 0 < tokens < 1900 * n
    assert other.wait().error is None
    assert bed.comes_to_rest()
    assert responder.late == 0
    assert not bed.runtime.call_names
    assert bed.engine.stats().generated - before == tokens + 300


def test_a_request_that_was_cancelled_before_it_came_does_not_run(bed: Bed) -> None:
    """Its last response counts nothing, or what a step generated meanwhile."""
    assert bed.comes_to_rest()
    before = bed.engine.stats().generated
    bed.runtime.cancel("early")
    responder = bed.submit(ModelRequest(prompt=prompt(), parameters=LONG, stream=True, call_name="early")).wait()
    assert responder.error is None
    assert bed.comes_to_rest()
    tokens = sum(sum(one.new_tokens) for one in responder.outputs)
    assert (bed.engine.stats().generated - before, responder.late) == (tokens, 0)
    assert tokens < 1900


def test_the_tokens_of_a_stream_are_counted_before_its_deadlines_error(bed: Bed) -> None:
    assert bed.comes_to_rest()
    before = bed.engine.stats().generated
    request = ModelRequest(prompt=prompt(), parameters=LONG, stream=True, deadline_s=0.2)
    responder = bed.submit(request).wait()
    assert responder.error is not None
    assert responder.error.code == "deadline_exceeded"
    assert bed.comes_to_rest()
    assert sum(sum(one.new_tokens) for one in responder.outputs) == bed.engine.stats().generated - before
    assert not responder.outputs or responder.outputs[-1].input_tokens > 0


def test_requests_beyond_the_engines_sequences_wait(bed: Bed) -> None:
    parameters = SamplingParameters(max_tokens=8, temperature=0.0)
    responders = [bed.submit(ModelRequest(prompt=prompt(str(n)), parameters=parameters, stream=True)) for n in range(8)]
    for one in responders:
        assert one.wait().error is None


def test_embedding_is_one_response(bed: Bed) -> None:
    (output,) = bed.submit(ModelRequest(prompt="hello", parameters=SamplingParameters(), embed=True)).wait().outputs
    assert len(output.embedding) > 8


def test_broken_engine_is_reported_after_its_last_responses() -> None:
    """The process may end, to be reloaded, only when every request has its error."""
    bed = Bed()
    responder = bed.submit(ModelRequest(prompt=prompt(), parameters=LONG, stream=True))
    assert responder.began.wait(PATIENCE_S)
    bed.engine.close()  # every job gets its end
    assert bed.on_failure is not None
    bed.on_failure(RuntimeError("no cells"))
    assert bed.broken.wait(PATIENCE_S)
    assert responder.ended.is_set()
    assert responder.error is not None
    assert responder.error.code == "engine_unavailable"
