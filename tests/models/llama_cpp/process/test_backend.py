"""The device's model as a Backend: a real child process, real crashes, requests in and Chunks out."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec
import psutil
import pytest
import uvloop

from causeway_server.edge_node.backends.backend import BackendRequest
from causeway_server.edge_node.backends.engine.backend import DECLINED, EngineBackend, EngineModel
from causeway_server.edge_node.config.schema import EngineConfig
from causeway_server.models.catalog.artifact import find_artifact
from causeway_server.router.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineCrashed,
    EngineUnavailable,
    InvalidGrammar,
    InvalidRequest,
    UnsupportedFeature,
)
from causeway_server.router.types import (
    Chunk,
    Confidence,
    ImagePart,
    Message,
    Request,
    ResponseFormat,
    Sampling,
    Target,
    Tool,
    ToolChoice,
)
from causeway_train.evaluate.greedy import GreedyModel
from causeway_train.function_calls.call import parse_call
from tests.jumping_loop import JumpingLoop, run_jumping
from tests.waiting import until

from ..tiny_gguf import CONTROL, write_tiny_gguf

pytestmark = pytest.mark.engine

TARGET = Target(name="small", at="edge", model="tiny")
CONFIG = EngineConfig(threads=1, sequences=4)
GREEDY = Sampling(temperature=0.0)
TIMEOUT_S = 60.0
MakeBackend = Callable[..., EngineBackend]
ENDLESS_TOKENS = 8000


def now() -> float:
    return asyncio.get_running_loop().time()


def chat(text: str = "hello", **fields: object) -> Request:
    fields = {"sampling": GREEDY, "max_tokens": 8, **fields}
    return Request(kind="chat", model="small", messages=(Message(role="user", content=text),), **fields)  # type: ignore[arg-type]


def call(request: Request, **fields: object) -> BackendRequest:
    fields = {"deadline": now() + TIMEOUT_S, **fields}
    return BackendRequest(id="d1", request=request, target=TARGET, **fields)  # type: ignore[arg-type]


async def answer(backend: EngineBackend, request: Request, **fields: object) -> list[Chunk]:
    return [chunk async for chunk in backend.generate(call(request, **fields))]


def text(chunks: list[Chunk], index: int = 0) -> str:
    return "".join(chunk.text for chunk in chunks if chunk.index == index)


def finish(chunks: list[Chunk], index: int = 0) -> str | None:
    return next((c.finish_reason for c in chunks if c.finish_reason and c.index == index), None)


def repair(path: Path, good: Path) -> None:
    """Replace a bad file atomically."""
    shutil.copy(good, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A context large enough for answers that take long enough to be interrupted."""
    return write_tiny_gguf(tmp_path_factory.mktemp("model") / "roomy.gguf", context=8192)


@pytest.fixture
async def make_backend(tiny_model: Path) -> AsyncIterator[Callable[..., EngineBackend]]:
    """Make backends, not started yet; close them at the end."""
    backends: list[EngineBackend] = []

    def make(path: Path = tiny_model, config: EngineConfig = CONFIG, **fields: object) -> EngineBackend:
        backends.append(EngineBackend(path, config, **fields))  # type: ignore[arg-type]
        return backends[-1]

    yield make
    for backend in backends:
        await backend.close()


@pytest.fixture
async def backend(make_backend: MakeBackend) -> EngineBackend:
    backend = make_backend(model=EngineModel(refuse_token="<|refuse|>"))
    await backend.start()
    await backend.ready(now() + TIMEOUT_S)
    return backend


async def test_an_answer_is_chunks_and_then_usage(backend: EngineBackend) -> None:
    """One finish_reason, and only the last chunk has usage."""
    chunks = await answer(backend, chat())
    assert finish(chunks) == "length"
    assert sum(chunk.tokens for chunk in chunks) == 8
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.completion_tokens, chunks[-1].text) == (8, "")
    assert chunks[-1].usage.prompt_tokens == await backend.count(chat())
    assert [c.usage for c in chunks[:-1]] == [None] * (len(chunks) - 1)


async def test_the_child_has_no_secret_of_the_daemons(
    make_backend: MakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads weights of others, and calls native code on them."""
    monkeypatch.setenv("CAUSEWAY_CLOUDS__MAIN__KEY", "secret")  # the environment is what is under test
    backend = make_backend()
    await backend.start()
    await backend.ready(now() + TIMEOUT_S)
    children = [
        one for one in psutil.Process().children() if "causeway_server.models.llama_cpp.process.child" in one.cmdline()
    ]
    assert children
    assert all("secret" not in child.environ().values() for child in children)
    assert finish(await answer(backend, chat())) == "length"


async def test_many_answers_run_together(backend: EngineBackend) -> None:
    """More than the engine has slots."""
    answers = await asyncio.gather(*(answer(backend, chat(f"hello {i}", max_tokens=30)) for i in range(12)))
    assert all(sum(c.tokens for c in chunks) == 30 or finish(chunks) == "stop" for chunks in answers)


async def test_choices_have_indices_and_share_the_prompt(backend: EngineBackend) -> None:
    """Choices of a seed differ, and the prompt counts once."""
    request = chat(" ".join(["turn"] * 50), n=3, sampling=Sampling(seed=7), max_tokens=12)
    first, again = await answer(backend, request), await answer(backend, request)
    assert len({text(first, index) for index in range(3)}) == 3
    assert all(finish(first, index) for index in range(3))
    assert first[-1].usage is not None
    assert first[-1].usage.prompt_tokens == await backend.count(request)
    assert again[-1].usage is not None
    assert again[-1].usage.cached_tokens > 40


async def test_choices_of_a_seed_repeat(make_backend: MakeBackend) -> None:
    """One sequence at a time: the other rows of a batch change how logits are rounded."""
    backend = make_backend(config=EngineConfig(threads=1, sequences=1))
    await backend.start()
    request = chat(" ".join(["turn"] * 50), n=3, sampling=Sampling(seed=7), max_tokens=12)
    await answer(backend, request)
    first, again = await answer(backend, request), await answer(backend, request)
    texts = [text(first, index) for index in range(3)]
    assert len(set(texts)) == 3
    assert [text(again, index) for index in range(3)] == texts


async def test_completions_take_several_prompts(backend: EngineBackend) -> None:
    """Choice c of prompt p has index p·n + c; text, tokens and echo work."""
    request = Request(
        kind="completion", model="small", prompts=("hello", (300, 301)), n=2, max_tokens=3, echo=True, sampling=GREEDY
    )
    chunks = await answer(backend, request)
    assert {chunk.index for chunk in chunks if chunk.usage is None} == {0, 1, 2, 3}
    assert text(chunks, 1).startswith("hello")
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.prompt_tokens == await backend.count(request) == 3


async def test_confidence_comes_with_the_first_tokens_of_choice_0(backend: EngineBackend) -> None:
    """Without a handoff it is not computed."""
    chunks = await answer(backend, chat(n=2), confidence_tokens=3)
    reported = [(chunk.index, chunk.confidence.tokens) for chunk in chunks if chunk.confidence]
    assert reported == [(0, 1), (0, 2), (0, 3)]
    assert not any(chunk.confidence for chunk in await answer(backend, chat()))


async def test_a_refusal_ends_the_answer_where_a_handoff_is_possible(backend: EngineBackend) -> None:
    """Otherwise the model continues with its best guess."""
    refusing = Sampling(temperature=0.0, logit_bias=((CONTROL.index("<|refuse|>"), 1000.0),))
    chunks = await answer(backend, chat(sampling=refusing), confidence_tokens=4)
    assert (text(chunks), finish(chunks)) == ("", "stop")
    assert [chunk.refusal for chunk in chunks if chunk.refusal] == [DECLINED]
    assert isinstance(chunks[0].confidence, Confidence)
    guess = await answer(backend, chat(sampling=refusing))
    assert finish(guess) == "length"
    assert not any(chunk.refusal for chunk in guess)


async def test_a_json_schema_is_obeyed(backend: EngineBackend) -> None:
    schema = '{"type":"object","properties":{"on":{"type":"boolean"}},"required":["on"],"additionalProperties":false}'
    request = chat(response_format=ResponseFormat(kind="json_schema", name="x", schema=schema), max_tokens=60)
    assert isinstance(json.loads(text(await answer(backend, request)))["on"], bool)


async def test_a_named_tool_is_called(backend: EngineBackend) -> None:
    """The call is a tool call, not text."""
    tool = Tool(
        name="light",
        parameters='{"type":"object","properties":{"on":{"type":"boolean"}},"required":["on"],"additionalProperties":false}',
    )
    request = chat(tools=(tool,), tool_choice=ToolChoice(mode="function", name="light"), max_tokens=120)
    chunks = await answer(backend, request)
    calls = [delta for chunk in chunks for delta in chunk.tool_calls]
    assert (text(chunks), finish(chunks)) == ("", "tool_calls")
    assert calls[0].name == "light"
    assert isinstance(json.loads("".join(delta.arguments for delta in calls))["on"], bool)


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (chat(" ".join(["turn"] * 9000)), ContextLengthExceeded),
        (chat(response_format=ResponseFormat(kind="json_schema", schema='{"type":"unknown"}')), InvalidGrammar),
        (chat(sampling=Sampling(temperature=0.0, logit_bias=((99999, 1.0),))), InvalidRequest),
        (Request(kind="completion", model="small", prompts=("",)), InvalidRequest),
        (Request(kind="completion", model="small", prompts=("a",), suffix="b"), UnsupportedFeature),
        (
            Request(kind="chat", model="small", messages=(Message(role="user", content=(ImagePart(url="data:,"),)),)),
            UnsupportedFeature,
        ),
    ],
)
async def test_the_engine_s_refusals_are_the_caller_s_errors(
    backend: EngineBackend, request_: Request, error: type[Exception]
) -> None:
    """The engine's codes become exceptions of the error tree; the next request is answered."""
    with pytest.raises(error):
        await answer(backend, request_)
    assert finish(await answer(backend, chat()))


async def test_embeddings_come_in_the_order_of_their_texts(backend: EngineBackend) -> None:
    """A number of dimensions other than the model's is refused."""
    request = Request(kind="embedding", model="small", prompts=("hello", "world", "hello"))
    embeddings = await backend.embed(call(request))
    assert embeddings.vectors[0] == pytest.approx(embeddings.vectors[2], abs=1e-5)
    assert embeddings.vectors[0] != pytest.approx(embeddings.vectors[1], abs=1e-2)
    assert embeddings.usage.prompt_tokens == await backend.count(request)
    with pytest.raises(UnsupportedFeature, match="64 dimensions"):
        await backend.embed(call(Request(kind="embedding", model="small", prompts=("a",), dimensions=7)))


async def test_closing_an_answer_cancels_its_jobs(backend: EngineBackend) -> None:
    stream = backend.generate(call(chat(n=3, max_tokens=ENDLESS_TOKENS)))
    assert (await anext(stream)).index in (0, 1, 2)
    await stream.aclose()
    assert backend.jobs == 0
    assert finish(await answer(backend, chat()))
    assert backend.signals().queue == 0


async def test_cancelling_the_reader_cancels_its_jobs(backend: EngineBackend) -> None:
    began = asyncio.Event()

    async def read() -> None:
        async for _ in backend.generate(call(chat(max_tokens=ENDLESS_TOKENS))):
            began.set()

    task = asyncio.create_task(read())
    await began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert backend.jobs == 0


async def test_a_deadline_in_the_past_is_an_error(backend: EngineBackend) -> None:
    with pytest.raises(DeadlineExceeded):
        await answer(backend, chat(max_tokens=ENDLESS_TOKENS), deadline=now())
    assert finish(await answer(backend, chat()))


async def test_the_queue_is_a_signal(backend: EngineBackend) -> None:
    """Jobs without a slot are counted; the speed is known after the first answer."""
    assert backend.signals() == type(backend.signals())(queue=0, tokens_per_s=None, loaded=True)
    pid = backend.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    reading = [asyncio.create_task(answer(backend, chat())) for _ in range(6)]
    await until(lambda: backend.jobs == 6)
    assert backend.signals().queue == 2
    os.kill(pid, signal.SIGCONT)
    await asyncio.gather(*reading)
    assert backend.signals().queue == 0
    assert (backend.signals().tokens_per_s or 0) > 0


async def test_a_killed_child_fails_its_answers_and_is_restarted(
    backend: EngineBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """The error's phase says that tokens were sent."""
    caplog.set_level(logging.INFO)
    stream = backend.generate(call(chat(max_tokens=ENDLESS_TOKENS)))
    await anext(stream)
    first = backend.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    with pytest.raises(EngineCrashed, match="SIGKILL") as caught:
        async for _ in stream:
            pass
    assert (caught.value.phase, caught.value.retryable) == ("stream", True)
    assert finish(await answer(backend, chat())) == "length"
    assert backend.pid != first
    assert backend.restarts == 1
    assert backend.state == "ready"
    lost, back = [record for record in caplog.records if record.getMessage().startswith("Engine ")]
    assert (lost.levelname, back.levelname) == ("ERROR", "INFO")
    assert "is ready again (after" in back.getMessage()


async def test_a_child_killed_before_the_first_token_says_so(backend: EngineBackend) -> None:
    """Another target may still give the whole answer."""
    assert backend.pid is not None
    os.kill(backend.pid, signal.SIGSTOP)
    reading = asyncio.create_task(answer(backend, chat()))
    await until(lambda: backend.jobs == 1)
    os.kill(backend.pid, signal.SIGKILL)
    with pytest.raises(EngineCrashed) as caught:
        await reading
    assert caught.value.phase == "first_token"


async def test_a_stuck_child_is_killed(make_backend: MakeBackend) -> None:
    """Its jobs fail, and a new child takes over."""
    backend = make_backend(stuck_s=1.5)
    await backend.start()
    await backend.ready(now() + TIMEOUT_S)
    stopped = backend.pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(EngineCrashed, match="stuck"):
        await answer(backend, chat())
    assert finish(await answer(backend, chat()))
    assert backend.pid != stopped


@pytest.mark.parametrize("stepped", [False, True])
def test_a_child_is_not_stuck_while_the_daemon_itself_was_paused(tiny_model: Path, *, stepped: bool) -> None:
    """A step that is heard after the pause, before the supervisor looks, is not one of the future."""

    async def pause(loop: JumpingLoop) -> None:
        backend = EngineBackend(tiny_model, CONFIG)
        await backend.start()
        await backend.ready(now() + TIMEOUT_S)
        pid = backend.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        reading = asyncio.create_task(answer(backend, chat(), deadline=now() + 600.0))
        await until(lambda: backend.jobs == 1)
        loop.jump()
        process = backend.serving
        assert process is not None
        if stepped:
            process.progress_at = now()
        for _ in range(10):  # the supervisor looks
            await asyncio.sleep(0)
        assert process.progress_at <= now()
        os.kill(pid, signal.SIGCONT)
        assert finish(await reading)
        assert backend.pid == pid
        await backend.close()

    run_jumping(pause)


async def test_an_idle_child_is_not_stuck(make_backend: MakeBackend) -> None:
    backend = make_backend(stuck_s=0.03)
    await backend.start()
    await backend.ready(now() + TIMEOUT_S)
    pid = backend.pid
    await asyncio.sleep(0.3)
    assert (backend.pid, backend.restarts, backend.state) == (pid, 0, "ready")


async def test_requests_wait_for_a_child_that_is_loading(make_backend: MakeBackend) -> None:
    """A count that is not available yet is None, not an error."""
    backend = make_backend()
    with pytest.raises(EngineUnavailable, match="not started"):
        await answer(backend, chat())
    await backend.start()
    assert await backend.count(chat()) is None
    assert backend.signals().loaded is False
    assert finish(await answer(backend, chat()))
    assert backend.info is not None


async def test_waiting_for_a_loading_child_ends_with_the_deadline(make_backend: MakeBackend) -> None:
    backend = make_backend()
    await backend.start()
    with pytest.raises(EngineUnavailable, match="still starting") as caught:
        await answer(backend, chat(), deadline=now())
    assert caught.value.phase == "connect"


async def test_an_engine_that_cannot_be_loaded_is_logged_once_until_it_is_ready(
    make_backend: MakeBackend, tmp_path: Path, tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """However often it is tried; its problem is told meanwhile."""
    caplog.set_level(logging.INFO, "causeway_server.edge_node.backends.engine.supervisor")
    path = tmp_path / "model.gguf"
    path.write_bytes(b"not a model")
    backend = make_backend(path)
    await backend.start()
    for _ in range(2):
        await until(lambda: backend.state == "failed")
        assert "cannot be started" in backend.problem
        await until(lambda: backend.state == "starting")
    repair(path, tiny_model)
    await backend.ready(now() + TIMEOUT_S)
    assert backend.problem == ""
    lost, back = [
        record for record in caplog.records if record.name == "causeway_server.edge_node.backends.engine.supervisor"
    ]
    assert (lost.levelname, back.levelname) == ("ERROR", "INFO")
    assert "is ready again (after" in back.getMessage()


async def test_a_model_that_cannot_be_loaded_is_refused_at_once(
    make_backend: MakeBackend, tmp_path: Path, tiny_model: Path
) -> None:
    """Once the file is repaired the engine recovers by itself."""
    path = tmp_path / "m.gguf"
    path.write_bytes(b"<html>")
    backend = make_backend(path)
    await backend.start()
    with pytest.raises(EngineUnavailable, match="not a GGUF file"):
        await backend.ready(now() + TIMEOUT_S)
    assert backend.pid is None
    repair(path, tiny_model)
    await until(lambda: backend.state == "ready")
    assert finish(await answer(backend, chat()))


async def test_closing_ends_the_child_and_its_answers(make_backend: MakeBackend) -> None:
    backend = make_backend()
    await backend.start()
    stream = backend.generate(call(chat(max_tokens=ENDLESS_TOKENS)))
    await anext(stream)
    pid = backend.pid
    assert pid is not None
    await backend.close()
    with pytest.raises(EngineCrashed, match="closed"):
        async for _ in stream:
            pass
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert backend.state == "closed"
    with pytest.raises(EngineUnavailable):
        await backend.ready(now() + 1.0)


async def test_closing_while_it_loads_leaves_no_child(make_backend: MakeBackend) -> None:
    """At any moment of the start."""
    for turns in range(4):
        backend = make_backend()
        await backend.start()
        for _ in range(turns):
            await asyncio.sleep(0)
        await backend.close()
        assert backend.pid is None


async def test_the_working_directory_does_not_shadow_our_packages(make_backend: MakeBackend, tmp_path: Path) -> None:
    """A module named `models` in the daemon's working directory is not imported by the child."""
    (tmp_path / "models.py").write_text("raise SystemExit('the wrong module')")
    with contextlib.chdir(tmp_path):
        backend = make_backend()
        await backend.start()
        await backend.ready(now() + TIMEOUT_S)


@pytest.mark.parametrize("killed", [False, True])
def test_an_event_loop_ends_without_close(tiny_model: Path, killed: bool) -> None:
    """A cancelled daemon does not hang on its child, and leaves none behind."""
    pids: list[int] = []

    async def scenario() -> None:
        backend = EngineBackend(tiny_model, CONFIG)
        await backend.start()
        stream = backend.generate(call(chat(max_tokens=ENDLESS_TOKENS)))
        await anext(stream)
        assert backend.pid is not None
        pids.append(backend.pid)
        if killed:
            os.kill(backend.pid, signal.SIGKILL)
            with pytest.raises(EngineCrashed):
                async for _ in stream:
                    pass
        await stream.aclose()

    asyncio.run(scenario())
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_it_runs_on_uvloop(tiny_model: Path) -> None:
    """Answers, a crash, and an orderly end."""

    async def scenario() -> None:
        backend = EngineBackend(tiny_model, CONFIG)
        await backend.start()
        assert finish(await answer(backend, chat()))
        assert backend.pid is not None
        os.kill(backend.pid, signal.SIGKILL)
        answers: list[Awaitable[list[Chunk]]] = [answer(backend, chat())]
        try:
            await asyncio.gather(*answers)
        except EngineCrashed:
            assert finish(await answer(backend, chat()))
        await backend.close()

    uvloop.run(scenario())


# --- models that answer with calls ------------------------------------------------------------------------------------


def prefer_letter(letter: str, path: Path) -> Sampling:
    """Greedy, with a bias that makes this letter the model's first choice at every token."""
    with GreedyModel(path, slots=1, context=64, threads=1) as model:
        (token,) = model.tokenize(letter)
    return Sampling(temperature=0.0, logit_bias=((token, 1000.0),))


async def test_call_arguments_are_copied_from_the_message(make_backend: MakeBackend) -> None:
    """Unless the manifest, the device's configuration or the request leaves the answer unconstrained."""
    artifact = find_artifact("assistant")
    sampling = prefer_letter("Q", artifact.path)
    request = chat("wake me up at six am", sampling=sampling, max_tokens=200)
    constrained = make_backend(artifact.path, model=EngineModel(answers=artifact.manifest.answers))
    config, calls = EngineConfig(threads=1, restrict_tool_arguments=False), EngineModel(answers="calls")
    unconstrained = make_backend(artifact.path, config, model=calls)
    for backend in (constrained, unconstrained):
        await backend.start()
        await backend.ready(now() + TIMEOUT_S)
    called = parse_call(text(await answer(constrained, request)))
    assert called is not None
    assert "Q" not in str(called)
    free = [
        await answer(constrained, msgspec.structs.replace(request, response_format=ResponseFormat("text"))),
        await answer(unconstrained, request),
    ]
    assert {text(chunks)[:9] for chunks in free} == {"Q" * 9}


async def test_optional_tools_keep_the_call_grammar(make_backend: MakeBackend) -> None:
    """A call of one of them is a tool call with words of the message."""
    artifact = find_artifact("assistant")
    backend = make_backend(artifact.path, model=EngineModel(answers=artifact.manifest.answers))
    await backend.start()
    tools = (Tool("alarm_set", parameters='{"type":"object","properties":{"time":{"type":"string"}}}'),)
    chunks = await answer(backend, chat("wake me up at six am", max_tokens=200, tools=tools))
    (called,) = [delta for chunk in chunks for delta in chunk.tool_calls]
    assert called.name == "alarm_set"
    assert all(value in "wake me up at six am" for value in json.loads(called.arguments).values())
    assert finish(chunks) == "tool_calls"


async def test_thoughts_are_apart_from_the_answer(make_backend: MakeBackend, tmp_path: Path) -> None:
    """Counted, bounded by the effort, and none at all if the effort is none or the answer is constrained."""
    path = write_tiny_gguf(tmp_path / "thinks.gguf", template="{{ messages[0].content }}<think>{# </think> #}")
    backend = make_backend(path)
    await backend.start()
    await backend.ready(now() + TIMEOUT_S)
    bounded = await answer(backend, chat(max_tokens=200, reasoning_effort="minimal"))
    assert "".join(chunk.reasoning for chunk in bounded)
    assert "</think>" not in text(bounded)
    assert bounded[-1].usage is not None
    assert 128 < bounded[-1].usage.reasoning_tokens < 160
    assert bounded[-1].usage.completion_tokens == 200
    endless = await answer(backend, chat(max_tokens=20))
    assert (text(endless), finish(endless)) == ("", "length")
    assert endless[-1].usage is not None
    assert endless[-1].usage.reasoning_tokens == 20
    for fields in ({"reasoning_effort": "none"}, {"response_format": ResponseFormat("json_object"), "max_tokens": 60}):
        request = chat(**fields)
        plain = await answer(backend, request)
        assert text(plain)
        assert not any(chunk.reasoning for chunk in plain)
        assert plain[-1].usage is not None
        assert plain[-1].usage.prompt_tokens == await backend.count(request)
