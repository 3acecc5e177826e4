"""`causeway-models calibrate`: from prompts to an artifact, on real engines and on prepared answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from click.testing import CliRunner, Result

pytest.importorskip("llama_cpp")

from causeway_server.models.catalog.artifact import ArtifactError, DataSource, find_artifact, find_signal
from causeway_server.models.cli.commands import main
from causeway_server.models.comparison.prompts import EvaluationPrompt
from causeway_server.models.signals.pair import ModelIdentity, PairEstimator
from causeway_server.router.errors import BackendError
from causeway_server.router.types import Confidence
from causeway_train.calibrate.collect import EndpointAnswerer, collect
from causeway_train.calibrate.prompts import AnswerLog, ModelAnswer, Pair, PairAnswers, label

from .pairs import answered, prompts

pytestmark = pytest.mark.slow

ASKED = prompts(160)
SOURCE = DataSource("Questions", "MIT", "Someone et al. 2020")


def call(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


def write_prompts(path: Path, asked: Sequence[EvaluationPrompt]) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in asked))
    return path


def identity(name: str) -> ModelIdentity:
    return ModelIdentity(name, find_artifact(name).manifest.sha256)


def prepared(folder: Path, *, telling: bool) -> list[object]:
    """Answers of the shipped pair to `ASKED`; returns the command that calibrates on them."""
    with AnswerLog(folder / "run" / "answers.jsonl", Pair(identity("assistant"), identity("assistant-large"))) as log:
        for row in answered(ASKED, seed=1, telling=telling).values():
            log.append(row)
    files = write_prompts(folder / "prompts.jsonl", ASKED)
    names = ["--small", "assistant", "--large", "assistant-large"]
    return ["calibrate", *names, "--prompts", files, "--run-dir", folder / "run", "--to", folder / "to", "--no-ask"]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A folder with a calibrated pair, and what the command printed."""
    folder = tmp_path_factory.mktemp("pair")
    sources = folder / "sources.jsonl"
    sources.write_bytes(msgspec.json.encode(SOURCE))
    return folder / "to", call(*prepared(folder, telling=True), "--keep", "0.9", "--sources", sources)


def test_the_command_publishes_signals_with_report_and_policy_line(calibrated: tuple[Path, Result]) -> None:
    """The artifact belongs to both weights; the report has curves and the line to paste."""
    to, result = calibrated
    assert result.exit_code == 0, result.output
    assert "handoff: {after_tokens: 24, below: 0." in result.output
    folder = to / "calibrated-assistant"
    for name in ("routing.svg", "calibration.svg"):
        assert (folder / name).read_text().startswith("<svg")
    for page in ("README.md", "report.md"):
        assert "90% of the large model's quality" in (folder / page).read_text()
    signal = find_signal("pair", find_artifact("assistant"), (to,))
    assert signal.manifest.data == (SOURCE,)
    assert "Questions (MIT): Someone et al. 2020" in (folder / "README.md").read_text()
    estimator = PairEstimator.for_models(signal, find_artifact("assistant"), find_signal("embedding"))
    assert estimator.parameters.large == identity("assistant-large")
    easy, hard = (estimator.quality(one.question) for one in ASKED[:2])
    assert easy > 0.6 > 0.4 > hard
    sure, unsure = (Confidence(3, score, -1 + score, score, 1 - score, least=-1 + score) for score in (0.9, 0.1))
    question = ASKED[0].question
    probabilities = [estimator(one, 24, question, easy, ended=True) for one in (sure, unsure)]
    assert 1.0 > probabilities[0] > probabilities[1] > 0.0


def test_signals_of_other_weights_are_refused(calibrated: tuple[Path, Result]) -> None:
    """Of the small model, and of the sentence encoder."""
    to, _ = calibrated
    signal, encoder = find_signal("pair", None, (to,)), find_signal("embedding")
    for small, other in (("assistant-large", encoder), ("assistant", find_signal("edge.quality"))):
        with pytest.raises(ArtifactError, match=r"made for .* but .* has another sha256"):
            PairEstimator.for_models(signal, find_artifact(small), other)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"small": 1}', b"\xff"])
def test_garbled_signals_are_refused(calibrated: tuple[Path, Result], tmp_path: Path, content: bytes) -> None:
    to, _ = calibrated
    signal = find_signal("pair", None, (to,))
    (tmp_path / "model.json").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"model\.json"):
        PairEstimator.for_models(
            msgspec.structs.replace(signal, path=tmp_path / "model.json"),
            find_artifact("assistant"),
            find_signal("embedding"),
        )


def test_noise_is_reported_and_not_published(tmp_path: Path) -> None:
    result = call(*prepared(tmp_path, telling=False))
    assert result.exit_code == 0, result.output
    assert "Nothing to route on these prompts" in result.output
    assert "handoff:" not in result.output
    assert not (tmp_path / "to" / "calibrated-assistant" / "manifest.json").exists()


def test_published_signals_are_checked_on_prompts_that_their_fit_did_not_see(
    calibrated: tuple[Path, Result], tmp_path: Path
) -> None:
    """Nothing is fitted or published; the figures are of the new prompts, where the small model is always wrong."""
    to, _ = calibrated
    signals = (to / "calibrated-assistant" / "model.json").read_bytes()
    others = [msgspec.structs.replace(one, prompt=f"{one.prompt} Please.") for one in ASKED]
    with AnswerLog(tmp_path / "answers.jsonl", Pair(identity("assistant"), identity("assistant-large"))) as log:
        for row in answered(others, seed=2).values():
            log.append(msgspec.structs.replace(row, small=msgspec.structs.replace(row.small, text="no idea")))
    command = ["calibrate", "--small", "assistant", "--large", "assistant-large", "--run-dir", tmp_path, "--no-ask"]
    command += ["--prompts", write_prompts(tmp_path / "others.jsonl", others), "--check"]
    result = call(*command, "--to", to)
    assert result.exit_code == 0, result.output
    assert (to / "calibrated-assistant" / "model.json").read_bytes() == signals
    report = (tmp_path / "report.md").read_text()
    assert "nothing is fitted on these prompts" in report
    assert "| all prompts | 160 | 0.0% |" in report
    below = json.loads(signals)["handoff"]["below"]
    assert f"| handoff after 24 tokens | {below:.3f} |" in report
    assert "no pair of models with assistant is calibrated" in call(*command, "--to", tmp_path / "empty").output


def test_wrong_options_and_files_are_refused_in_one_line(tmp_path: Path) -> None:
    command = prepared(tmp_path, telling=True)
    assert "must be given together" in call(*command, "--judge", "m").output
    assert "exclude each other" in call(*command, "--keep", "0.9", "--cloud-share", "0.1").output
    shadow = ["calibrate", "--small", "assistant", "--large", "l", "--from-shadow", tmp_path, "--to", tmp_path]
    assert "leave out --keep" in call(*command, "--check", "--keep", "0.9").output
    assert "--check needs --prompts" in call(*shadow, "--check").output
    (tmp_path / "sources.jsonl").write_text('{"name": "x"}\n')
    assert (
        "sources.jsonl:1: Object missing required field"
        in call(*command, "--sources", tmp_path / "sources.jsonl").output
    )
    (tmp_path / "prompts.jsonl").write_text("garbage\n")
    assert f"{tmp_path}/prompts.jsonl:1: " in call(*command).output


def test_real_models_are_asked_and_a_second_run_asks_only_what_is_missing(tmp_path: Path) -> None:
    """The shipped pair, on six commands; too few to fit on is said, and the answers stay."""
    few = [EvaluationPrompt(prompt=f"set an alarm at {hour} am") for hour in range(1, 7)]
    command = ["calibrate", "--small", "assistant", "--large", "assistant-large", "--run-dir", tmp_path / "run"]
    command += ["--to", tmp_path / "to", "--threads", "1", "--context", "1024"]
    first = call(*command, "--prompts", write_prompts(tmp_path / "four.jsonl", few[:4]))
    assert first.output.startswith("Asking 4 prompts; the answers are stored. A fit needs at least 50")
    assert "4 prompts are answered, but a fit needs at least 50" in first.output
    before = (tmp_path / "run" / "answers.jsonl").read_bytes()
    second = call(*command, "--prompts", write_prompts(tmp_path / "six.jsonl", few))
    assert "6 prompts are answered" in second.output
    after = (tmp_path / "run" / "answers.jsonl").read_bytes()
    assert after.startswith(before)
    rows = [json.loads(line) for line in after.splitlines()[1:]]
    assert len(rows) == 6
    for row in rows:
        assert row["small"]["confidences"][0]["tokens"] == 1
        assert "alarm" in row["large"]["text"]


@asynccontextmanager
async def endpoint(replies: list[web.Response]) -> AsyncIterator[str]:
    """An OpenAI endpoint that sends these replies, in order."""

    async def reply(_: web.Request) -> web.Response:
        return replies.pop(0)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", reply)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def completion(text: str) -> web.Response:
    return web.json_response({"choices": [{"message": {"content": text}, "finish_reason": "stop"}]})


async def no_pause(_: float) -> None:
    """Ask again at once."""


async def test_an_endpoint_that_is_overloaded_is_asked_again() -> None:
    busy = [web.Response(status=503), web.Response(status=429)]
    async with endpoint([*busy, completion("yes")]) as url, EndpointAnswerer(url, "m", "key", no_pause) as large:
        assert (await large.answer(ASKED[0])).text == "yes"


@pytest.mark.parametrize(
    ("reply", "fault"),
    [
        (web.Response(status=401, text="no such key"), "HTTP 401: no such key"),
        (web.Response(text="hello"), "other than a chat completion: hello"),
        (web.json_response({"choices": []}), "other than a chat completion"),
        (web.json_response([1]), "other than a chat completion"),
    ],
)
async def test_an_endpoint_that_sends_garbage_ends_the_run(reply: web.Response, fault: str) -> None:
    async with endpoint([reply]) as url, EndpointAnswerer(url, "m", pause=no_pause) as large:
        with pytest.raises(BackendError, match=fault):
            await large.answer(ASKED[0])


class Scripted:
    """A model that answers until it is gone."""

    def __init__(self, answers: int) -> None:
        self.left = answers

    async def answer(self, prompt: EvaluationPrompt) -> ModelAnswer:
        if not self.left:
            raise BackendError("gone", phase="connect")
        self.left -= 1
        return answered([prompt], seed=1)[prompt.id].small


class PrefersTheLongerAnswer:
    """A judge that reads its question."""

    def __init__(self) -> None:
        self.asked = 0

    async def answer(self, prompt: EvaluationPrompt) -> ModelAnswer:
        self.asked += 1
        first, second = prompt.prompt.split("First answer:\n")[1].split("\n\nSecond answer:\n")
        return ModelAnswer("C" if len(first) == len(second) else "A" if len(first) > len(second) else "B")


async def test_a_judge_compares_the_answers_to_prompts_without_a_reference(tmp_path: Path) -> None:
    """Also those that are answered already; each once, whichever answer comes first."""
    without = [EvaluationPrompt(prompt=f"Tell me about {number}") for number in range(12)]
    asked = [*without, ASKED[0]]
    texts = {"short": [False, 0.0], "as long": [True, 1.0], "much longer": [True, 1.0]}
    judge = PrefersTheLongerAnswer()
    with AnswerLog(tmp_path / "answers.jsonl", Pair(identity("assistant"), ModelIdentity("large"))) as log:
        for prompt, text in zip(asked, [*texts, *texts, *texts, *texts, "short"], strict=True):
            small = ModelAnswer(text, confidences=(Confidence(1, 0.9, -0.1, 0.8, 0.3),))
            log.append(PairAnswers(prompt.id, prompt.task, small, ModelAnswer("so long")))
        for _ in range(2):
            await collect(asked, Scripted(0), Scripted(0), log, parallel=2, judge=judge)
        labelled = label(without, log.rows, None)
        judged = [log.rows[prompt.id].judged for prompt in asked]
    assert judge.asked == 12
    assert judged == [*[found for found, _ in texts.values()] * 4, None]
    assert [one.small for one in labelled] == [grade for _, grade in texts.values()] * 4


async def test_what_was_answered_before_a_model_went_away_is_kept(tmp_path: Path) -> None:
    pair = Pair(identity("assistant"), ModelIdentity("large"))
    with AnswerLog(tmp_path / "answers.jsonl", pair) as log:
        with pytest.raises(BackendError, match="gone"):
            await collect(ASKED, Scripted(5), Scripted(100), log, parallel=2)
        assert len(log.rows) == 5
        await collect(ASKED, Scripted(155), Scripted(155), log, parallel=2)
    with AnswerLog(tmp_path / "answers.jsonl", pair) as log:
        assert set(log.rows) == {prompt.id for prompt in ASKED}
