"""`causeway-train distill`: a teacher behind a real socket, a tiny student, and the published model."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from .requirements import need_training_packages

need_training_packages()

import msgspec  # noqa: E402
import torch  # noqa: E402
from click.testing import CliRunner, Result  # noqa: E402

from causeway_server.models.catalog.artifact import ArtifactError, load_artifact, save_manifest  # noqa: E402
from causeway_server.models.cli.commands import main as causeway_models  # noqa: E402
from causeway_server.models.comparison.prompts import EvaluationPrompt  # noqa: E402
from causeway_server.router.errors import BackendError  # noqa: E402
from causeway_train.cli.commands import main  # noqa: E402
from causeway_train.distill.adapter import write_adapter, write_merged  # noqa: E402
from causeway_train.distill.examples import ExampleEncoder, agreed, is_held_back  # noqa: E402
from causeway_train.distill.network import Student, read_student  # noqa: E402
from causeway_train.distill.run import read_progress  # noqa: E402
from causeway_train.distill.teacher import (  # noqa: E402
    Teacher,
    TeacherAnswer,
    TeacherAnswers,
    TeacherLog,
    TeacherSettings,
    TeacherToken,
    ask_all,
)
from causeway_train.distill.trainer import AdapterPlan, AdapterTrainer, LearnedAnswer  # noqa: E402
from causeway_train.evaluate.greedy import GreedyModel  # noqa: E402
from tests.models.llama_cpp.tiny_gguf import write_tiny_gguf  # noqa: E402

pytestmark = [pytest.mark.engine, pytest.mark.slow]
SETTINGS = TeacherSettings("teacher", 1)
PROMPTS = [EvaluationPrompt(prompt=f"turn {side} the light {number}") for side in ("on", "off") for number in range(30)]
Answer = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


def completion(text: str, reason: str = "stop", tokens: Sequence[str] = ()) -> dict[str, Any]:
    """A chat completion with certain tokens."""
    content = [{"token": one, "logprob": 0.0, "top_logprobs": [{"token": one, "logprob": 0.0}]} for one in tokens]
    message = {"role": "assistant", "content": text}
    logprobs = {"content": content} if content else None
    return {"choices": [{"message": message, "finish_reason": reason, "logprobs": logprobs}]}


def send(request: BaseHTTPRequestHandler, body: bytes, status: int = 200, length: int | None = None) -> None:
    request.send_response(status)
    request.send_header("content-type", "application/json")
    request.send_header("content-length", str(len(body) if length is None else length))
    request.end_headers()
    request.wfile.write(body)


def answer_light(request: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """Answer with one of two texts, which are two tokens of the student each."""
    tokens = ("turn", " it") if " on " in body["messages"][-1]["content"] else ("set", " stop")
    send(request, json.dumps(completion("".join(tokens), tokens=tokens)).encode())


class TeacherServer:
    """A teacher on a socket. `answer` may be replaced; `asked` are the bodies of its requests."""

    def __init__(self) -> None:
        self.answer: Answer = answer_light
        self.asked: list[dict[str, Any]] = []
        self.free = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                outer.asked.append(body)
                outer.answer(self, body)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def answers_after(self, count: int, otherwise: Answer) -> None:
        """Answer only the first `count` requests as usual."""
        first = len(self.asked)

        def answer(request: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
            (answer_light if len(self.asked) - first <= count else otherwise)(request, body)

        self.answer = answer


@pytest.fixture
def teacher() -> Iterator[TeacherServer]:
    server = TeacherServer()
    thread = threading.Thread(target=server.server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.free.set()
    server.server.shutdown()
    server.server.server_close()
    thread.join()


@pytest.fixture
def student(tmp_path: Path) -> Path:
    return write_tiny_gguf(tmp_path / "tiny.gguf")


async def no_pause(_: float) -> None:
    return None


def run(tmp_path: Path, student: Path, url: str, *options: object) -> Result:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": one.prompt}) + "\n" for one in PROMPTS))
    given = ["--student", student, "--teacher", url, "--teacher-model", "teacher", "--prompts", prompts]
    folders = ["--run", tmp_path / "run", "--to", tmp_path / "models", "--name", "lights"]
    plan = ["--rank", 4, "--learning-rate", 0.03, "--batch-rows", 18, "--report-minutes", 0, "--quantisation", "Q8_0"]
    return CliRunner().invoke(main, ["distill", *map(str, (*given, *folders, *plan, *options))])


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_student_in_torch_is_the_one_of_llama_cpp(tmp_path: Path, architecture: str) -> None:
    """With an adapter, alone beside it and merged; a prefix that the rows share changes nothing."""
    base = write_tiny_gguf(tmp_path / "tiny.gguf", architecture=architecture)
    student = Student(base, 4, dtype=torch.float32)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.normal_(0.0, 0.1)
    write_merged(base, student, tmp_path / "merged.gguf", "merged")
    ids = list(range(20, 44))
    rows = torch.tensor([ids[8:], ids[8:]])
    with torch.no_grad():
        whole = student([], torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool))
        shared = student(ids[:8], rows, torch.ones(rows.shape, dtype=torch.bool))
    assert torch.allclose(shared, torch.cat((whole[8:], whole[8:])), atol=1e-4)
    with GreedyModel(tmp_path / "merged.gguf", slots=1, exact_cache=True) as model:
        merged = torch.from_numpy(model.logits(ids))
    assert torch.allclose(whole, merged, atol=0.05)  # the merged matrices are F16
    with GreedyModel(base, slots=1, exact_cache=True) as model:
        assert not torch.allclose(whole, torch.from_numpy(model.logits(ids)), atol=0.5)


def test_a_model_is_distilled_published_and_learned_its_teacher_s_answers(
    tmp_path: Path, student: Path, teacher: TeacherServer
) -> None:
    done = run(tmp_path, student, teacher.url, "--epochs", 12)
    assert done.exit_code == 0, done.output
    learned = [one for one in PROMPTS if not is_held_back(one)]
    assert f"{len(learned)} of {len(learned)} answers are learned" in done.output
    assert len(teacher.asked) == len(PROMPTS)
    log = read_progress(tmp_path / "run" / "log.jsonl")
    assert log[-1].loss < 0.2 * log[0].loss
    model = load_artifact(tmp_path / "models" / "lights")
    assert model.manifest.metrics["model/all"] > model.manifest.metrics["student/all"]
    assert model.manifest.command.startswith("causeway-train ")
    assert "<svg" in (model.folder / "loss.svg").read_text()
    assert "held back from training" in (model.folder / "README.md").read_text()
    added = CliRunner().invoke(
        causeway_models, ["add", str(student), "--name", "base", "--to", str(tmp_path / "models")]
    )
    assert added.exit_code == 0, added.output
    adapter = ["add-adapter", "base", str(tmp_path / "run" / "adapter.gguf"), "--models", str(tmp_path / "models")]
    assert CliRunner().invoke(causeway_models, adapter).exit_code == 0


def test_a_run_whose_teacher_failed_goes_on_with_the_rest(
    tmp_path: Path, student: Path, teacher: TeacherServer
) -> None:
    """The answers so far are not asked again, not even when the last line was cut by a kill; nor is training redone."""
    teacher.answers_after(25, lambda request, _: send(request, b"{}", 401))
    failed = run(tmp_path, student, teacher.url, "--epochs", 1, "--parallel", 1)
    assert failed.exit_code == 1
    assert "25 of 60 prompts are answered" in failed.output
    answers = tmp_path / "run" / "answers.jsonl"
    answers.write_bytes(answers.read_bytes()[:-7])
    teacher.answer = answer_light
    teacher.asked.clear()
    assert run(tmp_path, student, teacher.url, "--epochs", 1).exit_code == 0
    assert len(teacher.asked) == 60 - 24
    steps = read_progress(tmp_path / "run" / "log.jsonl")[-1].step
    again = run(tmp_path, student, teacher.url, "--epochs", 2, "--name", "more")
    assert again.exit_code == 0, again.output
    assert f"resumes at step {steps}" in again.output
    assert len(teacher.asked) == 60 - 24


def test_a_run_goes_on_after_refused_prompts_and_after_it_has_published(
    tmp_path: Path, student: Path, teacher: TeacherServer
) -> None:
    """The same command neither asks nor trains again, and publishes again only if it was killed before the card."""
    held = next(one.prompt for one in PROMPTS if is_held_back(one))

    def answer(request: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if body["messages"][-1]["content"] in (PROMPTS[1].prompt, held):
            send(request, b"content filter", 400)
        else:
            answer_light(request, body)

    assert not is_held_back(PROMPTS[1])
    teacher.answer = answer
    done = run(tmp_path, student, teacher.url, "--epochs", 1)
    assert done.exit_code == 0, done.output
    assert "2 were refused." in done.output
    teacher.asked.clear()
    model = load_artifact(tmp_path / "models" / "lights")
    card, log = model.folder / "README.md", tmp_path / "run" / "log.jsonl"
    steps = log.read_bytes()
    again = run(tmp_path, student, teacher.url, "--epochs", 1)
    assert again.exit_code == 0, again.output
    assert "is published already" in again.output
    assert (log.read_bytes(), teacher.asked, load_artifact(model.folder)) == (steps, [], model)
    card.unlink()
    assert run(tmp_path, student, teacher.url, "--epochs", 1).exit_code == 0
    assert card.is_file()
    save_manifest(msgspec.structs.replace(model.manifest, command="causeway-train distill another"), model.folder)
    taken = run(tmp_path, student, teacher.url, "--epochs", 1)
    assert taken.exit_code == 1
    assert "exists already" in taken.output


def stall(server: TeacherServer) -> Answer:
    def answer(_request: BaseHTTPRequestHandler, _body: dict[str, Any]) -> None:
        server.free.wait(30)

    return answer


FAULTS: dict[str, Callable[[TeacherServer], Answer]] = {
    "overloaded": lambda _: lambda request, body: send(request, b"{}", 503),
    "refused": lambda _: lambda request, body: send(request, b"no", 401),
    "slow": stall,
    "cut": lambda _: lambda request, body: send(request, b'{"choices"', length=500),
    "nonsense": lambda _: lambda request, body: send(request, b"<html>"),
    "another document": lambda _: lambda request, body: send(request, b'{"choices": [{"message": 3}]}'),
    "logprobs that are none": lambda _: (
        lambda request, body: send(
            request, json.dumps({"choices": [{"message": {"content": "x"}, "logprobs": {"content": [1]}}]}).encode()
        )
    ),
}


@pytest.mark.parametrize("fault", ["down", *FAULTS])
async def test_a_teacher_that_fails_keeps_the_answers_so_far(
    tmp_path: Path, teacher: TeacherServer, fault: str
) -> None:
    """Every fault is a BackendError with its reason; a later call asks only the rest."""
    if fault == "down":
        good = 0
        url = "http://127.0.0.1:9/v1"
    else:
        good, url = 3, teacher.url
        teacher.answers_after(good, FAULTS[fault](teacher))
    with TeacherLog(tmp_path / "answers.jsonl", SETTINGS) as log:
        async with Teacher(url, SETTINGS, pause=no_pause, timeout_s=0.5) as asked:
            with pytest.raises(BackendError):
                await ask_all(PROMPTS[:8], asked, log, parallel=1, progress=lambda _: None)
    teacher.answer = answer_light
    with TeacherLog(tmp_path / "answers.jsonl", SETTINGS) as log:
        assert len(log.rows) == good
        async with Teacher(teacher.url, SETTINGS, pause=no_pause) as asked:
            await ask_all(PROMPTS[:8], asked, log, parallel=2, progress=lambda _: None)
        assert len(log.rows) == 8


async def test_a_teacher_without_log_probabilities_is_asked_without_them(
    tmp_path: Path, teacher: TeacherServer
) -> None:
    def answer(request: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if "logprobs" in body:
            send(request, b"unknown parameter", 400)
        else:
            send(request, json.dumps(completion("yes")).encode())

    teacher.answer = answer
    with TeacherLog(tmp_path / "answers.jsonl", SETTINGS) as log:
        async with Teacher(teacher.url, SETTINGS, pause=no_pause) as asked:
            await ask_all(PROMPTS[:3], asked, log, parallel=1, progress=lambda _: None)
        assert [row.samples[0].tokens for row in log.rows.values()] == [(), (), ()]
    assert len(teacher.asked) == 4  # refused once


async def test_a_prompt_that_the_teacher_refuses_is_left_out(tmp_path: Path, teacher: TeacherServer) -> None:
    """It is not asked again, and log-probabilities still are; a teacher that refuses every prompt ends the run."""
    refused = {PROMPTS[0].prompt}

    def answer(request: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if body["messages"][-1]["content"] in refused:
            send(request, b"content filter", 400)
        else:
            answer_light(request, body)

    teacher.answer = answer
    told: list[str] = []
    async with Teacher(teacher.url, SETTINGS, pause=no_pause) as asked:
        with TeacherLog(tmp_path / "answers.jsonl", SETTINGS) as log:
            await ask_all(PROMPTS[:4], asked, log, parallel=1, progress=told.append)
        with TeacherLog(tmp_path / "answers.jsonl", SETTINGS) as log:
            await ask_all(PROMPTS[:4], asked, log, parallel=1, progress=told.append)
        assert [len(log.rows[prompt.id].samples) for prompt in PROMPTS[:4]] == [0, 1, 1, 1]
        assert all(row.samples[0].tokens for row in log.rows.values() if row.samples)
        assert len(teacher.asked) == 2 + 3
        assert len(told) == 1
        assert "left out: 1." in told[0]
        refused |= {prompt.prompt for prompt in PROMPTS}
        for prompts in (PROMPTS[:3], PROMPTS):
            teacher.asked.clear()
            with TeacherLog(tmp_path / "none.jsonl", SETTINGS) as log:
                with pytest.raises(BackendError, match="content filter"):
                    await ask_all(prompts, asked, log, parallel=1, progress=told.append)
                assert not log.rows
        assert len(teacher.asked) < len(PROMPTS)


def test_answers_of_another_teacher_are_refused(tmp_path: Path) -> None:
    with TeacherLog(tmp_path / "answers.jsonl", SETTINGS):
        pass
    with pytest.raises(ArtifactError, match="Name another --run folder"):
        TeacherLog(tmp_path / "answers.jsonl", TeacherSettings("teacher", 3))


def samples(*texts: str, reason: str = "stop") -> TeacherAnswers:
    return TeacherAnswers("id", tuple(TeacherAnswer(text, reason) for text in texts))


def test_only_answers_that_agree_are_learned() -> None:
    """With the reference where there is one, or else with enough of the other samples."""
    free = EvaluationPrompt(prompt="?")
    named = EvaluationPrompt(prompt="?", answer="Paris", metric="text")
    assert agreed(free, samples("a  b", "c", "A b"), 0.6) == TeacherAnswer("a  b", "stop")
    assert agreed(free, samples("a", "b", "c"), 0.6) is None
    assert agreed(free, samples("a", reason="length"), 0.0) is None
    assert agreed(named, samples("Rome", "Paris"), 1.0) == TeacherAnswer("Paris", "stop")
    assert agreed(named, samples("Rome", "Rome"), 0.0) is None


def test_probabilities_are_learned_where_the_tokens_are_the_same(student: Path) -> None:
    """Tokens that the student does not know are left out; another cut of the answer gives no probabilities."""
    half = (("set", -0.7), ("room", -0.7), ("no such token", -9.0))
    tokens = (TeacherToken("set", half), TeacherToken(" stop", ((" stop", 0.0),)))
    with ExampleEncoder(student, 64) as encoder:
        example = encoder.encode("turn it on", TeacherAnswer("set stop", "stop", tokens))
        assert example is not None
        first_token, stop, _end = example.answer
        first, second, last = example.soft
        assert dict(first)[first_token] == pytest.approx(0.5)
        assert (second, last) == (((stop, 1.0),), ())
        other = encoder.encode("turn it on", TeacherAnswer("set stop", "stop", tokens[:1]))
        assert other is not None
        assert other.soft == ()
        assert encoder.encode("turn it on " * 30, TeacherAnswer("set stop", "stop")) is None


def test_the_teacher_s_probabilities_are_what_is_learned(tmp_path: Path, student: Path) -> None:
    """With a weight of 1 the label has no effect: the student finds both tokens equally likely."""
    example = LearnedAnswer((1, 2, 3), (60,), (((60, 0.5), (61, 0.5)),))
    plan = AdapterPlan(
        1e6, 60, 4, learning_rate=0.03, batch_rows=1, soft_weight=1.0, report_minutes=1e6, warmup_steps=1
    )
    trainer = AdapterTrainer(Student(student, 4, dtype=torch.float32), plan, tmp_path / "run")
    trainer.run([example])
    with torch.no_grad():
        logits = trainer.student([], torch.tensor([[1, 2, 3]]), torch.tensor([[False, False, True]]))
    chances = logits.softmax(-1)[0]
    assert chances[60].item() == pytest.approx(0.5, abs=0.1)
    assert chances[61].item() == pytest.approx(0.5, abs=0.1)


def test_layers_before_the_first_one_have_no_adapter(tmp_path: Path, student: Path) -> None:
    made = Student(student, 4, first_layer=1, dtype=torch.float32)
    write_adapter(made, tmp_path / "adapter.gguf", "a")
    names = [name for name, parameter in made.named_parameters() if parameter.requires_grad]
    assert len(names) == 14
    plan = AdapterPlan(1.0)
    AdapterTrainer(made, plan, tmp_path / "run").save()
    other = AdapterTrainer(Student(student, 8, dtype=torch.float32), plan, tmp_path / "run")
    with pytest.raises(ArtifactError, match="use another folder"):
        other.resume()


def test_a_student_of_another_family_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="gemma3, but that of a student must be llama, qwen2"):
        read_student(write_tiny_gguf(tmp_path / "tiny.gguf", architecture="gemma3"), torch.float32)
    (tmp_path / "junk.gguf").write_bytes(b"GGUF")
    with pytest.raises(ArtifactError, match="not a readable GGUF"):
        read_student(tmp_path / "junk.gguf", torch.float32)
